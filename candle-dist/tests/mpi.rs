//! The conformance suite on processes that mpirun has started; `scripts/mpi-test.sh` does that and judges.
//!
//! Without arguments all cases run, with `parts` in messages of few bytes, with `given` on an MPI that the program itself
//! has started. With `differ NAME`, `end NAME` or `device` the last rank goes wrong, and every rank that hears of it says
//! so.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
#[allow(dead_code)] // what errors say is judged by the script
#[path = "conformance/cases/mod.rs"]
mod cases;

use candle_core::{DType, Device, DeviceLocation, Tensor};
use candle_dist::backend::mpi::Settings;
use candle_dist::backend::{Call, Op};
use candle_dist::init::{Backend, InitOptions, init_process_group_with};
use candle_dist::{Error, RankContext, Result, World};
use cases::{FAILURES, GROUPS};
use ferrompi::{Mpi, ThreadLevel};
use std::process::ExitCode;
use std::time::{Duration, Instant};

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
    if std::env::var_os("OMPI_COMM_WORLD_SIZE").or_else(|| std::env::var_os("PMI_SIZE")).is_none() {
        println!("SKIPPED: this is no process of mpirun; see scripts/mpi-test.sh");
        return ExitCode::SUCCESS;
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let done = match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => run(Duration::from_secs(120), conform),
        // Above what goes with a header, and below most lengths.
        ["parts"] => run_on(Settings { most_bytes: 20_000, ..Settings::default() }, conform),
        ["given"] => {
            let mpi = Mpi::init_thread(ThreadLevel::Multiple).expect("MPI starts");
            let comm = mpi.world();
            let refused = run(Duration::from_secs(60), |_| Ok(()));
            let done = run_on(Settings { comm: Some(&comm), ..Settings::default() }, conform);
            // The engine is gone, and MPI is not.
            comm.barrier().expect("MPI goes on");
            !refused && done
        }
        ["device"] => run(Duration::from_secs(60), |ctx| heard(ctx, with_a_gpu(ctx))),
        ["differ", name] => {
            let failure = FAILURES.iter().find(|failure| failure.name == *name).expect("a failure of this name");
            run(Duration::from_secs(60), |ctx| heard(ctx, (failure.run)(ctx)))
        }
        ["end", name] => {
            let (_, end) = ENDS.iter().find(|(end, _)| end == name).expect("an end of this name");
            run(Duration::from_secs(3), |ctx| match ctx.rank() + 1 == ctx.world_size() {
                true => end(),
                false => heard(ctx, ctx.group().barrier()),
            })
        }
        other => panic!("arguments {other:?}"),
    };
    if done { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run(timeout: Duration, f: impl Fn(&RankContext) -> Result<()> + Sync) -> bool {
    let outcome = World::processes(Backend::Mpi, InitOptions::new().timeout(timeout)).run(f);
    if let Err(error) = &outcome {
        eprintln!("{error}");
    }
    outcome.is_ok()
}

/// Like [`run`] over an engine with settings.
fn run_on(settings: Settings<'_>, f: impl Fn(&RankContext) -> Result<()>) -> bool {
    let ctx = init_process_group_with(InitOptions::new(), |info, control| settings.start(info, control));
    let ctx = ctx.unwrap_or_else(|error| panic!("{error}"));
    ctx.run(f, |rank, message| eprintln!("rank {rank}: {message}")).is_some()
}

/// A scatter of what the last rank alone has, on a GPU by its own word.
fn with_a_gpu(ctx: &RankContext) -> Result<()> {
    let (n, root) = (ctx.world_size(), ctx.world_size() - 1);
    let x = Tensor::zeros(n, DType::F32, &Device::Cpu)?;
    let ones = vec![1; n];
    let call = Call {
        peer: Some(root),
        dims: [0].into_iter().collect(),
        sizes: [ones.into_iter().collect()].into_iter().collect(),
        ..Call::on(Op::Scatter, &x, &[])
    };
    let engine = ctx.group().engine();
    match ctx.rank() == root {
        true => engine.run(Call { device: DeviceLocation::Cuda { gpu_id: 0 }, ..call }, [x].into_iter().collect()),
        false => engine.run(call, [].into_iter().collect()),
    }
    .map(drop)
}

/// Says what this rank has heard, in one line.
fn heard(ctx: &RankContext, outcome: Result<()>) -> Result<()> {
    if let Err(error) = &outcome {
        println!("heard by {}: {}", ctx.rank(), error.to_string().replace('\n', " |"));
    }
    outcome
}

fn conform(ctx: &RankContext) -> Result<()> {
    assert_eq!(ctx.group().backend_name(), "mpi");
    for (name, list) in GROUPS {
        let began = Instant::now();
        let list = list.iter().filter(|case| case.least <= ctx.world_size());
        for case in list.clone() {
            (case.run)(ctx).map_err(|error| Error::Unsupported(format!("[{}] {error}", case.name)))?;
            ctx.group().barrier()?;
        }
        if ctx.rank() == 0 {
            println!("{name}: {} cases on {} ranks in {:.1?}", list.count(), ctx.world_size(), began.elapsed());
        }
    }
    Ok(())
}
