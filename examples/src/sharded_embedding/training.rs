//! The training that all runs share.

use std::ops::Range;
use std::time::Instant;

use candle_core::{DType, Tensor};
use candle_dist::comm::{self, CommCounts};
use candle_dist::{Collective, Cut, ProcessGroup, RankContext, ReduceOp};
use candle_nn::{Optimizer, SGD};
use candle_shard::Result;

use super::args::Args;
use super::log::{Batch, Log};
use super::metrics::Quality;
use super::model::{Mode, Model};
use super::optimizer::TableOptimizer;
use super::outcome::{RunName, RunOutcome};
use crate::comm::CommStat;
use crate::launch::Ranks;
use crate::progress::Progress;
use crate::timing::median;

/// The step of the held-out batch.
const HELD_OUT: u64 = u64::MAX;
/// Samples of that batch.
pub const HELD_OUT_SAMPLES: usize = 20_000;
/// The learning rate of the perceptron.
const DENSE_LR: f64 = 0.1;

/// Trains the model as run `name`. The outcome is on rank 0, which makes the run on one device alone.
///
/// # Errors
/// That of the first rank that fails.
pub fn train(name: RunName, args: &Args, log: &Log, ranks: &Ranks<'_>) -> anyhow::Result<Option<RunOutcome>> {
    let world = if name == RunName::OneDevice { 1 } else { args.ranks };
    ranks.run(world, |ctx| train_rank(ctx, name, args, log))
}

/// Returns whether each sample of the held-out batch was clicked.
///
/// # Errors
/// candle's.
pub fn held_out_clicks(log: &Log) -> candle_core::Result<Vec<f32>> {
    log.batch(HELD_OUT, HELD_OUT_SAMPLES, 0..HELD_OUT_SAMPLES)?.clicks.to_vec1()
}

/// Returns a rank's part of a batch. Parts differ by at most one sample.
fn part(group: &ProcessGroup, rank: usize, batch: usize) -> Range<usize> {
    rank * batch / group.size()..(rank + 1) * batch / group.size()
}

fn train_rank(ctx: &RankContext, name: RunName, args: &Args, log: &Log) -> Result<RunOutcome> {
    let group = ctx.group();
    let model = Model::new(name, args, group)?;
    let mut tables = TableOptimizer::new(model.rows.clone(), args)?;
    let mut perceptron = SGD::new(model.dense.clone(), DENSE_LR)?;
    let progress =
        if ctx.rank() == 0 { Progress::new(name.as_str(), args.steps) } else { Progress::silent() };
    let (mut losses, mut times) = (Vec::with_capacity(args.steps), Vec::with_capacity(args.steps));
    let (trained, counts) = comm::record(|| -> Result<()> {
        for step in 0..args.steps as u64 {
            let batch = log
                .batch(step, args.batch, part(group, ctx.rank(), args.batch))?
                .to_device(group.device())?;
            let start = Instant::now();
            let loss = train_step(&model, &batch, args.batch, group, &mut perceptron)?;
            tables.step()?;
            group.device().synchronize()?;
            times.push(start.elapsed().as_secs_f64() * 1e3);
            losses.push(loss);
            progress.step(loss);
        }
        Ok(())
    });
    trained?;
    progress.finish();
    outcome(name, &model, log, group, (losses, &mut times, &counts))
}

/// Trains the perceptron on a batch of `samples` samples over all ranks, and leaves the row gradients in the tables.
/// Returns the mean loss.
fn train_step(
    model: &Model,
    batch: &Batch,
    samples: usize,
    group: &ProcessGroup,
    perceptron: &mut SGD,
) -> Result<f64> {
    let losses = log_losses(&model.forward(batch, Mode::Train)?, &batch.clicks)?;
    // This rank's share of the mean over all samples, so the gradients of the ranks sum to that of the mean.
    let mut grads = (losses.sum_all()? / samples as f64)?.backward()?;
    let mut sums = Vec::with_capacity(model.dense.len() + 1);
    for var in &model.dense {
        sums.push(grads.remove(var).map_or_else(|| var.zeros_like(), |grad| Ok(grad.detach()))?);
    }
    sums.push(losses.detach().to_dtype(DType::F64)?.sum_all()?);
    let sums = group.call(Collective::AllReduce(ReduceOp::Sum)).run_all(&sums)?;
    for (var, sum) in model.dense.iter().zip(&sums) {
        grads.insert(var, sum.clone());
    }
    perceptron.step(&grads)?;
    Ok(sums[model.dense.len()].to_scalar::<f64>()? / samples as f64)
}

/// Returns the logistic loss of each sample: `ln(1 + e^x) - x · click`, without overflow.
fn log_losses(logits: &Tensor, clicks: &Tensor) -> candle_core::Result<Tensor> {
    let small = ((logits.abs()?.neg()?.exp()? + 1.0)?).log()?;
    logits.relu()? + small - (logits * clicks)?
}

/// Evaluates the trained model, and gathers the data to compare.
fn outcome(
    name: RunName,
    model: &Model,
    log: &Log,
    group: &ProcessGroup,
    (losses, times, counts): (Vec<f64>, &mut [f64], &CommCounts),
) -> Result<RunOutcome> {
    let parts: Vec<Range<usize>> =
        (0..group.size()).map(|rank| part(group, rank, HELD_OUT_SAMPLES)).collect();
    let sizes: Vec<usize> = parts.iter().map(Range::len).collect();
    let batch =
        log.batch(HELD_OUT, HELD_OUT_SAMPLES, parts[group.rank()].clone())?.to_device(group.device())?;
    let logits = group
        .call(Collective::all_gather(Cut::new(0, &sizes)))
        .run(&model.forward(&batch, Mode::Eval)?.detach())?;
    let clicks = group.call(Collective::all_gather(Cut::new(0, &sizes))).run(&batch.clicks)?;
    Ok(RunOutcome {
        name,
        world: group.size(),
        comm_per_step: CommStat::per_step(counts, losses.len()),
        losses,
        ms_per_step: median(times),
        tables: model.whole_tables()?,
        quality: Quality::of(&logits.to_vec1()?, &clicks.to_vec1()?),
    })
}
