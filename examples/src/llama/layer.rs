//! A decoder layer.

use candle_shard::nn::{FusedQkv, Linear, RmsNorm, ShardedVarBuilder};
use candle_shard::{DTensor, Result};

use super::cache::Past;
use super::config::Config;
use super::rope::Angles;

/// Attention with grouped heads and rotary positions, and a gated feed-forward layer.
#[derive(Debug)]
pub(super) struct Layer {
    input_layernorm: RmsNorm,
    qkv: FusedQkv,
    o_proj: Linear,
    post_attention_layernorm: RmsNorm,
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
    scale: f64,
}

impl Layer {
    pub(super) fn new(config: &Config, vb: &ShardedVarBuilder) -> Result<Self> {
        let (hidden, inner, heads) = (config.hidden_size, config.intermediate_size, config.heads());
        let (attention, mlp) = (vb.pp("self_attn"), vb.pp("mlp"));
        let norm = |name: &str| RmsNorm::new(hidden, config.rms_norm_eps, &vb.pp(name));
        let qkv = FusedQkv::with_names(hidden, heads, false, ["q_proj", "k_proj", "v_proj"], &attention)?;
        Ok(Self {
            input_layernorm: norm("input_layernorm")?,
            o_proj: Linear::new(qkv.width(), hidden, false, &attention.pp("o_proj"))?,
            qkv,
            post_attention_layernorm: norm("post_attention_layernorm")?,
            gate_proj: Linear::new(hidden, inner, false, &mlp.pp("gate_proj"))?,
            up_proj: Linear::new(hidden, inner, false, &mlp.pp("up_proj"))?,
            down_proj: Linear::new(inner, hidden, false, &mlp.pp("down_proj"))?,
            scale: 1.0 / (heads.dim as f64).sqrt(),
        })
    }

    /// The states `[batch, tokens, hidden]` after this layer, whose tokens follow those of the past, if there is one.
    pub(super) fn forward(&self, x: &DTensor, angles: &Angles, past: Option<Past<'_>>) -> Result<DTensor> {
        let x = x.add(&self.attention(&self.input_layernorm.forward(x)?, angles, past)?)?;
        let h = self.post_attention_layernorm.forward(&x)?;
        let gated = self.gate_proj.forward(&h)?.silu_gate(&self.up_proj.forward(&h)?)?;
        x.add(&self.down_proj.forward(&gated)?)
    }

    fn attention(&self, x: &DTensor, angles: &Angles, past: Option<Past<'_>>) -> Result<DTensor> {
        let [q, k, v] = self.qkv.forward(x)?;
        let start = past.as_ref().map_or(0, Past::len);
        let (q, k) = (angles.turn(&q, start)?, angles.turn(&k, start)?);
        let [k, v] = match past {
            Some(past) => past.extend([&k, &v])?,
            None => [k, v],
        };
        let tokens_first = |x: &DTensor| x.transpose(1, 2);
        let mixed = tokens_first(&q)?.flash_attn(&tokens_first(&k)?, &tokens_first(&v)?, self.scale, true)?;
        self.o_proj.forward(&mixed.flatten_from(2)?)
    }
}
