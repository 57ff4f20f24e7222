//! The conformance suite on processes that mpirun started; `scripts/mpi-test.sh` starts it and checks the results.
//!
//! Without arguments all cases run: with `parts` in messages of few bytes, with `apart` without shared memory, with
//! `pairs` with memory that only pairs of ranks share, with `given` on an MPI that the program itself started. With `differ NAME`, `end NAME`, `device`, or `begin NAME` (for starts), the last rank fails, and
//! every rank that gets the error prints it. `large`, `any`, `dropped` and `late` check one thing each, and `hostile NAME` is an
//! attack (with `apart` without shared memory), as is `broken NAME`. Without mpirun, the filter `hostile::` starts all attacks.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
mod broken;
mod hostile;

use candle_core::{DType, Device, DeviceLocation, Tensor};
use candle_dist::backend::mpi::{Comm, Settings, Sums};
use candle_dist::backend::{Call, Cut, Tensors};
use candle_dist::init::{BackendKind, InitOptions, LaunchInfo, init_process_group_with};
use candle_dist::testing::{FAILURES, GROUPS};
use candle_dist::{Collective, Error, RankContext, ReduceOp, Result, World};
use std::ffi::{c_int, c_void};
use std::io::{self, Write as _};
use std::process::ExitCode;
use std::time::{Duration, Instant};

// Of the MPI that the backend is linked with. These are equal in all of them, and so is the order of the levels.
unsafe extern "C" {
    fn MPI_Init_thread(argc: *mut c_int, argv: *mut c_void, required: c_int, provided: *mut c_int) -> c_int;
    fn MPI_Finalize() -> c_int;
}

/// MPI_THREAD_FUNNELED and MPI_THREAD_MULTIPLE.
const FUNNELED: c_int = 1;
const MULTIPLE: c_int = 3;

/// Starts MPI, like a program that uses MPI itself.
fn start_mpi(level: c_int) {
    let mut provided = -1;
    // SAFETY: MPI allows null for the arguments, and has not been started.
    let code = unsafe { MPI_Init_thread(std::ptr::null_mut(), std::ptr::null_mut(), level, &mut provided) };
    assert_eq!((code, provided), (0, level), "MPI starts with the level asked for");
}

/// Ends MPI.
fn end_mpi() {
    // SAFETY: MPI was started here, on this thread, and the backend is gone.
    assert_eq!(unsafe { MPI_Finalize() }, 0);
}

type End = fn() -> Result<()>;

/// How the last rank ends while the others wait for it.
const ENDS: [(&str, End); 5] = [
    ("error", || Err(Error::Unsupported("cheese".to_string()))),
    ("panic", || panic!("out of cheese")),
    ("early", || Ok(())),
    ("killed", || std::process::abort()),
    ("hang", || {
        loop {
            std::thread::sleep(Duration::from_secs(60));
        }
    }),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if std::env::var_os("OMPI_COMM_WORLD_SIZE").or_else(|| std::env::var_os("PMI_SIZE")).is_none() {
        match arguments.iter().any(|argument| argument.starts_with("hostile")) {
            true => {
                hostile::all();
                broken::all();
            }
            false => println!("SKIPPED: this is no process of mpirun; see scripts/mpi-test.sh"),
        }
        return ExitCode::SUCCESS;
    }
    let done = match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => run(Duration::from_secs(120), conform),
        // Larger than the data in a header message, and smaller than most lengths.
        ["parts"] => run_on(Settings::default().most_bytes(20_000), conform),
        // Letters through MPI, or in part: only pairs of ranks share memory.
        ["apart"] => run_on(Settings::default().most_sharing(1), conform),
        ["pairs"] => run_on(Settings::default().most_sharing(2), conform),
        ["given"] => {
            start_mpi(MULTIPLE);
            let refused =
                World::processes(BackendKind::Mpi, InitOptions::new().timeout(Duration::from_secs(60)));
            let refused = refused.run(|_| Ok::<_, Error>(()));
            let refused = refused.expect_err("a program that started MPI must pass its communicator");
            let first = format!("rank {} failed: ", refused.rank);
            assert!(refused.message.starts_with(&first), "all ranks blame the first: {refused}");
            let done = run_on(Settings::default().comm(Comm::world()), conform);
            // The backend is gone, but MPI still runs.
            end_mpi();
            done
        }
        ["large"] => run_on(Settings::default().most_bytes(4096), in_many_parts),
        ["any"] => run_on(Settings::default().sums(Sums::Any), in_any_order),
        ["dropped"] => run(Duration::from_secs(60), dropped),
        ["late"] => late(),
        ["hostile", name] => hostile::rank(name, Settings::default()),
        ["hostile", name, "apart"] => hostile::rank(name, Settings::default().most_sharing(1)),
        ["broken", name] => broken::rank(name),
        ["begin", name, port] => begin(name, port),
        ["device"] => run(Duration::from_secs(60), |ctx| heard(ctx, || with_a_gpu(ctx))),
        ["differ", name] => {
            let failure =
                FAILURES.iter().find(|failure| failure.name == *name).expect("a failure of this name");
            run(Duration::from_secs(60), |ctx| heard(ctx, || (failure.run)(ctx)))
        }
        ["end", name] => {
            let (_, end) = ENDS.iter().find(|(end, _)| end == name).expect("an end of this name");
            // Only a hang is to last until the timeout.
            let timeout = if *name == "hang" { 5 } else { 60 };
            run(Duration::from_secs(timeout), |ctx| match ctx.rank() + 1 == ctx.world_size() {
                true => ctx.group().barrier().and_then(|()| end()),
                false => heard(ctx, || ctx.group().barrier()),
            })
        }
        other => panic!("arguments {other:?}"),
    };
    if done { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run(timeout: Duration, f: impl Fn(&RankContext) -> Result<()> + Sync) -> bool {
    let outcome = World::processes(BackendKind::Mpi, InitOptions::new().timeout(timeout)).run(f);
    if let Err(error) = &outcome {
        eprintln!("{error}");
    }
    outcome.is_ok()
}

/// Like [`run`], but with settings of the backend.
fn run_on(settings: Settings, f: impl Fn(&RankContext) -> Result<()>) -> bool {
    run_with(InitOptions::new(), |_| {}, settings, f)
}

/// Like [`run_on`], with options, and with what a rank does before it starts the backend.
fn run_with(
    options: InitOptions,
    before: impl Fn(&LaunchInfo),
    settings: Settings,
    f: impl Fn(&RankContext) -> Result<()>,
) -> bool {
    let ctx = init_process_group_with(options, |info, control| {
        before(info);
        settings.start(info, control)
    });
    let ctx = ctx.unwrap_or_else(|error| panic!("{error}"));
    ctx.run(f, |rank, message| eprintln!("rank {rank}: {message}")).is_some()
}

/// A start for which the others wait longer than a rank may wait in a call.
fn late() -> bool {
    let options = InitOptions::new().timeout(Duration::from_millis(200));
    let before = |info: &LaunchInfo| {
        if info.rank + 1 == info.world_size {
            std::thread::sleep(Duration::from_secs(1));
        }
    };
    run_with(options, before, Settings::default(), |_| Ok(()))
}

/// A start that fails on the last rank. No rank may wait for another one in MPI.
fn begin(name: &str, port: &str) -> bool {
    let number =
        |names: [&str; 2]| names.iter().find_map(|name| std::env::var(name).ok()?.parse::<usize>().ok());
    let rank = number(["OMPI_COMM_WORLD_RANK", "PMI_RANK"]).expect("a rank");
    let size = number(["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]).expect("a size");
    let is_last = rank + 1 == size;
    let explicit = |rank| {
        let options = InitOptions::explicit(&format!("127.0.0.1:{port}"), rank, size).local(rank, size);
        options.token("a token that others cannot guess")
    };
    let (options, settings) = match name {
        // The launcher's ranks are those of MPI, but the last two are swapped.
        "order" => {
            let swapped = if rank + 2 < size { rank } else { 2 * size - 3 - rank };
            (explicit(swapped), Settings::default())
        }
        "level" => {
            start_mpi(if is_last { FUNNELED } else { MULTIPLE });
            (explicit(rank), Settings::default().comm(Comm::world()))
        }
        "missing" => {
            start_mpi(MULTIPLE);
            (explicit(rank), Settings::default().comm((!is_last).then(Comm::world)))
        }
        "settings" => {
            let most_bytes = if is_last { 1 << 20 } else { 1 << 21 };
            (explicit(rank), Settings::default().most_bytes(most_bytes))
        }
        "range" => {
            let most_bytes = if is_last { 1 } else { 1 << 21 };
            (explicit(rank), Settings::default().most_bytes(most_bytes))
        }
        other => panic!("a start that goes wrong by {other}"),
    };
    let began = Instant::now();
    match init_process_group_with(options, |info, control| settings.start(info, control)) {
        Ok(_) => println!("rank {rank} has started"),
        Err(error) => say(rank, &error),
    }
    assert!(began.elapsed() < Duration::from_secs(30), "the start has ended in time");
    // mpirun ends all processes when one ends with an error, but each of them must print something first.
    std::thread::sleep(Duration::from_secs(2));
    false
}

/// A tensor in more parts than an MPI has requests.
fn in_many_parts(ctx: &RankContext) -> Result<()> {
    let (len, group, n) = (20 << 20, ctx.group(), ctx.world_size());
    let x = Tensor::full(ctx.rank() as f32 + 1.0, len, &Device::Cpu)?;
    let sum = group.all_reduce(&x, ReduceOp::Sum)?;
    assert_eq!(sum.min_all()?.to_scalar::<f32>()?, (n * (n + 1) / 2) as f32);
    assert_eq!(sum.max_all()?.to_scalar::<f32>()?, (n * (n + 1) / 2) as f32);
    let from = group.broadcast(&x, n - 1)?;
    assert_eq!(from.sum_all()?.to_scalar::<f32>()?, (n * len) as f32);
    if ctx.rank() == 0 {
        group.send(&x, 1)?;
    } else if ctx.rank() == 1 {
        assert_eq!(group.recv(len, DType::F32, 0)?.sum_all()?.to_scalar::<f32>()?, len as f32);
    }
    group.barrier()
}

/// Sums that may be reordered must be exact if all orders are.
fn in_any_order(ctx: &RankContext) -> Result<()> {
    let n = ctx.world_size() as u32;
    for len in [1, 1000, 100_000] {
        let x = (Tensor::arange(0u32, len, &Device::Cpu)? + f64::from(ctx.rank() as u32))?;
        let want = ((Tensor::arange(0u32, len, &Device::Cpu)? * f64::from(n))? + f64::from(n * (n - 1) / 2))?;
        assert_eq!(ctx.group().all_reduce(&x, ReduceOp::Sum)?.to_vec1::<u32>()?, want.to_vec1::<u32>()?);
        let most = ctx.group().all_reduce(&x.to_dtype(DType::F64)?, ReduceOp::Max)?;
        assert_eq!(most.to_vec1::<f64>()?[0], f64::from(n - 1));
        let mean = ctx.group().all_reduce(&x.to_dtype(DType::F64)?, ReduceOp::Avg)?;
        assert_eq!(mean.to_vec1::<f64>()?[0], f64::from(n - 1) / 2.0);
        let half = ctx.group().all_reduce(&x.to_dtype(DType::F64)?, ReduceOp::pre_mul_sum(0.5))?;
        assert_eq!(half.to_vec1::<f64>()?[0], f64::from(n * (n - 1)) / 4.0, "each value is multiplied once");
    }
    Ok(())
}

/// Returns the memory of this process, in MiB.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux tells of memory");
    statm.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).expect("a number of pages") * 4
        / 1024
}

/// Dropping a finished call frees its memory, without another message.
fn dropped(ctx: &RankContext) -> Result<()> {
    let x = Tensor::full(1f32, 16 << 20, &Device::Cpu)?; // 64 MiB
    let pending = ctx.group().call(Collective::AllReduce(ReduceOp::Sum)).start(&x)?;
    while !pending.is_ready()? {
        std::thread::sleep(Duration::from_millis(1));
    }
    let before = resident();
    drop((pending, x));
    let freed = before.saturating_sub(resident());
    assert!(freed > 100, "{freed} MiB of the input's and the result's 128 were freed");
    ctx.group().barrier()
}

/// A scatter from the last rank, which claims that its tensor is on a GPU.
fn with_a_gpu(ctx: &RankContext) -> Result<()> {
    let (n, root) = (ctx.world_size(), ctx.world_size() - 1);
    let x = Tensor::zeros(n, DType::F32, &Device::Cpu)?;
    let call = Call::on(Collective::Scatter { cut: Cut::even(0, 1, n), root }, &x);
    let backend = ctx.group().backend();
    let (call, tensors) = match ctx.rank() == root {
        true => (Call { device: DeviceLocation::Cuda { gpu_id: 0 }, ..call }, [x].into_iter().collect()),
        false => (call, Tensors::new()),
    };
    backend.run(call, tensors, Tensors::new()).map(drop)
}

/// Prints a rank's error in a single write, because other ranks write to the same terminal.
fn say(rank: usize, error: &Error) {
    let line = format!("heard by {rank}: {}\n", error.to_string().replace('\n', " |"));
    // If the terminal is gone, the error cannot be reported.
    let _ = io::stdout().lock().write_all(line.as_bytes());
}

/// Prints the error that this rank gets from `call`, once all ranks have started: `World::run` does not call its closure on a
/// rank that hears of another one's failure before.
fn heard(ctx: &RankContext, call: impl FnOnce() -> Result<()>) -> Result<()> {
    let outcome = ctx.group().barrier().and_then(|()| call());
    if let Err(error) = &outcome {
        say(ctx.rank(), error);
    }
    outcome
}

fn conform(ctx: &RankContext) -> Result<()> {
    assert_eq!(ctx.group().backend().name(), "mpi");
    for (name, list) in GROUPS {
        let began = Instant::now();
        let list = list.iter().filter(|case| case.least <= ctx.world_size());
        for case in list.clone() {
            (case.run)(ctx).map_err(|error| Error::Unsupported(format!("[{}] {error}", case.name)))?;
            ctx.group().barrier()?;
        }
        if ctx.rank() == 0 {
            println!(
                "{name}: {} cases on {} ranks in {:.1?}",
                list.count(),
                ctx.world_size(),
                began.elapsed()
            );
        }
    }
    Ok(())
}
