//! The conformance suite on processes that mpirun has started; `scripts/mpi-test.sh` does that and judges.
//!
//! Without arguments all cases run; with `differ NAME` or `end NAME` the last rank goes wrong, and every rank that hears
//! of it says so.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
#[allow(dead_code)] // what errors say is judged by the script
#[path = "conformance/cases/mod.rs"]
mod cases;

use candle_dist::init::{Backend, InitOptions};
use candle_dist::{Error, RankContext, Result, World};
use cases::{FAILURES, GROUPS};
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
