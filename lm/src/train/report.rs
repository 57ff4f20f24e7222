//! What the program tells when a model has learned.

use candle_lm::dtype::DTypeName;
use candle_lm::train::job::Job;
use candle_lm::train::loop_state::BestLoss;
use candle_lm::train::metrics::flops_per_token_of;
use candle_lm::train::trainer::{TrainEnd, TrainOutput};
use examples::table::grouped;
use itertools::Itertools;
use serde::Serialize;

/// The numbers of a training.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The number of the first step, which those before a stop come before.
    pub first_step: usize,
    /// The loss of each step.
    pub losses: Vec<f64>,
    /// The norm of the gradients of each step, before they were bounded.
    pub grad_norms: Vec<f64>,
    /// The loss of the text of `--valid`, each with the number of steps that were made before.
    pub valid_losses: Vec<(usize, f64)>,
    /// What parameters are held and computed in.
    pub dtype: DTypeName,
    /// Parts that each replica sends through its stages one after the other.
    pub microbatches: usize,
    /// The seconds in which the slowest rank read its part of the model.
    pub load_seconds: f64,
    /// The compute threads of each rank.
    pub threads: usize,
    /// The tokens of all steps.
    pub tokens: usize,
    /// Tokens a second, without saving.
    pub tokens_per_second: f64,
    /// The bytes that each rank gave to communication in all steps.
    pub sent_bytes: Vec<usize>,
    /// Floating-point operations of all ranks per second, in 10^12, without saving.
    pub tflops: f64,
    /// Their share of `--peak-tflops`.
    pub utilization: Option<f64>,
    /// Why the training ended.
    pub end: TrainEnd,
    /// The steps that were left out, also before a stop, since their loss or a gradient was no finite number.
    pub skipped: usize,
    /// The least loss of the text of `--valid`, also before a stop.
    pub best: Option<BestLoss>,
    /// The parameters that each rank holds as floats.
    pub parameters: Vec<usize>,
    /// The bytes of all weights that each rank holds, those in blocks too.
    pub weight_bytes: Vec<usize>,
    /// The gradients of weights that each rank could not put off where the schedule does so.
    pub weights_at_once: Vec<usize>,
    /// The most bytes that each rank's process had in memory, where the system tells; threads have a process in common.
    pub peak_memory: Vec<Option<usize>>,
}

impl Report {
    /// The numbers of what the ranks did, each with the most bytes that its process had in memory.
    ///
    /// # Errors
    /// Those of [`flops_per_token_of`].
    pub fn new(
        job: &Job,
        peak_tflops: Option<f64>,
        ranks: &[(TrainOutput, Option<usize>)],
    ) -> anyhow::Result<Self> {
        let TrainOutput { losses, grad_norms, valid, seconds, end, skipped, best, .. } = &ranks[0].0;
        let tokens = losses.len() * job.recipe.batch * job.recipe.seq_len;
        let tokens_per_second = if *seconds > 0.0 { tokens as f64 / seconds } else { 0.0 };
        let tflops = tokens_per_second * flops_per_token_of(job)? / 1e12;
        Ok(Self {
            first_step: job.start,
            losses: losses.clone(),
            grad_norms: grad_norms.clone(),
            valid_losses: valid.clone(),
            dtype: job.recipe.dtype,
            microbatches: job.pipeline.microbatches,
            load_seconds: ranks.iter().map(|(rank, _)| rank.load).fold(0.0, f64::max),
            threads: candle_core::utils::get_num_threads(),
            tokens,
            sent_bytes: ranks.iter().map(|(rank, _)| rank.sent).collect(),
            tokens_per_second,
            tflops,
            utilization: peak_tflops.map(|peak| tflops / peak),
            end: *end,
            skipped: *skipped,
            best: *best,
            parameters: ranks.iter().map(|(rank, _)| rank.parameters).collect(),
            weight_bytes: ranks.iter().map(|(rank, _)| rank.weight_bytes).collect(),
            weights_at_once: ranks.iter().map(|(rank, _)| rank.weights_at_once).collect(),
            peak_memory: ranks.iter().map(|(_, peak_memory)| *peak_memory).collect(),
        })
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let parameters = self.parameters.iter().map(|&count| grouped(count)).dedup().join(", ");
        write!(
            f,
            "{} ranks, {} threads and {parameters} parameters each: ",
            self.parameters.len(),
            self.threads
        )?;
        if let (Some(first), Some(last)) = (self.losses.first(), self.losses.last()) {
            write!(f, "loss {first:.4} to {last:.4} in ")?;
        }
        write!(
            f,
            "{} steps, {} tokens at {:.0} a second, {:.3} TFLOP/s",
            self.losses.len(),
            grouped(self.tokens),
            self.tokens_per_second,
            self.tflops
        )?;
        if let Some(share) = self.utilization {
            write!(f, ", {:.1} % of the peak", 100.0 * share)?;
        }
        if self.skipped > 0 {
            write!(
                f,
                "\n{} steps were left out: their loss or a gradient was no finite number",
                self.skipped
            )?;
        }
        if let Some(BestLoss { steps, loss }) = self.best {
            write!(f, "\nthe least loss of --valid was {loss:.4}, after step {steps}")?;
        }
        match self.weights_at_once.iter().sum::<usize>() {
            0 => Ok(()),
            count => write!(
                f,
                "\n{} gradients of weights were not put off as the schedule says, so that steps take longer than it promises: \
                 fully sharded weights and those that other stages send cannot wait",
                grouped(count)
            ),
        }
    }
}
