//! Numbers about steps that cost something: the size of updates, and the work that a step takes.

use std::collections::HashMap;

use anyhow::Result;
use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use candle_dist::{ClipGradNorm, square_sum};
use candle_shard::nn::{AdamW, Parameters};

use super::job::Job;
use crate::adapter::{self, TRAINED};
use crate::config::Config;
use crate::config::tensors::LAYER_EMBEDDINGS;

/// The floating-point operations that a token takes in a training step: 6 for each parameter that computes, and
/// `12 * layers * width * tokens` for the attention to a sequence of so many tokens, as in the paper of PaLM.
///
/// A table is looked up and computes nothing, unless it is the output layer too. Of experts those count that a token chooses, and of a
/// layer with a window its tokens. What layers compute again to save memory is not counted.
///
/// ```
/// use candle_lm::random_model;
/// use candle_lm::train::metrics::flops_per_token;
///
/// let config = random_model::config();
/// let computes = config.parameters() - config.vocab_size * config.hidden_size; // the table
/// let attention = 12 * config.num_hidden_layers * config.hidden_size * 128;
/// assert_eq!(flops_per_token(&config, 128), (6 * computes + attention) as f64);
/// ```
pub fn flops_per_token(config: &Config, seq_len: usize) -> f64 {
    6.0 * computing(config, |_| true) + attention(config, seq_len)
}

/// The floating-point operations that a token takes in a step of a job: those of [`flops_per_token`], less those of the gradients of weights that
/// are frozen, with those of the factors of an adapter. Preferences take another forward pass.
///
/// # Errors
/// If the model has no module that the adapter names.
pub fn flops_per_token_of(job: &Job) -> Result<f64> {
    let (config, seq_len) = (&job.files.config, job.recipe.seq_len);
    let whole = flops_per_token(config, seq_len);
    let Some(lora) = &job.lora else {
        return Ok(whole - 2.0 * computing(config, |name| job.recipe.freeze.contains(name)));
    };
    let learned = |(name, shape): &(String, Vec<usize>)| {
        let operations = match () {
            () if shape.len() < 2 || name.contains(".lora_embedding_A.") => 0.0,
            () if name.contains(".lora_") => 6.0,
            // A module of the model that is trained itself.
            () => 2.0,
        };
        operations * config.active(name, shape) as f64
    };
    let learned: f64 = adapter::tensors(TRAINED, lora, &job.files)?.iter().map(learned).sum();
    let reference = if job.recipe.dpo.is_some() { whole / 3.0 } else { 0.0 };
    Ok(whole - 2.0 * computing(config, |_| true) + learned + reference)
}

/// The parameters of a model that compute for a token, of those that `counts`.
fn computing(config: &Config, counts: impl Fn(&str) -> bool) -> f64 {
    let computes = |name: &str| match name.strip_suffix(".weight") {
        Some("model.embed_tokens") => config.tie_word_embeddings,
        module => module != Some(LAYER_EMBEDDINGS[0]),
    };
    let tensors = config.tensors();
    let active = tensors.iter().filter(|(name, _)| computes(name) && counts(name));
    active.map(|(name, shape)| config.active(name, shape)).sum::<usize>() as f64
}

/// The operations of the attention to a sequence of so many tokens.
fn attention(config: &Config, seq_len: usize) -> f64 {
    // Queries meet keys, and weights meet values.
    let widths = |layer| {
        let heads = config.heads_of(layer);
        heads.query * (heads.dim + config.parts.latent().map_or(heads.dim, |widths| widths.value))
    };
    let seen = |layer| {
        widths(layer) as f64 * config.parts.window(layer).map_or(seq_len, |window| window.min(seq_len)) as f64
    };
    let attention = (0..config.num_hidden_layers).filter(|&layer| config.parts.mixer(layer).is_attention());
    6.0 * attention.map(seen).sum::<f64>()
}

/// Steps of an optimizer whose size is measured.
#[derive(Debug)]
pub(super) struct UpdateNorm {
    /// The variables of this rank, each with the values that the optimizer updates: its own, or its 32-bit copy.
    updated: Vec<(Var, Tensor)>,
    named: Vec<(String, Var)>,
    /// Sums over ranks without limit.
    norm: ClipGradNorm,
}

impl UpdateNorm {
    /// Measures steps of an optimizer, whose norms are summed over ranks as those of gradients are that `norm` bounds, which has no
    /// bound.
    pub(super) fn new(parameters: &Parameters, optimizer: &AdamW, norm: ClipGradNorm) -> Self {
        let copies: HashMap<String, Var> = optimizer.master_weights().into_iter().collect();
        let updated = parameters
            .iter()
            .filter(|of| !of.is_frozen())
            .map(|of| (of.var.clone(), copies.get(&of.name).unwrap_or(&of.var).as_detached_tensor()));
        Self { updated: updated.collect(), named: parameters.named_vars(), norm }
    }

    /// Makes the step, and returns the norm of the change of all parameters that have a gradient, relative to the norm that they had.
    /// Every rank calls it. One parameter at a time is copied.
    ///
    /// # Errors
    /// Those of the optimizer and of the group.
    pub(super) fn step(&self, optimizer: &mut AdamW, grads: &GradStore) -> Result<f64> {
        let (mut changes, mut before) = (GradStore::default(), GradStore::default());
        for (var, values) in &self.updated {
            let Some(grad) = grads.get(var) else { continue };
            let mut alone = GradStore::default();
            alone.insert(var, grad.clone());
            let old = values.copy()?;
            optimizer.step(&alone)?;
            // The norm of a part stands for it.
            changes.insert(var, square_sum(values, Some(&old))?.sqrt()?);
            before.insert(var, square_sum(&old, None)?.sqrt()?);
        }
        let change = self.norm.clip(&self.named, &mut changes)?;
        let size = self.norm.clip(&self.named, &mut before)?;
        Ok(if size > 0.0 { change / size } else { 0.0 })
    }
}
