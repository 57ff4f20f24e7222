//! Preferences, which are compared with those of the model without its adapter.

use std::ops::Range;

use anyhow::Result;
use candle_core::{DType, Tensor};
use candle_dist::{ProcessGroup, ReduceOp};
use candle_pipe::microbatch::Microbatches;
use candle_pipe::{Runtime, StepOptions};
use candle_shard::nn::ActiveAdapters;

use super::data::{BatchPart, SequenceBatch};

/// Returns what a rank has of some of the sequences, as [`SequenceBatch::part`] does. Preferences come with the margins of the model
/// without its adapter, which is the reference; it costs a forward pass.
///
/// Every rank of the runtime calls it, whose group is `stages`.
///
/// # Errors
/// Those of the runtime.
pub(super) fn part(
    runtime: &Runtime,
    stages: &ProcessGroup,
    batch: &SequenceBatch,
    rows: Range<usize>,
    of: &BatchPart,
    step: u64,
) -> Result<(Microbatches, StepOptions)> {
    let (cut, options) = batch.part(rows.clone(), of, step, None)?;
    if batch.signs.is_none() {
        return Ok((cut, options));
    }
    let made = ActiveAdapters::none().run(|| runtime.evaluate(&cut, &StepOptions::default().step(step)))?;
    // The last stage has them, and all stages are given the same batch.
    let margins = made.step.outputs.iter().filter_map(|outputs| outputs.get("margins").ok());
    let margins: Vec<Tensor> = margins.map(|margins| Ok(margins.tensor()?.clone())).collect::<Result<_>>()?;
    let margins = match margins.is_empty() {
        true => Tensor::zeros(of.rows(rows.len()), DType::F32, batch.tokens.device())?,
        false => Tensor::cat(&margins, 0)?,
    };
    let margins = stages.all_reduce(&margins, ReduceOp::Sum)?;
    Ok(batch.part(rows, of, step, Some(&margins))?)
}
