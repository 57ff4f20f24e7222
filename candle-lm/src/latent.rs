//! Latent attention of a decoder layer: keys and values that are made of one latent a token.

use candle_shard::nn::{Heads, LatentHeads, LatentProjection, MeshVarBuilder, Width};
use candle_shard::{Attention, DTensor, Error, Result};

use crate::attention::{over_rows, over_visible, places, visible};
use crate::cache::{self, LayerTokens, Texts, VisibleKv};
use crate::config::Config;
use crate::config::parts::LatentWidths;
use crate::norm::Norm;
use crate::projection::{Projection, granule};
use crate::rope::Angles;

/// What keeps the norms of latents from dividing by zero, whatever the config has for others.
const EPS: f64 = 1e-6;

/// Attention whose keys and values are made of latents. Each rank has some heads, and all latents.
///
/// Sequences that are computed whole have the keys and values of all heads. A cache has the latents alone, which the queries of new tokens
/// meet as one key head: see [`LatentProjection`].
#[derive(Debug)]
pub(crate) struct LatentAttention {
    /// What makes latents of queries, if they have some.
    query_down: Option<(Projection, Norm)>,
    query_up: Projection,
    down: Projection,
    norm: Norm,
    up: LatentProjection,
    o_proj: Projection,
    widths: LatentWidths,
    scale: f64,
}

/// What a layer makes of new tokens.
struct LatentParts {
    /// The part of each query that meets what a head's keys have of their own, `[batch, heads, tokens, own]`.
    own: DTensor,
    /// The part that is turned, `[batch, heads, tokens, rotary]`.
    turned: DTensor,
    /// `[batch, tokens, rank]`.
    latents: DTensor,
    /// The part that the keys of all heads have in common, `[batch, 1, tokens, rotary]`.
    common: DTensor,
}

impl LatentAttention {
    /// The layer at the builder's path.
    pub(crate) fn new(config: &Config, widths: LatentWidths, vb: &MeshVarBuilder) -> Result<Self> {
        let (hidden, count) = (config.hidden_size, config.num_attention_heads);
        let LatentWidths { query, rank, own, rotary, value } = widths;
        let biased = config.parts.qkv_bias;
        let norm = |name: &str, width| Ok::<_, Error>(Norm::new(width, config, &vb.pp(name))?.with_eps(EPS));
        let ranks = vb.mesh().size_of(crate::LAYER_AXIS).unwrap_or(1);
        // Heads stay together where the output projection could not be cut between them.
        let heads = Heads { query: count, key_value: count, dim: value };
        let together = heads.together(ranks, granule(&vb.pp("o_proj")));
        let of_heads = |width: usize| Width::new(count / together, together * width);
        let down = |name: &str, width: usize| Projection::new(hidden, width, biased, &vb.pp(name));
        let query_down = query
            .map(|width| Ok::<_, Error>((down("q_a_proj", width)?, norm("q_a_layernorm", width)?)))
            .transpose()?;
        let (input, name) = query.map_or((hidden, "q_proj"), |width| (width, "q_b_proj"));
        let heads = LatentHeads { count, key: own, value };
        Ok(Self {
            query_down,
            query_up: Projection::new(input, of_heads(own + rotary), false, &vb.pp(name))?,
            down: down("kv_a_proj_with_mqa", rank + rotary)?,
            norm: norm("kv_a_layernorm", rank)?,
            up: LatentProjection::new(rank, heads, together, &vb.pp("kv_b_proj"))?,
            o_proj: Projection::new(of_heads(value), hidden, config.parts.output_bias, &vb.pp("o_proj"))?,
            scale: config.parts.scores_scale.unwrap_or(1.0 / ((own + rotary) as f64).sqrt()),
            widths,
        })
    }

    /// What attention adds to states `[batch, tokens, hidden]`.
    pub(crate) fn forward(
        &self,
        x: &DTensor,
        angles: &Angles,
        turns: Option<Vec<LayerTokens<'_>>>,
    ) -> Result<DTensor> {
        let LatentParts { own, turned, latents, common } = self.parts(x)?;
        let Some(turns) = turns else {
            let places = angles.rows_of(x.dims()[1]);
            let [turned, common] = angles.turn_both([&turned, &common], &places, false)?;
            let [k, v] = self.up.expand(&latents, &common)?;
            let q = angles.scale_queries(DTensor::cat(&[own, turned], 3)?, &places)?;
            let mixed = over_rows(self.options(), angles, [&q, &k, &v])?;
            return self.o_proj.forward(&mixed.flatten_from(2)?);
        };
        let places = places(&turns);
        let [turned, common] = angles.turn_both([&turned, &common], &places, false)?;
        let q = angles.scale_queries(DTensor::cat(&[self.up.absorb(&own)?, turned], 3)?, &places)?;
        let latents = latents.unsqueeze(1)?;
        let mixed = match cache::texts(turns)? {
            Texts::Whole(texts) => {
                let keys = DTensor::cat(&[latents.clone(), common], 3)?;
                self.options().of_texts([&q, &keys, &latents], texts)?
            }
            Texts::Cut(texts) => {
                let seen = visible([&latents, &common], texts)?.into_iter().map(joined);
                over_visible(&self.options(), &q, &seen.collect::<Result<Vec<_>>>()?)?
            }
        };
        self.o_proj.forward(&self.up.values(&mixed)?.flatten_from(2)?)
    }

    fn parts(&self, x: &DTensor) -> Result<LatentParts> {
        let LatentWidths { rank, own, rotary, .. } = self.widths;
        let query = match &self.query_down {
            Some((down, norm)) => self.query_up.forward(&norm.forward(&down.forward(x)?)?)?,
            None => self.query_up.forward(x)?,
        };
        let query = query.split_units(2, own + rotary)?.transpose(1, 2)?;
        let both = self.down.forward(x)?;
        Ok(LatentParts {
            own: query.narrow(3, 0, own)?,
            turned: query.narrow(3, own, rotary)?,
            latents: self.norm.forward(&both.narrow(2, 0, rank)?)?,
            common: both.narrow(2, rank, rotary)?.unsqueeze(1)?,
        })
    }

    fn options(&self) -> Attention {
        Attention::default().scale(self.scale).causal(true)
    }
}

/// Latents and common parts of keys that a cache has apart, as keys with the latents as their values.
fn joined(seen: VisibleKv) -> Result<VisibleKv> {
    let latents = seen.keys.clone();
    Ok(VisibleKv { keys: DTensor::cat(&[seen.keys, seen.values], 3)?, values: latents, ..seen })
}
