//! The decoder, cut over a mesh axis by heads and by columns of the feed-forward layers.

use candle_core::Tensor;
use candle_dist::DeviceMesh;
use candle_shard::nn::ShardedVarBuilder;
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::{DTensor, Error, Placements, Replicate, Result};

use super::cache::Cache;
use super::config::Config;
use super::layer::Layer;
use super::norm::Norm;
use super::projection::{Projection, Table};
use super::rope::Angles;

/// A decoder of any family.
#[derive(Debug)]
pub struct Decoder {
    embed_tokens: Table,
    layers: Vec<Layer>,
    norm: Norm,
    lm_head: Projection,
    angles: Angles,
    mesh: DeviceMesh,
    config: Config,
}

impl Decoder {
    /// The model at the builder's path, for sequences of up to `longest` tokens, with the parameters that the Hub's
    /// files have.
    ///
    /// # Errors
    /// Those of the builder.
    pub fn new(config: &Config, longest: usize, vb: &ShardedVarBuilder) -> Result<Self> {
        let model = vb.pp("model");
        let embed_tokens = Table::new(config.vocab_size, config.hidden_size, &model.pp("embed_tokens"))?;
        let layer = |i: usize| Layer::new(config, i, &model.pp("layers").pp(i));
        let layers = (0..config.num_hidden_layers).map(layer).collect::<Result<_>>()?;
        let norm = Norm::new(config.hidden_size, config, &model.pp("norm"))?;
        let lm_head = match config.tie_word_embeddings {
            true => embed_tokens.tied(&vb.pp("lm_head"))?,
            false => Projection::new(config.hidden_size, config.vocab_size, false, &vb.pp("lm_head"))?,
        };
        let (angles, mesh) = (Angles::new(config, longest, vb)?, vb.mesh().clone());
        Ok(Self { embed_tokens, layers, norm, lm_head, angles, mesh, config: config.clone() })
    }

    /// How the model is cut on the mesh axis `axis`: heads and feed-forward columns, tables by tokens.
    pub fn plan(axis: &str) -> Plan {
        let whole = RowwiseParallel { output: Replicate, ..Default::default() };
        Plan::new(axis)
            .with("model.embed_tokens", whole)
            .with("model.layers.*.self_attn", ColwiseParallel::default())
            .with("model.layers.*.self_attn.o_proj", whole)
            .with("model.layers.*.mlp.gate_proj", ColwiseParallel::default())
            .with("model.layers.*.mlp.up_proj", ColwiseParallel::default())
            .with("model.layers.*.mlp.down_proj", whole)
            .with("lm_head", ColwiseParallel { output: Some(Replicate), ..Default::default() })
    }

    /// The same [plan](Self::plan) for training, in which no rank has the logits of the whole vocabulary.
    pub fn training_plan(axis: &str) -> Plan {
        Self::plan(axis).with("lm_head", ColwiseParallel::default())
    }

    /// The logits `[batch, vocabulary]` of what follows the last of `tokens` `[batch, tokens]`, which follow those in the
    /// cache.
    ///
    /// # Errors
    /// If the cache has no room for the tokens, or there are none.
    pub fn next(&self, tokens: &Tensor, cache: &mut Cache) -> Result<Tensor> {
        let h = self.hidden(tokens, cache)?;
        let last = h.dims()[1].checked_sub(1).ok_or_else(|| Error::Layout("no tokens to follow".into()))?;
        self.logits(&h.narrow(1, last, 1)?)?.squeeze(1).map_err(Error::from)
    }

    /// The logits `[batch, tokens, vocabulary]` of what follows each of the tokens.
    ///
    /// # Errors
    /// If the cache has no room for the tokens.
    pub fn forward(&self, tokens: &Tensor, cache: &mut Cache) -> Result<Tensor> {
        self.logits(&self.hidden(tokens, cache)?)
    }

    fn hidden(&self, tokens: &Tensor, cache: &mut Cache) -> Result<DTensor> {
        let count = tokens.dims().get(1).copied().unwrap_or(0);
        cache.check(count)?;
        let everywhere = Placements::from_elem(Replicate, self.mesh.ndim());
        let mut h = self.embed_tokens.forward(&DTensor::distribute(tokens, &self.mesh, &everywhere)?)?;
        h = embedded(h, &self.config)?;
        for (i, layer) in self.layers.iter().enumerate() {
            h = layer.forward(&h, &self.angles, Some(cache.past(i)))?;
        }
        cache.advance(count);
        Ok(h)
    }

    fn logits(&self, h: &DTensor) -> Result<Tensor> {
        finished(self.lm_head.forward(&self.norm.forward(h)?)?, &self.config)?.full_tensor()
    }
}

/// The first hidden states, from rows of the table.
pub(super) fn embedded(h: DTensor, config: &Config) -> Result<DTensor> {
    match config.parts.embedding_scale {
        1.0 => Ok(h),
        scale => h.affine(scale, 0.0),
    }
}

/// The logits, from those that the output layer computes.
pub(super) fn finished(logits: DTensor, config: &Config) -> Result<DTensor> {
    let logits = match config.parts.logits_divisor {
        1.0 => logits,
        divisor => logits.affine(1.0 / divisor, 0.0)?,
    };
    match config.parts.logits_cap {
        None => Ok(logits),
        Some(cap) => logits.affine(1.0 / cap, 0.0)?.tanh()?.affine(cap, 0.0),
    }
}
