//! What NCCL's calls cost the host: the numbers that `docs/decisions/013` uses.
//!
//! `scripts/nccl-sim.sh --gpus 2 nccl::costs` prints them. Comparisons take no GPU, so their times are those of this machine.
use candle_core::{DType, Tensor};
use candle_dist::backend::nccl::costs;
use candle_dist::control::Control;
use candle_dist::init::{InitOptions, LaunchInfo};
use candle_dist::{ReduceOp, Result};
use std::collections::BTreeMap;
use std::io::Write;
use std::net::TcpListener;
use std::process::Command;
use std::time::Instant;
use std::{env, fs};
use test_utils::{Scratch, has_ranks, over_nccl, skip, world};

/// The number of collectives: makes the test below run as a program that makes them.
const RUN: &str = "NCCL_COSTS_CALLS";
const RANKS: usize = 2;
const CALLS: u32 = 5_000;

/// Returns how long a comparison takes a rank of `ranks` processes, which are threads here that connect as processes do.
fn of_processes(ranks: usize) -> f64 {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let rank = |rank: usize| {
        let options = InitOptions::explicit(&address, rank, ranks).token("a token that others cannot guess");
        move || {
            let control = Control::connect(&LaunchInfo::from_env(&options).unwrap(), &options)?;
            costs::of_processes(&control, CALLS)
        }
    };
    let times: Vec<Result<_>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks).map(|at| scope.spawn(rank(at))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    times.into_iter().map(|time| time.unwrap().as_secs_f64() * 1e6).fold(0.0, f64::max)
}

/// Returns the simulator's counters after a program of so many collectives, in a process of its own.
fn counters(calls: usize) -> BTreeMap<String, usize> {
    let (scratch, test) = (Scratch::new("costs"), "nccl::costs::the_costs_of_calls_are_told");
    let path = scratch.path("calls");
    let mut program = Command::new(env::current_exe().unwrap());
    let program = program.args(["--exact", test, "--test-threads", "1"]).env(RUN, calls.to_string());
    let output =
        program.env("SIM_CALLS", &path).env("SIM_SEEDS", "1").env_remove("SIM_USED").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = fs::read_to_string(path).unwrap();
    text.lines()
        .filter_map(|line| line.rsplit_once(' '))
        .map(|(name, n)| (name.into(), n.parse().unwrap()))
        .collect()
}

fn tell(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}"); // tests capture what `println` writes
}

#[test]
fn the_costs_of_calls_are_told() {
    if let Ok(calls) = env::var(RUN) {
        let calls: usize = calls.parse().unwrap();
        // Its threads, and so their communicators, have ended when it returns.
        let made = world(RANKS).run(move |ctx| {
            let x = Tensor::ones(64, DType::F32, ctx.device())?;
            (0..calls).try_for_each(|_| ctx.group().all_reduce(&x, ReduceOp::Sum).map(drop))
        });
        made.unwrap();
        return;
    }
    if !over_nccl() || env::var("CANDLE_TEST_BACKEND").is_ok_and(|backend| backend != "nccl-sim") {
        return skip("needs the counters of the simulated driver");
    }
    if !has_ranks(RANKS) {
        return;
    }
    for ranks in [2, 8] {
        let threads = costs::of_threads(ranks, CALLS).unwrap().as_secs_f64() * 1e6;
        let processes = of_processes(ranks);
        tell(&format!(
            "comparing a call on {ranks} ranks: {threads:.2} us among threads, {processes:.2} us among processes"
        ));
    }
    let began = Instant::now();
    (0..1000).for_each(|_| std::thread::spawn(|| ()).join().unwrap());
    tell(&format!("starting and ending a thread: {:.2} us", began.elapsed().as_secs_f64() * 1e3));
    let (few, many) = (counters(20), counters(220));
    for (name, many) in &many {
        // How often the host polls depends on time, so the longer run may have fewer polls.
        let each = (*many as f64 - few.get(name).copied().unwrap_or(0) as f64) / 200.0 / RANKS as f64;
        tell(&format!("{name}: {each:.2} in each collective of a rank"));
    }
    let started = "threads that NCCL starts";
    assert_eq!(many[started] - few[started], 200 * RANKS);
}
