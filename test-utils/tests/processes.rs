//! Processes as ranks over NCCL: the conformance suite, its failures, and training, against one device.
//!
//! `scripts/nccl-sim.sh processes` runs them on simulated GPUs.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
use candle_core::{DType, Device, Tensor};
use candle_dist::init::{BackendKind, InitOptions};
use candle_dist::testing::{FAILURES, GROUPS, lack};
use candle_dist::{Collective, Error, ProcessGroup, RankContext, ReduceOp, World, round_grads};
use candle_nn::{Optimizer, SGD};
use candle_shard::nn::{MeshVarBuilder, Mode};
use candle_shard::{DTensor, Replicate};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use test_utils::model_args::ModelArgs;
use test_utils::toy::Transformer;
use test_utils::{Job, Outcome, over_nccl, skip, skipped, worlds};

type Work = fn(&RankContext) -> Result<(), Error>;

/// What the processes do, with the text that all say in the end, whether one of them says something else, and how many
/// seconds it may take.
const SCENARIOS: [(&str, Work, &str, bool, u64); 8] = [
    ("conformance", conform, "fine", false, LIMIT),
    ("training", train, "fine", false, LIMIT),
    ("calls that differ on the GPU", differ_on_the_gpu, "(reduction differs)", false, LIMIT),
    ("a last call that differs on the GPU", differ_at_last, "or monitored) differs)", false, SOON),
    ("an early return", return_early, "rank 0 returned while other ranks wait for it", true, LIMIT),
    ("an unread message", |ctx| leave_a_message(ctx.group(), ctx), "fine", false, SOON),
    ("an unread message of a dropped group", leave_a_message_in_a_group, "fine", false, SOON),
    ("an unread message of a group that is kept", leave_a_message_and_the_group, "fine", false, SOON),
];

/// How long a rank may wait in one call.
const TIMEOUT: Duration = Duration::from_secs(60);
/// How many seconds a job may take.
const LIMIT: u64 = 120;
/// Less than the timeout.
const SOON: u64 = 40;

fn main() -> ExitCode {
    if let Some(scenario) = Job::scenario() {
        return one_rank(&scenario);
    }
    if !over_nccl() {
        skip("needs NCCL");
        return ExitCode::SUCCESS;
    }
    let wanted = match &std::env::args().skip(1).collect::<Vec<_>>()[..] {
        [] => String::new(),
        [wanted] if !wanted.starts_with('-') => wanted.clone(),
        other => {
            eprintln!("error: {other:?}: give a part of the names of the scenarios, or nothing");
            return ExitCode::FAILURE;
        }
    };
    let failures = FAILURES.iter().map(|failure| (failure.name, failure.text, failure.silent, LIMIT));
    let others = SCENARIOS.iter().map(|(name, _, text, silent, limit)| (*name, *text, *silent, *limit));
    let all: Vec<_> = others.chain(failures).filter(|(name, ..)| name.contains(&wanted)).collect();
    if all.is_empty() {
        eprintln!("error: no scenario matches {wanted:?}");
        return ExitCode::FAILURE;
    }
    let (mut ran, mut failed) = (0, 0);
    for size in worlds(2..=8) {
        for &(name, text, is_silent, limit) in &all {
            if let Some(why) = lack("nccl", name) {
                skip(&format!("{name}: {why}"));
                continue;
            }
            let began = Instant::now();
            let outcomes = Job::new(name, size).deadline(Duration::from_secs(limit)).run();
            let right = is_right(&outcomes, text, is_silent);
            println!(
                "{} {name} on {size} processes, {:.1?}",
                if right { "ok" } else { "FAILED" },
                began.elapsed()
            );
            ran += 1;
            if !right {
                failed += 1;
                for (rank, outcome) in outcomes.iter().enumerate() {
                    println!("-- rank {rank}, status {:?}\n{}\n{}", outcome.code, outcome.out, outcome.err);
                }
            }
        }
    }
    println!("{ran} ran, {failed} failed, {} skipped", skipped());
    if failed == 0 && ran + skipped() > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Returns whether all processes said the same with this text, except for one that is silent: it panics or returns. Each
/// must end by itself, with the status that fits to what it said.
fn is_right(outcomes: &[Outcome], text: &str, is_silent: bool) -> bool {
    let counts = |line: &&str| !(is_silent && *line == "fine");
    let said_all: Vec<&str> = outcomes.iter().filter_map(said).filter(counts).collect();
    let enough = said_all.len() + usize::from(is_silent) >= outcomes.len();
    let has_ended = |outcome: &Outcome| match said(outcome) {
        Some("fine") => outcome.code == Some(0),
        _ => outcome.code == Some(1),
    };
    enough
        && outcomes.iter().all(has_ended)
        && !said_all.is_empty()
        && said_all.iter().all(|line| *line == said_all[0] && line.contains(text))
}

/// Returns what a process said at last.
fn said(outcome: &Outcome) -> Option<&str> {
    outcome.out.lines().rev().find_map(|line| line.strip_prefix("SAYS "))
}

/// Runs a scenario as one rank.
fn one_rank(name: &str) -> ExitCode {
    let work = SCENARIOS.iter().find(|(known, ..)| *known == name).map(|(_, work, ..)| *work);
    let failure = FAILURES.iter().find(|failure| failure.name == name).map(|failure| failure.run);
    let work = work.or(failure).expect("a scenario of this name");
    let options = InitOptions::new().timeout(TIMEOUT);
    let was_fine = AtomicBool::new(false);
    let outcome = World::processes(BackendKind::Nccl, options).run(|ctx| {
        let done = work(ctx);
        let text = done.as_ref().err().map_or("fine".to_string(), |error| error.to_string());
        say(&text);
        was_fine.store(done.is_ok(), Ordering::Relaxed);
        done
    });
    let Err(error) = outcome else { return ExitCode::SUCCESS };
    // It may fail after its work.
    if was_fine.into_inner() {
        say(&error.message);
    }
    ExitCode::FAILURE
}

fn say(text: &str) {
    println!("SAYS {}", text.replace('\n', " |"));
}

fn conform(ctx: &RankContext) -> Result<(), Error> {
    assert_eq!(ctx.group().backend().name(), "nccl");
    for (_, cases) in GROUPS {
        for case in
            cases.iter().filter(|case| case.least <= ctx.world_size() && lack("nccl", case.name).is_none())
        {
            (case.run)(ctx).map_err(|error| Error::Unsupported(format!("[{}] {error}", case.name)))?;
            ctx.group().barrier()?;
        }
    }
    Ok(())
}

/// Trains the toy Transformer, sequence-parallel over all processes, and compares the losses with one rank on the host.
fn train(ctx: &RankContext) -> Result<(), Error> {
    let losses =
        |ctx: &RankContext, dtype| losses(ctx, dtype).map_err(|error| Error::Unsupported(error.to_string()));
    let alone = World::threads(1).run(|ctx| losses(ctx, DType::F32)).unwrap().remove(0);
    for (dtype, tolerance) in [(DType::F32, 1e-4), (DType::BF16, 5e-2)] {
        for (got, want) in losses(ctx, dtype)?.iter().zip(&alone) {
            assert!((got - want).abs() <= tolerance * want.abs(), "{dtype:?}: {got} for {want} in {alone:?}");
        }
    }
    Ok(())
}

fn losses(ctx: &RankContext, dtype: DType) -> candle_shard::Result<Vec<f64>> {
    let args = ModelArgs { vocab_size: 32, dim: 32, n_heads: 8, n_layers: 1, ..ModelArgs::default() };
    let (mesh, device) = (ctx.mesh(&[("tp", ctx.world_size())])?, ctx.device());
    let vb = MeshVarBuilder::fresh(7, &mesh, Transformer::plan("tp", true), dtype, device)?;
    let model = Transformer::new(&args, &vb)?;
    let parameters = vb.finish()?;
    let mut optimizer = SGD::new(parameters.vars(), 0.1)?;
    let ids = |offset: u32| -> candle_shard::Result<DTensor> {
        let ids: Vec<u32> = (0..32).map(|i| (i * 5 + offset) % 32).collect();
        DTensor::distribute(&Tensor::from_vec(ids, (4, 8), device)?, &mesh, &[Replicate])
    };
    (0..4)
        .map(|step| {
            let loss = model.forward(&ids(0)?, Mode::Train { step })?.cross_entropy(&ids(5)?)?;
            let mut grads = parameters.backward(&loss)?;
            // Sums of 16-bit gradients are f32, and candle's optimizer requires the variable's dtype.
            round_grads(&mut grads, &parameters.vars())?;
            optimizer.step(&grads)?;
            Ok(loss.full_tensor()?.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_scalar()?)
        })
        .collect()
}

fn differ_on_the_gpu(ctx: &RankContext) -> Result<(), Error> {
    let x = Tensor::ones(6, DType::F32, ctx.device())?;
    let op = if ctx.rank() == 1 { ReduceOp::Max } else { ReduceOp::Sum };
    ctx.group().all_reduce(&x, op)?;
    // The call itself may return.
    for _ in 0..500 {
        ctx.group().all_reduce(&x, ReduceOp::Sum)?;
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Nothing is called or read after the call that differs. NCCL does not notice this difference.
fn differ_at_last(ctx: &RankContext) -> Result<(), Error> {
    let x = Tensor::ones(6, DType::F32, ctx.device())?;
    ctx.group().all_reduce(&x, ReduceOp::Sum)?;
    // The first rank has returned before the others make their calls.
    std::thread::sleep(Duration::from_millis(300 * ctx.rank() as u64));
    match ctx.rank() {
        1 => ctx.group().call(Collective::AllReduce(ReduceOp::Sum)).start(&x)?.wait().map(drop),
        _ => ctx.group().all_reduce(&x, ReduceOp::Sum).map(drop),
    }
}

/// Rank 0 returns; the others wait for it on the GPU, outside of any call.
fn return_early(ctx: &RankContext) -> Result<(), Error> {
    let x = Tensor::ones(6, DType::F32, ctx.device())?;
    ctx.group().all_reduce(&x, ReduceOp::Sum)?.to_vec1::<f32>()?;
    if ctx.rank() == 0 {
        // The others have made their call.
        std::thread::sleep(Duration::from_millis(500));
        return Ok(());
    }
    let made = ctx.group().all_reduce(&x, ReduceOp::Sum)?;
    made.to_vec1::<f32>()?;
    ctx.group().barrier()
}

/// Every rank sends two messages, and only the first is received.
fn leave_a_message(g: &ProcessGroup, ctx: &RankContext) -> Result<(), Error> {
    let n = ctx.world_size();
    for value in [1.0, 2.0] {
        g.send(&(Tensor::ones(100, DType::F32, ctx.device())? * value)?, (ctx.rank() + 1) % n)?;
    }
    let made = g.recv(100, DType::F32, (ctx.rank() + n - 1) % n)?;
    assert_eq!(made.to_vec1::<f32>()?, [1.0; 100]);
    Ok(())
}

fn leave_a_message_in_a_group(ctx: &RankContext) -> Result<(), Error> {
    let group = ctx.group().subgroup(&(0..ctx.world_size()).collect::<Vec<_>>())?;
    leave_a_message(&group, ctx)
}

/// The group outlives the rank, as in a mesh or a model that the program keeps.
fn leave_a_message_and_the_group(ctx: &RankContext) -> Result<(), Error> {
    let group = ctx.group().subgroup(&(0..ctx.world_size()).collect::<Vec<_>>())?;
    leave_a_message(&group, ctx)?;
    std::mem::forget(group);
    Ok(())
}
