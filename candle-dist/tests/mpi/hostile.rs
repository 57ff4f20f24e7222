//! Programs that do what they should not, on processes of mpirun: they write to memory that MPI reads, start calls that nobody
//! waits for, and leave messages unread.
//!
//! Outside of mpirun, [`all`] starts the attacks, each with its own mpirun.
use super::{resident, run_with};
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::backend::mpi::Settings;
use candle_dist::init::InitOptions;
use candle_dist::testing::GROUPS;
use candle_dist::{Collective, Cut, Error, P2pOp, Pending, RankContext, ReduceOp, Result, World};
use std::io::Read;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use test_utils::Attacks;

/// How an attack must end.
enum End {
    /// All ranks succeed within this time, and say nothing.
    Quiet(Duration),
    /// mpirun fails, and the ranks say this.
    Fails(&'static str),
}

/// An attack: its name, its ranks, what each rank does, and how it must end.
struct Attack(&'static str, usize, fn(&RankContext) -> Result<()>, End);

const SOON: End = End::Quiet(Duration::from_secs(60));
/// The rank's own timeout, of half a minute for each call, says more.
const LATE: End = End::Quiet(Duration::from_secs(120));
/// Less than what an end once waited for messages that nobody receives.
const AT_ONCE: End = End::Quiet(Duration::from_secs(7));
/// Longer than a letter.
const LARGE: usize = 4 << 20;
/// The calls that a program starts before it waits for any.
const MANY: usize = 200_000;

const ATTACKS: [Attack; 23] = [
    Attack(
        "written_started",
        2,
        |ctx| case(ctx, "started", "memory may change while a call is pending"),
        SOON,
    ),
    Attack(
        "written_started",
        3,
        |ctx| case(ctx, "started", "memory may change while a call is pending"),
        SOON,
    ),
    Attack("written_sent", 2, |ctx| case(ctx, "messages", "memory may change as soon as it is sent"), SOON),
    Attack("torn", 2, torn, SOON),
    Attack("owned", 2, owned, SOON),
    Attack("freed", 2, freed, SOON),
    Attack("written_unmade", 2, written_unmade, End::Fails("for the started all_reduce(f32[4194304]")),
    Attack("written_unread", 2, written_unread, End::Fails("for a message that its receiver has not asked")),
    Attack("behind_the_backend", 2, behind_the_backend, SOON),
    Attack("many_dropped", 2, many_dropped, SOON),
    Attack("many_kept", 2, many_kept, SOON),
    Attack("many_late", 3, many_late, SOON),
    Attack("flooded", 2, |ctx| flooded(ctx, 100_000), LATE),
    Attack("flooded_ring", 3, flooded_ring, LATE),
    Attack("flooded_tags", 2, flooded_tags, LATE),
    Attack("flooded_calls", 3, flooded_calls, LATE),
    Attack("flooded_large", 2, flooded_large, LATE),
    Attack("unread_receive", 2, unread_receive, AT_ONCE),
    Attack("unread_messages", 3, unread_messages, AT_ONCE),
    Attack("calls_of_one_rank", 3, calls_of_one_rank, AT_ONCE),
    Attack("failed_while_held", 2, failed_while_held, End::Fails("no such file")),
    Attack("two_threads", 2, two_threads, End::Fails("made two calls on one group at the same time")),
    Attack("flooded_store", 2, flooded_store, SOON),
];

/// Runs an attack as a rank. Returns whether it succeeded.
pub(crate) fn rank(name: &str, settings: Settings) -> bool {
    let Attack(_, _, attack, _) =
        ATTACKS.iter().find(|attack| attack.0 == name).expect("an attack of this name");
    let timeout = if name.starts_with("written_un") { 2 } else { 30 };
    run_with(InitOptions::new().timeout(Duration::from_secs(timeout)), |_| {}, settings, attack)
}

/// Runs all attacks. They are skipped without an mpirun.
pub(crate) fn all() {
    if Command::new("mpirun").arg("--version").output().is_err() {
        return println!("SKIPPED: no mpirun on the path");
    }
    let mut attacks = Attacks::new("MPI");
    for Attack(name, ranks, run, end) in &ATTACKS {
        attacks.attack(format!("{name} on {ranks}"), || attack(mpirun, &["hostile", name], *ranks, end));
        if name.starts_with("flooded") && *name != "flooded_store" {
            attacks.attack(format!("{name} on {ranks} over TCP"), || {
                attack(over_tcp, &["hostile", name, "apart"], *ranks, end)
            });
            attacks.attack(format!("{name} on {ranks} threads"), || {
                let world = World::threads(*ranks).timeout(Duration::from_secs(30));
                world.run(run).map(drop).map_err(|error| error.to_string())
            });
        }
    }
    attacks.assert();
}

fn attack(mpirun: fn() -> Command, arguments: &[&str], ranks: usize, end: &End) -> Result<(), String> {
    let (mut status, mut out, mut took) = (None, String::new(), Duration::ZERO);
    // The PMIx library of some versions deadlocks when mpirun ends.
    for _ in 0..3 {
        let began = Instant::now();
        (status, out, took) = launch(mpirun(), ranks, arguments);
        if status.is_some() {
            break;
        }
        eprintln!("{arguments:?}: mpirun did not end within {:?}", began.elapsed());
    }
    let said = || format!("mpirun ended with {status:?} after {took:.1?}: {out}");
    let held = match end {
        End::Quiet(limit) => status == Some(true) && took < *limit && out.trim().is_empty(),
        End::Fails(text) => status == Some(false) && out.contains(text),
    };
    if held { Ok(()) } else { Err(said()) }
}

/// Returns mpirun without arguments.
pub(crate) fn mpirun() -> Command {
    Command::new("mpirun")
}

/// Returns an mpirun whose messages go over TCP, as between hosts.
fn over_tcp() -> Command {
    let mut mpirun = mpirun();
    mpirun.env("OMPI_MCA_btl", "tcp,self");
    mpirun
}

/// Runs this program as ranks with `mpirun`, or what starts it. Returns whether they succeeded, if they ended in time, their
/// output, and the time.
pub(crate) fn launch(
    mut mpirun: Command,
    ranks: usize,
    arguments: &[&str],
) -> (Option<bool>, String, Duration) {
    let version =
        Command::new("mpirun").arg("--version").output().map(|output| output.stdout).unwrap_or_default();
    if String::from_utf8_lossy(&version).contains("Open MPI") {
        mpirun.arg("--oversubscribe");
    }
    mpirun.envs([
        ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
        ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
        ("RUST_BACKTRACE", "0"),
    ]);
    mpirun.args(["-n", &ranks.to_string()]).arg(std::env::current_exe().unwrap()).args(arguments);
    let began = Instant::now();
    let mut child =
        mpirun.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (mut stdout, mut stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        let _ = stdout.read_to_string(&mut text);
        text
    });
    let errors = std::thread::spawn(move || {
        let mut text = String::new();
        let _ = stderr.read_to_string(&mut text);
        text
    });
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break Some(status.success()),
            None if began.elapsed() > Duration::from_secs(120) => {
                child.kill().unwrap();
                break None;
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    let took = began.elapsed();
    (status, reader.join().unwrap() + &errors.join().unwrap(), took)
}

fn case(ctx: &RankContext, group: &str, name: &str) -> Result<()> {
    let (_, cases) = GROUPS.iter().find(|(of, _)| *of == group).unwrap();
    (cases.iter().find(|case| case.name == name).unwrap().run)(ctx)
}

/// Checks that all elements are `value`.
fn check(tensor: &Tensor, value: f32, what: &str) -> Result<()> {
    let wrong = tensor.ne(value)?.to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()?;
    if wrong > 0.0 {
        return Err(Error::Unsupported(format!(
            "{what}: {wrong} of {} elements are not {value}",
            tensor.elem_count()
        )));
    }
    Ok(())
}

fn ones(len: usize) -> Result<Var> {
    Ok(Var::ones(len, DType::F32, &Device::Cpu)?)
}

fn write(var: &Var) -> Result<()> {
    Ok(var.set(&var.ones_like()?.affine(200.0, 0.0)?)?)
}

/// MPI moves a part of a large tensor while the program writes to it.
fn torn(ctx: &RankContext) -> Result<()> {
    let (g, other) = (ctx.group(), 1 - ctx.rank());
    for _ in 0..5 {
        let var = ones(LARGE)?;
        let view = var.as_detached_tensor().reshape((2, LARGE / 2))?.flatten_all()?;
        let sum = g.call(Collective::AllReduce(ReduceOp::Sum)).start(&view)?;
        let sent = g.call(Collective::Send { to: other, tag: 0 }).start_all(std::slice::from_ref(&view))?;
        g.send(&view, other)?;
        g.batch_send_recv(&[P2pOp::Send { tensor: view.clone(), to: other, tag: 0 }])?;
        write(&var)?;
        g.barrier()?;
        check(&sum.wait()?, 2.0, "a sum")?;
        for _ in 0..3 {
            check(&g.recv(LARGE, DType::F32, other)?, 1.0, "a message")?;
        }
        sent.wait()?;
    }
    Ok(())
}

/// A broken promise: the write waits.
fn owned(ctx: &RankContext) -> Result<()> {
    let (g, other) = (ctx.group(), 1 - ctx.rank());
    for _ in 0..5 {
        let (first, second) = (ones(LARGE)?, ones(LARGE)?);
        let sum = g.call(Collective::AllReduce(ReduceOp::Sum)).owned().start(&first.as_detached_tensor())?;
        let sent = g
            .call(Collective::Send { to: other, tag: 0 })
            .owned()
            .start_all(&[second.as_detached_tensor()])?;
        std::thread::scope(|scope| {
            let writes = [&first, &second].map(|var| scope.spawn(move || write(var)));
            check(&g.recv(LARGE, DType::F32, other)?, 1.0, "a message")?;
            check(&sum.wait()?, 2.0, "a sum")?;
            writes.into_iter().try_for_each(|write| write.join().expect("no panic"))
        })?;
        sent.wait()?;
        // Complete, though nobody has waited.
        let third = ones(LARGE)?;
        let sum = g.call(Collective::AllReduce(ReduceOp::Sum)).owned().start(&third.as_detached_tensor())?;
        g.barrier()?;
        write(&third)?;
        check(&sum.wait()?, 2.0, "a sum that is complete")?;
    }
    Ok(())
}

/// Rank 0 starts something that rank 1 never does, and breaks the promise not to write to the tensor.
fn written(ctx: &RankContext, start_and_write: fn(&RankContext, &Var) -> Result<()>) -> Result<()> {
    if ctx.rank() == 0 {
        start_and_write(ctx, &ones(LARGE)?)?;
    }
    while ctx.group().failure().is_none() {
        std::thread::sleep(Duration::from_millis(10));
    }
    ctx.group().barrier()
}

fn written_unmade(ctx: &RankContext) -> Result<()> {
    written(ctx, |ctx, var| {
        let _sum = ctx
            .group()
            .call(Collective::AllReduce(ReduceOp::Sum))
            .owned()
            .start(&var.as_detached_tensor())?;
        write(var)
    })
}

fn written_unread(ctx: &RankContext) -> Result<()> {
    written(ctx, |ctx, var| {
        let _sent = ctx
            .group()
            .call(Collective::Send { to: 1, tag: 0 })
            .owned()
            .start_all(&[var.as_detached_tensor()])?;
        write(var)
    })
}

/// Memory that is freed while it is sent.
fn freed(ctx: &RankContext) -> Result<()> {
    let (g, other) = (ctx.group(), 1 - ctx.rank());
    let memory = candle_dist::FreeableTensor::new(Tensor::ones(LARGE, DType::F32, &Device::Cpu)?)?;
    g.send(&memory.tensor()?, other)?;
    let sum = g.call(Collective::AllReduce(ReduceOp::Sum)).start(&memory.tensor()?)?;
    memory.free()?;
    let others: Vec<Tensor> =
        (0..4).map(|_| Tensor::full(9f32, LARGE, &Device::Cpu)).collect::<candle_core::Result<_>>()?;
    check(&g.recv(LARGE, DType::F32, other)?, 1.0, "a message")?;
    drop(others);
    check(&sum.wait()?, 2.0, "a sum")
}

/// Calls of the backend, which copies nothing: a write in another thread waits.
fn behind_the_backend(ctx: &RankContext) -> Result<()> {
    use candle_dist::backend::{Call, Tensors};
    let backend = ctx.group().backend();
    let var = ones(LARGE)?;
    let call = Call::on(Collective::AllReduce(ReduceOp::Sum), &var);
    let started = backend.start(call, [var.as_detached_tensor()].into_iter().collect(), Tensors::new())?;
    std::thread::scope(|scope| {
        let write = scope.spawn(|| write(&var));
        let mut made = started.finish()?.into_iter().map(|made| made.into_tensor());
        made.try_for_each(|made| check(&made, 2.0, "a sum"))?;
        write.join().expect("no panic")
    })
}

fn many_dropped(ctx: &RankContext) -> Result<()> {
    let x = Tensor::ones(4, DType::F32, &Device::Cpu)?;
    for _ in 0..MANY {
        drop(ctx.group().call(Collective::AllReduce(ReduceOp::Sum)).start(&x)?);
    }
    ctx.group().barrier()
}

fn many_kept(ctx: &RankContext) -> Result<()> {
    let x = Tensor::ones(4, DType::F32, &Device::Cpu)?;
    let calls = (0..MANY)
        .map(|_| ctx.group().call(Collective::AllReduce(ReduceOp::Sum)).start(&x))
        .collect::<Result<Vec<_>>>()?;
    for (nth, sum) in Pending::wait_all(calls)?.iter().enumerate().step_by(1000) {
        check(sum, 2.0, &format!("call {nth}"))?;
    }
    Ok(())
}

/// One rank comes later than all others, and the data is large.
fn many_late(ctx: &RankContext) -> Result<()> {
    let x = Tensor::ones(20_000, DType::F32, &Device::Cpu)?;
    if ctx.rank() == 1 {
        std::thread::sleep(Duration::from_secs(2));
    }
    for _ in 0..10_000 {
        drop(ctx.group().call(Collective::AllReduce(ReduceOp::Sum)).start(&x)?);
    }
    Ok(())
}

pub(crate) fn flooded(ctx: &RankContext, count: usize) -> Result<()> {
    flood(ctx, count, 1 - ctx.rank(), 1 - ctx.rank())
}

fn flooded_ring(ctx: &RankContext) -> Result<()> {
    let (me, n) = (ctx.rank(), ctx.world_size());
    flood(ctx, 20_000, (me + 1) % n, (me + n - 1) % n)
}

/// Sends all messages before it receives any.
fn flood(ctx: &RankContext, count: usize, to: usize, from: usize) -> Result<()> {
    let g = ctx.group();
    let (small, large) =
        (Tensor::ones(4, DType::F32, &Device::Cpu)?, Tensor::ones(10_000, DType::F32, &Device::Cpu)?);
    for nth in 0..count {
        g.call(Collective::Send { to, tag: 0 })
            .owned()
            .run_all(&[if nth % 5 == 0 { large.clone() } else { small.clone() }])
            .map(drop)?;
    }
    for nth in 0..count {
        let got = g.recv(if nth % 5 == 0 { 10_000 } else { 4 }, DType::F32, from)?;
        if nth % 1000 == 0 {
            check(&got, 1.0, "a message")?;
        }
    }
    Ok(())
}

/// The tag that was sent last is received first.
fn flooded_tags(ctx: &RankContext) -> Result<()> {
    const TAGS: u32 = 1000;
    let (g, other) = (ctx.group(), 1 - ctx.rank());
    let len = |nth: u32| if nth.is_multiple_of(5) { 10_000 } else { 4 };
    for (tag, nth) in (0..TAGS).flat_map(|tag| (0..20).map(move |nth| (tag, nth))) {
        let x = Tensor::full(tag as f32, len(nth), &Device::Cpu)?;
        drop(g.call(Collective::Send { to: other, tag }).owned().start_all(&[x])?);
    }
    for (tag, nth) in (0..TAGS).rev().flat_map(|tag| (0..20).map(move |nth| (tag, nth))) {
        check(
            &g.call(Collective::Recv { from: Some(other), tag })
                .of(len(nth), DType::F32)
                .start(None)?
                .wait()?,
            tag as f32,
            "a message",
        )?;
    }
    Ok(())
}

/// Calls in which each rank sends to each.
fn flooded_calls(ctx: &RankContext) -> Result<()> {
    let n = ctx.world_size();
    let start = |nth: usize| {
        let x =
            Tensor::full(nth as f32, (if nth.is_multiple_of(5) { 2500 * n } else { n }, 2), &Device::Cpu)?;
        ctx.group()
            .call(Collective::AllToAll {
                split: Cut::even(0, x.dims()[0] / ctx.group().size(), ctx.group().size()),
                concat: Cut::even(1, x.dims()[1], ctx.group().size()),
            })
            .start(&x)
    };
    let calls = (0..5000).map(start).collect::<Result<Vec<_>>>()?;
    let all = Pending::wait_all(calls)?;
    all.iter().enumerate().try_for_each(|(nth, got)| check(got, nth as f32, "a call"))
}

fn flooded_large(ctx: &RankContext) -> Result<()> {
    let (g, other) = (ctx.group(), 1 - ctx.rank());
    let x = Tensor::ones(1 << 20, DType::F32, &Device::Cpu)?;
    (0..100).try_for_each(|_| {
        g.call(Collective::Send { to: other, tag: 0 }).owned().run_all(std::slice::from_ref(&x)).map(drop)
    })?;
    (0..100).try_for_each(|_| check(&g.recv(1 << 20, DType::F32, other)?, 1.0, "a message"))
}

fn unread_receive(ctx: &RankContext) -> Result<()> {
    let (g, other) = (ctx.group(), 1 - ctx.rank());
    drop(g.call(Collective::Recv { from: Some(other), tag: 0 }).of(LARGE, DType::F32).start(None)?);
    drop(g.call(Collective::Recv { from: Some(other), tag: 0 }).of(LARGE, DType::F32).start(None)?);
    g.send(ones(LARGE)?.as_tensor(), other)
}

fn unread_messages(ctx: &RankContext) -> Result<()> {
    let g = ctx.group();
    if ctx.rank() == 0 {
        for nth in 0..100 {
            g.send(ones(if nth % 2 == 0 { 100_000 } else { 5 })?.as_tensor(), 1 + nth % 2)?;
        }
    } else if ctx.rank() == 2 {
        std::thread::sleep(Duration::from_secs(1)); // sends when the others have ended
        g.send(ones(LARGE)?.as_tensor(), 0)?;
        g.send(ones(LARGE)?.as_tensor(), 1)?;
    }
    Ok(())
}

/// Started calls that the others never make.
fn calls_of_one_rank(ctx: &RankContext) -> Result<()> {
    if ctx.rank() == 1 {
        for _ in 0..10 {
            drop(ctx.group().call(Collective::AllReduce(ReduceOp::Sum)).start(ones(LARGE)?.as_tensor())?);
            drop(ctx.group().call(Collective::Broadcast { root: 1 }).start(ones(LARGE)?.as_tensor())?);
            drop(ctx.group().call(Collective::Barrier).start_all(&[])?);
        }
    }
    Ok(())
}

/// After a failure, nothing is held any more.
fn failed_while_held(ctx: &RankContext) -> Result<()> {
    let (g, other) = (ctx.group(), 1 - ctx.rank());
    let (first, second) = (ones(LARGE)?, ones(LARGE)?);
    g.barrier()?;
    g.call(Collective::Send { to: other, tag: 0 })
        .owned()
        .run_all(&[first.as_detached_tensor()])
        .map(drop)?;
    let sum = g.call(Collective::AllReduce(ReduceOp::Sum)).owned().start(&second.as_detached_tensor())?;
    if ctx.rank() == 0 {
        return Err(Error::Unsupported("no such file".into()));
    }
    let outcome = (0..).find_map(|_| g.barrier().err()).expect("a failure");
    write(&first)?;
    write(&second)?;
    drop(sum);
    Err(outcome)
}

fn two_threads(ctx: &RankContext) -> Result<()> {
    ctx.group().barrier()?;
    let ended = std::thread::scope(|scope| {
        let calls = |nth: usize| {
            let x = Tensor::full(nth as f32, 3, &Device::Cpu)?;
            (0..1000).try_for_each(|_| ctx.group().all_reduce(&x, ReduceOp::Sum).map(drop))
        };
        let threads = [1, 2].map(|nth| scope.spawn(move || calls(nth)));
        threads.map(|thread| thread.join().expect("no panic"))
    });
    let both = format!("{ended:?}").matches("hostile.rs:").count();
    assert!(both >= 2, "{ended:?}");
    ended.into_iter().collect()
}

fn flooded_store(ctx: &RankContext) -> Result<()> {
    if ctx.rank() == 1 {
        let value = vec![7; 16 << 20];
        for _ in 0..100 {
            ctx.store().set("key", &value)?;
        }
        assert!(resident() < 500, "{} MiB", resident());
        assert_eq!(ctx.store().get("key")?.len(), value.len());
    }
    ctx.group().barrier()
}
