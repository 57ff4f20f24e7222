//! The decoder, cut over a mesh axis by heads and by columns of the feed-forward layers.

use candle_core::Tensor;
use candle_shard::nn::{Embedding, Linear, RmsNorm, ShardedVarBuilder};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::{DTensor, Error, Placements, Replicate, Result};

use super::cache::Cache;
use super::config::Config;
use super::layer::Layer;
use super::rope::Angles;

/// A Llama (Touvron et al. 2023, Dubey et al. 2024).
#[derive(Debug)]
pub struct Llama {
    embed_tokens: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    lm_head: Linear,
    angles: Angles,
}

impl Llama {
    /// The model at the builder's path, for sequences of up to `longest` tokens, with the parameters that the Hub's
    /// files have.
    ///
    /// # Errors
    /// Those of the builder.
    pub fn new(config: &Config, longest: usize, vb: &ShardedVarBuilder) -> Result<Self> {
        let model = vb.pp("model");
        let embed_tokens = Embedding::new(config.vocab_size, config.hidden_size, 1.0, &model.pp("embed_tokens"))?;
        let layer = |i: usize| Layer::new(config, &model.pp("layers").pp(i));
        let layers = (0..config.num_hidden_layers).map(layer).collect::<Result<_>>()?;
        let norm = RmsNorm::new(config.hidden_size, config.rms_norm_eps, &model.pp("norm"))?;
        let lm_head = match config.tie_word_embeddings {
            true => Linear::tied(embed_tokens.weight(), &vb.pp("lm_head"))?,
            false => Linear::new(config.hidden_size, config.vocab_size, false, &vb.pp("lm_head"))?,
        };
        let angles = Angles::new(config, longest, vb)?;
        Ok(Self { embed_tokens, layers, norm, lm_head, angles })
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
        let mesh = self.embed_tokens.weight().mesh();
        let everywhere = Placements::from_elem(Replicate, mesh.ndim());
        let mut h = self.embed_tokens.forward(&DTensor::distribute(tokens, mesh, &everywhere)?)?;
        for (i, layer) in self.layers.iter().enumerate() {
            h = layer.forward(&h, &self.angles, Some(cache.past(i)))?;
        }
        cache.advance(count);
        Ok(h)
    }

    fn logits(&self, h: &DTensor) -> Result<Tensor> {
        self.lm_head.forward(&self.norm.forward(h)?)?.full_tensor()
    }
}
