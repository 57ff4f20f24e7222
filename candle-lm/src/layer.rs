//! A decoder layer.

use std::sync::Arc;

use candle_shard::nn::{self, MeshVarBuilder};
use candle_shard::{Attention, DTensor, Error, Placements, Result, Shard};

use crate::TOKEN_AXIS;
use crate::balance::DecoderRouter;
use crate::cache::{self, CutTurn, LayerTokens, Texts, VisibleKv};
use crate::config::Config;
use crate::config::parts::{Parts, QkNorm};
use crate::feed_forward::FeedForward;
use crate::norm::Norm;
use crate::projection::{Projection, Qkv};
use crate::rope::{Angles, TokenPositions};

/// Attention with grouped heads, and a gated feed-forward network.
#[derive(Debug)]
pub(crate) struct DecoderLayer {
    /// Before and after attention, before and after the feed-forward layer.
    norms: [Option<Norm>; 4],
    qkv: Qkv,
    /// Of queries and keys.
    head_norms: Option<[Norm; 2]>,
    o_proj: Projection,
    feed_forward: FeedForward,
    /// The router of the experts, in a model that learns their balance.
    router: Option<DecoderRouter>,
    scale: f64,
    window: Option<usize>,
    is_rotary: bool,
    parts: Parts,
}

impl DecoderLayer {
    /// The layer of this number at the builder's path.
    pub(crate) fn new(config: &Config, layer: usize, vb: &MeshVarBuilder) -> Result<Self> {
        let (hidden, heads, parts) = (config.hidden_size, config.heads(), &config.parts);
        let attention = vb.pp("self_attn");
        let [a, b, c, d] = parts.norms.names();
        let norm = |name: Option<&str>| name.map(|name| Norm::new(hidden, config, &vb.pp(name))).transpose();
        let head_norms = |[query, key]: [usize; 2]| {
            let norm = |name: &str, width| Norm::new(width, config, &attention.pp(name));
            Ok::<_, candle_shard::Error>(Some([norm("q_norm", query)?, norm("k_norm", key)?]))
        };
        let qkv = Qkv::new(hidden, heads, parts.qkv_bias, &attention)?;
        Ok(Self {
            norms: [norm(a)?, norm(b)?, norm(c)?, norm(d)?],
            o_proj: Projection::new(qkv.width(), hidden, parts.output_bias, &attention.pp("o_proj"))?,
            qkv,
            head_norms: match parts.qk_norm {
                QkNorm::None => None,
                QkNorm::Head => head_norms([heads.dim; 2])?,
                QkNorm::All => head_norms([heads.query * heads.dim, heads.key_value * heads.dim])?,
            },
            feed_forward: FeedForward::new(config, layer, &vb.pp("mlp"))?,
            router: None,
            scale: parts.scores_scale.unwrap_or(1.0 / (heads.dim as f64).sqrt()),
            window: parts.window(layer),
            is_rotary: parts.is_rotary(layer),
            parts: parts.clone(),
        })
    }

    /// The layer of this number, which learns the balance of its experts.
    pub(crate) fn balanced(config: &Config, layer: usize, vb: &MeshVarBuilder) -> Result<Self> {
        let made = Self::new(config, layer, vb)?;
        let router = |experts| DecoderRouter::new(config.hidden_size, experts, &vb.pp("mlp"));
        Ok(Self { router: config.parts.experts(layer).map(router).transpose()?, ..made })
    }

    /// The states `[batch, tokens, hidden]` after this layer. With `turns`, the tokens of the one row belong to several
    /// texts, one behind another, and follow those that each has in the cache.
    pub(crate) fn forward(
        &self,
        x: &DTensor,
        angles: &Angles,
        turns: Option<Vec<LayerTokens<'_>>>,
    ) -> Result<DTensor> {
        self.fed(&self.mixed(x, angles, turns)?)
    }

    /// The states after this layer, and the sums of its router; with `recompute`, nothing between is kept for the backward pass.
    pub(crate) fn with_sums(
        self: &Arc<Self>,
        x: &DTensor,
        angles: &Angles,
        recompute: bool,
    ) -> Result<[DTensor; 2]> {
        let run = |part: fn(&Self, &DTensor, &Angles) -> Result<DTensor>, x: &DTensor| match recompute {
            true => {
                let (layer, angles) = (self.clone(), angles.clone());
                nn::recompute(x, move |x| part(&layer, x, &angles))
            }
            false => part(self, x, angles),
        };
        let x = run(|layer, x, angles| layer.mixed(x, angles, None), x)?;
        Ok([run(|layer, x, _| layer.fed(x), &x)?, run(|layer, x, _| layer.sums(x), &x)?])
    }

    /// The states after attention.
    fn mixed(&self, x: &DTensor, angles: &Angles, turns: Option<Vec<LayerTokens<'_>>>) -> Result<DTensor> {
        let [before, after, ..] = &self.norms;
        self.add(x, &through(after, &self.attention(&through(before, x)?, angles, turns)?)?)
    }

    /// The states after the feed-forward network, of those after attention.
    fn fed(&self, x: &DTensor) -> Result<DTensor> {
        let [.., before, after] = &self.norms;
        self.add(x, &through(after, &self.feed_forward.forward(&through(before, x)?)?)?)
    }

    /// The sums of the router, of the states after attention.
    fn sums(&self, x: &DTensor) -> Result<DTensor> {
        let router = self
            .router
            .as_ref()
            .ok_or_else(|| Error::Layout("a layer without experts has no balance".into()))?;
        let [.., before, _] = &self.norms;
        router.sums(&through(before, x)?)
    }

    fn add(&self, x: &DTensor, branch: &DTensor) -> Result<DTensor> {
        match self.parts.branch_scale {
            1.0 => x.add(branch),
            scale => x.add(&branch.affine(scale, 0.0)?),
        }
    }

    fn attention(
        &self,
        x: &DTensor,
        angles: &Angles,
        turns: Option<Vec<LayerTokens<'_>>>,
    ) -> Result<DTensor> {
        let [mut q, mut k, v] = self.qkv.forward(x)?;
        if let Some([of_queries, of_keys]) = &self.head_norms {
            (q, k) = match self.parts.qk_norm {
                QkNorm::All => (of_queries.over_heads(&q)?, of_keys.over_heads(&k)?),
                _ => (of_queries.forward(&q)?, of_keys.forward(&k)?),
            };
        }
        let is_local = self.window.is_some();
        let Some(turns) = turns else {
            if self.is_rotary {
                (q, k) = (angles.turn_rows(&q, is_local)?, angles.turn_rows(&k, is_local)?);
            }
            let [q, k, v] = [q.transpose(1, 2)?, k.transpose(1, 2)?, v.transpose(1, 2)?];
            let options = self.options().order(angles.order().cloned());
            let mixed = options.documents(angles.documents().cloned()).of(&q, &k, &v)?;
            return self.o_proj.forward(&mixed.flatten_from(2)?);
        };
        if self.is_rotary {
            let places: Vec<TokenPositions> =
                turns.iter().map(|turn| [turn.past.len(), turn.tokens]).collect();
            (q, k) = (angles.turn(&q, &places, is_local)?, angles.turn(&k, &places, is_local)?);
        }
        let mixed = match cache::texts(turns) {
            Texts::Whole(texts) => self.options().of_texts([&q, &k, &v], texts)?,
            Texts::Cut(texts) => self.over_parts([&q, &k, &v], texts)?,
        };
        self.o_proj.forward(&mixed.flatten_from(2)?)
    }

    fn options(&self) -> Attention {
        Attention::default().scale(self.scale).cap(self.parts.scores_cap).causal(true).window(self.window)
    }

    /// Attention `[batch, tokens, heads, dim]` over caches of which each rank has some tokens, text by text.
    fn over_parts(&self, [q, k, v]: [&DTensor; 3], texts: Vec<CutTurn<'_>>) -> Result<DTensor> {
        let mut start = 0;
        let of_text = |CutTurn { tokens, past }: CutTurn<'_>| {
            let part = |x: &DTensor| x.narrow(2, start, tokens)?.transpose(1, 2);
            let [q, k, v] = [part(q)?, part(k)?, part(v)?];
            start += tokens;
            let VisibleKv { keys, values, order } = past.extend([&k, &v])?;
            // Each rank computes some of several queries; one query meets the keys of each rank where they are.
            let whole: Placements = q.placements().into();
            let mut parts = whole.clone();
            if q.dims()[1] > 1 {
                parts[q.mesh().axis_index(TOKEN_AXIS)?] = Shard(1);
            }
            self.options().key_order(order).of(&q.redistribute(&parts)?, &keys, &values)?.redistribute(&whole)
        };
        match &texts.into_iter().map(of_text).collect::<Result<Vec<_>>>()?[..] {
            [one] => Ok(one.clone()),
            parts => DTensor::cat(parts, 1),
        }
    }
}

/// What a norm makes of states, if there is one.
fn through(norm: &Option<Norm>, x: &DTensor) -> Result<DTensor> {
    norm.as_ref().map_or_else(|| Ok(x.clone()), |norm| norm.forward(x))
}
