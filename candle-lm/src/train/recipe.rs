//! What decides which numbers a training goes through, wherever it runs.

use serde::{Deserialize, Serialize};

use super::rate::Rate;
use crate::dtype::DTypeName;
use crate::error::{InputResult, require};

/// What a checkpoint keeps of the command line. Ranks, microbatches and recomputing are not in it: they change nothing but
/// the rounding.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Recipe {
    /// The learning rate, and how many steps there are.
    pub rate: Rate,
    /// Sequences in each step.
    pub batch: usize,
    /// Tokens in each sequence.
    pub seq_len: usize,
    /// The share of the learning rate by which a step makes parameters smaller.
    pub weight_decay: f64,
    /// The largest norm of the gradients, 0 for any.
    pub clip_norm: f64,
    /// What parameters are held and computed in.
    pub dtype: DTypeName,
    /// The seed of the batches, and of a random model.
    pub seed: u64,
}

/// The most tokens of a step, whose numbers alone take a gigabyte.
const MOST_TOKENS: usize = 1 << 27;

impl Default for Recipe {
    fn default() -> Self {
        let (rate, dtype) = (Rate::default(), DTypeName::F32);
        Self { rate, batch: 8, seq_len: 128, weight_decay: 0.1, clip_norm: 1.0, dtype, seed: 0 }
    }
}

impl Recipe {
    /// Checks each number by itself.
    ///
    /// # Errors
    /// A sentence that names the flag, its value and a remedy.
    pub fn check(&self) -> InputResult {
        let Self { rate, batch, seq_len, weight_decay, clip_norm, .. } = *self;
        for (flag, value, most) in
            [("--steps", rate.steps, 1 << 32), ("--batch", batch, 1 << 24), ("--seq-len", seq_len, 1 << 24)]
        {
            require!(value > 0, "{flag} is 0: give at least 1.");
            require!(value <= most, "{flag} {value} is too large: give at most {most}.");
        }
        require!(
            batch * seq_len <= MOST_TOKENS,
            "--batch {batch} × --seq-len {seq_len} are too many tokens for a step: give at most {MOST_TOKENS}."
        );
        rate.check()?;
        for (flag, value) in [("--weight-decay", weight_decay), ("--clip-norm", clip_norm)] {
            require!(
                value.is_finite() && value >= 0.0,
                "{flag} {value} is no finite number of at least 0: give 0 for none."
            );
        }
        Ok(())
    }

    /// Checks that this recipe goes on where another one stopped.
    ///
    /// # Errors
    /// A sentence that names what was changed and must not be.
    pub fn check_follows(&self, saved: &Self) -> InputResult {
        let kept = |recipe: &Self| {
            let Self { batch, seq_len, dtype, seed, .. } = recipe;
            [
                ("--batch", batch.to_string()),
                ("--seq-len", seq_len.to_string()),
                ("--dtype", dtype.to_string()),
                ("--seed", seed.to_string()),
            ]
        };
        for ((flag, value), (_, was)) in kept(self).into_iter().zip(kept(saved)) {
            require!(
                value == was,
                "{flag} {value} is not the {was} that --resume goes on from: leave it out."
            );
        }
        Ok(())
    }
}
