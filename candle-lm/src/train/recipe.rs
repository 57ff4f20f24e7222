//! What decides which numbers a training goes through, wherever it runs.

use serde::{Deserialize, Serialize};

use super::frozen::FrozenModules;
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
    /// The β of direct preference optimization, if preferences are learned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dpo: Option<f64>,
    /// How often the learning rate that of the factors `B` of an adapter is, if it is another one (LoRA+, Hayou et al. 2024).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lora_plus: Option<f64>,
    /// The modules of the model that do not learn.
    #[serde(default, skip_serializing_if = "FrozenModules::is_empty")]
    pub freeze: FrozenModules,
    /// How replicas meet that train apart; without it they take each step together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local: Option<LocalRecipe>,
}

/// Replicas that train apart, and meet from time to time ([`LocalSgd`](candle_dist::LocalSgd)).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LocalRecipe {
    /// The steps between two meetings.
    pub steps: usize,
    /// The number of replicas.
    pub replicas: usize,
    /// Parts of the parameters, each of which meets at a time of its own.
    pub fragments: usize,
    /// The learning rate of the outer optimizer.
    pub lr: f64,
    /// Its momentum.
    pub momentum: f64,
}

impl LocalRecipe {
    /// Checks each number by itself.
    fn check(self) -> InputResult {
        let Self { steps, replicas: _, fragments, lr, momentum } = self;
        require!(
            steps > 0,
            "--local-steps is 0: give at least 1, or leave it out for replicas that take each step together."
        );
        require!(
            (1..=steps).contains(&fragments),
            "--fragments {fragments} is not from 1 to the {steps} of --local-steps, in which each of them meets once."
        );
        require!(lr.is_finite() && lr > 0.0, "--outer-lr {lr} is not a positive finite number: try 0.7.");
        require!(
            (0.0..1.0).contains(&momentum),
            "--outer-momentum {momentum} is not from 0 to below 1: try 0.9."
        );
        Ok(())
    }

    /// Checks that these replicas go on where those of another recipe stopped.
    fn check_follows(self, saved: Self) -> InputResult {
        let (replicas, was) = (self.replicas, saved.replicas);
        require!(
            replicas == was,
            "--dp {replicas}: --resume goes on from {was} replicas that train apart, each with an optimizer of its own: give \
             --dp {was}, or begin anew from the checkpoint with --model."
        );
        for (flag, now, was) in
            [("--local-steps", self.steps, saved.steps), ("--fragments", self.fragments, saved.fragments)]
        {
            require!(now == was, "{flag} {now} is not the {was} that --resume goes on from: leave it out.");
        }
        Ok(())
    }
}

/// The most tokens of a step, whose numbers alone take a gigabyte.
const MOST_TOKENS: usize = 1 << 27;

impl Default for Recipe {
    fn default() -> Self {
        let (rate, dtype) = (Rate::default(), DTypeName::F32);
        Self {
            rate,
            batch: 8,
            seq_len: 128,
            weight_decay: 0.1,
            clip_norm: 1.0,
            dtype,
            seed: 0,
            dpo: None,
            lora_plus: None,
            freeze: FrozenModules::default(),
            local: None,
        }
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
        if let Some(beta) = self.dpo {
            require!(
                beta > 0.0 && (beta as f32).is_normal(),
                "--dpo {beta} is not a positive number of 32 bits: try 0.1."
            );
        }
        if let Some(ratio) = self.lora_plus {
            require!(
                ratio.is_finite() && ratio > 0.0,
                "--lora-plus {ratio} is not a positive finite number: try 16."
            );
        }
        self.local.map_or(Ok(()), LocalRecipe::check)
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
        match (self.dpo, saved.dpo) {
            (Some(beta), Some(was)) => require!(
                beta == was,
                "--dpo {beta} is not the {was} that --resume goes on from: leave it out."
            ),
            (Some(beta), None) => require!(
                false,
                "--dpo {beta}: --resume goes on from a training without it. Merge its adapter (lm merge), and train another one with --lora \
                 and --dpo."
            ),
            _ => {}
        }
        require!(
            self.freeze == saved.freeze || saved.local.is_none(),
            "--freeze {} is not the {} that --resume goes on from, and replicas that train apart have learned the same: leave it out.",
            self.freeze,
            if saved.freeze.is_empty() { "none".into() } else { saved.freeze.to_string() }
        );
        // Replicas that were together may go apart.
        match (self.local, saved.local) {
            (Some(local), Some(saved)) => local.check_follows(saved),
            _ => Ok(()),
        }
    }
}
