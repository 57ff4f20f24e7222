//! NCCL goes wrong at each call of a program: all ranks get one error in time. The simulator does this for a process, so
//! each program runs in a process of its own.
use crate::nccl::computed;
use candle_core::{DType, Device, Tensor};
use candle_dist::{Collective, RankContext, ReduceOp, Result, World};
use std::io::Read;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};
use test_utils::{over_nccl, skip};

/// The variable with the name of the program that this process runs.
const PROGRAM: &str = "CANDLE_TEST_PROGRAM";
/// How long a rank may wait in one call.
const TIMEOUT: Duration = Duration::from_secs(3);
/// How long a program may take, with its failure.
const LIMIT: Duration = Duration::from_secs(40);
const RANKS: usize = 2;
/// How many seeds the faults take in turn.
const SEEDS: usize = 4;

type Program = fn(&RankContext) -> Result<()>;
const PROGRAMS: [(&str, Program); 2] = [("all", all), ("a late message", late_message)];

/// Compares a result with what it must be. An aborted call leaves anything; then the next call fails.
fn check(ctx: &RankContext, made: &Tensor, want: f32) -> Result<()> {
    let made = made.flatten_all()?.to_vec1::<f32>()?;
    if made.iter().any(|&x| x != want) {
        ctx.group().barrier()?;
        panic!("a call returned {made:?} for {want}, and the world goes on");
    }
    Ok(())
}

fn all(ctx: &RankContext) -> Result<()> {
    let (g, n, sum) = (ctx.group(), ctx.world_size(), 5.0);
    let x = computed(ctx.rank(), 6, ctx.device())?;
    check(ctx, &g.all_reduce(&x, ReduceOp::Sum)?, sum)?;
    let started = g.call(Collective::AllReduce(ReduceOp::Sum)).start(&x)?;
    g.send(&x, (ctx.rank() + 1) % n)?;
    let from = (ctx.rank() + n - 1) % n;
    check(ctx, &g.recv(6, DType::F32, from)?, 2.0 + from as f32)?;
    check(ctx, &started.wait()?, sum)?;
    check(ctx, &g.all_gather(&x, 0)?.narrow(0, 6, 6)?, 3.0)?;
    check(ctx, &g.broadcast(&x, 1)?, 3.0)?;
    let host = Tensor::new(&[1f32; 3], &Device::Cpu)?;
    check(ctx, &g.all_reduce(&host, ReduceOp::Sum)?, 2.0)?;
    g.barrier()
}

/// The sender has closed its end before the message is received.
fn late_message(ctx: &RankContext) -> Result<()> {
    if ctx.rank() == 0 {
        return ctx.group().send(&computed(0, 6, ctx.device())?, 1);
    }
    std::thread::sleep(Duration::from_millis(300));
    let made = ctx.group().recv(6, DType::F32, 0)?;
    check(ctx, &made, 2.0)?;
    std::thread::sleep(Duration::from_millis(300));
    ctx.group().failure().map_or(Ok(()), |failure| Err(candle_dist::Error::Group(failure)))
}

/// Runs a program, or nothing unless this process was started for one.
#[test]
fn one_program() {
    let Ok(name) = std::env::var(PROGRAM) else { return };
    let (_, program) = PROGRAMS.iter().find(|(known, _)| *known == name).unwrap();
    let devices = (0..RANKS).map(|gpu| Device::new_cuda_with_stream(gpu).unwrap()).collect();
    let heard = Mutex::new(Vec::new());
    let outcome = World::nccl(devices)
        .timeout(TIMEOUT)
        .run(|ctx| program(ctx).inspect_err(|error| heard.lock().unwrap().push(error.to_string())));
    let heard = heard.into_inner().unwrap();
    assert!(heard.windows(2).all(|pair| pair[0] == pair[1]), "ranks disagree: {heard:#?}");
    assert_eq!(heard.is_empty(), outcome.is_ok(), "{outcome:?}");
    println!("OUTCOME {}", heard.first().map_or("fine".to_string(), |error| error.replace('\n', " |")));
}

/// Runs a program in a process of its own with a fault and a seed. Returns what its ranks heard, and whether NCCL got that far.
fn run(name: &str, fault: &str, seed: usize) -> (String, bool) {
    let began = Instant::now();
    let mut process = Command::new(std::env::current_exe().unwrap())
        .args(["nccl::faults::one_program", "--exact", "--nocapture", "--test-threads", "1"])
        .envs([(PROGRAM, name), ("SIM_FAULT", fault), ("SIM_SEED", &seed.to_string()), ("SIM_SEEDS", "1")])
        .env_remove("SIM_USED")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut pipes: [Box<dyn Read + Send>; 2] =
        [Box::new(process.stdout.take().unwrap()), Box::new(process.stderr.take().unwrap())];
    let [out, err] = std::thread::scope(|scope| {
        let handles = pipes.each_mut().map(|pipe| {
            scope.spawn(move || {
                let mut bytes = Vec::new();
                pipe.read_to_end(&mut bytes).unwrap();
                String::from_utf8_lossy(&bytes).into_owned()
            })
        });
        while process.try_wait().unwrap().is_none() {
            if began.elapsed() > LIMIT {
                process.kill().unwrap();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        handles.map(|handle| handle.join().unwrap())
    });
    let status = process.wait().unwrap();
    assert!(status.success(), "{name} with {fault} after {:?}: {status}\n{out}\n{err}", began.elapsed());
    let outcome =
        out.lines().find_map(|line| line.split_once("OUTCOME ")).map(|(_, outcome)| outcome.to_string());
    (outcome.expect("the program ended"), err.contains("nccl-sim: injected"))
}

/// Tries the fault at every `step`-th call of a program. Returns how many calls that were.
fn try_every(name: &str, fault: &str, step: usize, is_right: impl Fn(&str) -> bool) -> usize {
    for at in (0..).step_by(step) {
        let (outcome, was_reached) = run(name, &format!("{fault}:{at}"), at / step % SEEDS);
        if !was_reached {
            assert_eq!(outcome, "fine", "{name} without a fault");
            return at;
        }
        assert!(is_right(&outcome), "{name} with {fault}:{at}: {outcome}");
    }
    unreachable!("a program has an end")
}

pub(super) fn is_simulated() -> bool {
    let is_simulated = std::env::var("CANDLE_TEST_BACKEND").is_ok_and(|backend| backend == "nccl-sim");
    let enough = over_nccl()
        && std::env::var("SIM_GPUS").is_ok_and(|gpus| gpus.parse().is_ok_and(|n: usize| n >= RANKS));
    if !(is_simulated && enough) {
        skip("needs the simulator with two GPUs");
    }
    is_simulated && enough
}

#[test]
fn a_call_that_nccl_refuses_is_one_error_on_all_ranks() {
    if is_simulated() {
        assert!(try_every("all", "refuse", 1, |outcome| outcome.contains("unhandled system error")) >= 14);
    }
}

#[test]
fn a_lost_network_is_one_error_on_all_ranks() {
    if is_simulated() {
        assert!(try_every("all", "lose", 1, |outcome| outcome.contains("remote process exited")) >= 14);
    }
}

#[test]
fn a_network_that_stalls_is_one_error_on_all_ranks() {
    if is_simulated() {
        assert!(
            try_every("all", "stall", 4, |outcome| outcome.contains("waited longer than the timeout")) >= 14
        );
    }
}

#[test]
fn an_error_of_a_message_is_heard_after_its_sender_has_closed_its_end() {
    if is_simulated() {
        assert_eq!(
            try_every("a late message", "refuse", 1, |outcome| outcome.contains("unhandled system error")),
            4 // both ends connect, and move the message
        );
        assert_eq!(
            try_every("a late message", "lose", 1, |outcome| outcome.contains("remote process exited")),
            4
        );
    }
}
