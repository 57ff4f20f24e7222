//! The training loop that all runs share.

use std::time::Instant;

use candle_core::{Device, Result, Var};
use candle_nn::{Optimizer, ParamsAdamW};
use candle_pipe::Batch;
use candle_shard::kernels::AdamW;

use super::args::Args;
use super::corpus::Corpus;
use crate::memory::page_faults;
use crate::progress::Progress;

/// The losses and the speed of a training.
#[derive(Clone, Debug)]
pub struct Training {
    /// The loss of every step.
    pub losses: Vec<f64>,
    /// Median time of a step in milliseconds.
    pub ms_per_step: f64,
    /// Page faults of the process in a step, the mean of the later half of the steps; `None` where the system does not
    /// count them.
    pub page_faults_per_step: Option<f64>,
}

impl Training {
    /// Calls `step(number, batch)`, which trains on the batch of a device and returns the loss, for all of
    /// `args.steps`.
    ///
    /// Only `step` is timed, not the drawing of the batch.
    pub fn run(
        args: &Args,
        corpus: &Corpus,
        device: &Device,
        progress: &Progress,
        mut step: impl FnMut(u64, &Batch) -> Result<f64>,
    ) -> Result<Self> {
        let mut losses = Vec::with_capacity(args.steps);
        let mut times = Vec::with_capacity(args.steps);
        let mut faults = Vec::with_capacity(args.steps);
        for number in 0..args.steps as u64 {
            let batch = corpus.batch(number, device)?;
            let faults_before = page_faults();
            let start = Instant::now();
            let loss = step(number, &batch)?;
            times.push(start.elapsed().as_secs_f64() * 1e3);
            faults.extend(page_faults().zip(faults_before).map(|(after, before)| (after - before) as f64));
            losses.push(loss);
            progress.step(loss);
        }
        // The first steps take the memory that later ones use again.
        let later = &faults[faults.len() / 2..];
        let page_faults_per_step =
            (!later.is_empty()).then(|| later.iter().sum::<f64>() / later.len() as f64);
        Ok(Self { losses, ms_per_step: median(&mut times), page_faults_per_step })
    }
}

/// Returns the optimizer of all runs, for the parameters that a rank holds.
pub fn optimizer(vars: Vec<Var>, args: &Args) -> Result<AdamW> {
    // Adam divides a gradient by its own size. For a gradient near zero this would amplify its rounding error, which
    // differs between runs. A larger epsilon than the usual 1e-8 keeps it small.
    AdamW::new(vars, ParamsAdamW { lr: args.lr, eps: 1e-6, ..ParamsAdamW::default() })
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    let middle = times.len() / 2;
    match times.len() {
        0 => 0.0,
        n if n.is_multiple_of(2) => (times[middle - 1] + times[middle]) / 2.0,
        _ => times[middle],
    }
}
