//! Attention of a decoder layer: projections, norms of heads, rotary positions, and the keys and values of a cache.

use candle_shard::nn::{Init, MeshVarBuilder, Width};
use candle_shard::{Attention, DTensor, Placements, Result, Shard};

use crate::TOKEN_AXIS;
use crate::cache::{self, CutTurn, LayerTokens, Texts, VisibleKv};
use crate::config::Config;
use crate::config::parts::QkNorm;
use crate::norm::Norm;
use crate::projection::{Projection, Qkv};
use crate::rope::{Angles, TokenPositions};

/// Attention with grouped heads.
#[derive(Debug)]
pub(crate) struct SelfAttention {
    qkv: Qkv,
    /// Of queries and keys.
    head_norms: Option<[Norm; 2]>,
    value_norm: Option<Norm>,
    o_proj: Projection,
    qk_norm: QkNorm,
    scale: f64,
    scores_cap: Option<f64>,
    /// A logit for each query head.
    sinks: Option<DTensor>,
    window: Option<usize>,
    /// Whether the window is a chunk.
    is_chunked: bool,
    is_rotary: bool,
    /// Whether queries grow with their positions.
    is_tempered: bool,
    /// Whether each query head is followed by its gate of the output.
    is_gated: bool,
}

impl SelfAttention {
    /// That of the layer of this number at the builder's path.
    pub(crate) fn new(config: &Config, layer: usize, vb: &MeshVarBuilder) -> Result<Self> {
        let (hidden, heads, parts) = (config.hidden_size, config.heads_of(layer), &config.parts);
        let is_rotary = parts.is_rotary(layer);
        let head_norms = match parts.qk_norm.widths(heads) {
            Some(widths) => {
                let [query, key] = parts.qk_norm.names();
                let norm = |name: &str, width| Norm::new(width, config, &vb.pp(name));
                Some([norm(query, widths[0])?, norm(key, widths[1])?])
            }
            None if parts.qk_norm == QkNorm::UnweightedBehindRotary && is_rotary => {
                let norm = || Norm::unweighted(heads.dim, config, vb);
                Some([norm()?, norm()?])
            }
            None => None,
        };
        let qkv =
            Qkv::new(hidden, heads, [parts.gated_attention, parts.has_values(layer)], parts.qkv_bias, vb)?;
        let Width { units, unit } = qkv.width();
        let sinks = || {
            vb.get_in_units(
                &[Width::new(units, unit / heads.dim)],
                "sinks",
                Init::Const(0.0),
                Shard(0),
                false,
            )
        };
        Ok(Self {
            sinks: parts.sinks.then(sinks).transpose()?,
            o_proj: Projection::new(qkv.width(), hidden, parts.output_bias, &vb.pp("o_proj"))?,
            qkv,
            head_norms,
            value_norm: parts.value_norm.then(|| Norm::unweighted(heads.dim, config, vb)).transpose()?,
            qk_norm: parts.qk_norm,
            scale: parts.scores_scale.unwrap_or(1.0 / (heads.dim as f64).sqrt()),
            scores_cap: parts.scores_cap,
            window: parts.window(layer),
            is_chunked: parts.chunked,
            is_rotary,
            is_tempered: parts.temperature.is_some_and(|tempered| tempered.is_of_rotary == is_rotary),
            is_gated: parts.gated_attention,
        })
    }

    /// What attention adds to states `[batch, tokens, hidden]`.
    pub(crate) fn forward(
        &self,
        x: &DTensor,
        angles: &Angles,
        turns: Option<Vec<LayerTokens<'_>>>,
    ) -> Result<DTensor> {
        let [mut q, mut k, mut v] = self.qkv.forward(x)?;
        if let Some(norm) = &self.value_norm {
            v = norm.forward(&v)?;
        }
        let gate = match self.is_gated {
            true => Some(ungated([&mut q, &mut k, &mut v])?.transpose(1, 2)?.sigmoid()?),
            false => None,
        };
        let gated = |mixed: DTensor| gate.as_ref().map_or(Ok(mixed.clone()), |gate| mixed.mul(gate));
        let Some(turns) = turns else {
            let [q, k] = self.placed([q, k], angles, &angles.rows_of(x.dims()[1]))?;
            let mixed = self.beside_sinks(over_rows(self.options(), angles, [&q, &k, &v])?, x)?;
            return self.o_proj.forward(&gated(mixed)?.flatten_from(2)?);
        };
        let places = places(&turns);
        let [q, k] = self.placed([q, k], angles, &places)?;
        let mixed = match cache::texts(turns)? {
            Texts::Whole(texts) => self.options().of_texts([&q, &k, &v], texts)?,
            Texts::Cut(texts) => over_parts(&self.options(), [&q, &k, &v], texts, Ok)?,
        };
        let mixed = self.beside_sinks(mixed, x)?;
        self.o_proj.forward(&gated(mixed)?.flatten_from(2)?)
    }

    /// Queries and keys behind their norms and rotary positions; the tokens are those of texts, one behind another.
    fn placed(&self, both: [DTensor; 2], angles: &Angles, texts: &[TokenPositions]) -> Result<[DTensor; 2]> {
        let is_local = self.window.is_some();
        let turned = |[mut q, mut k]: [DTensor; 2]| {
            if self.is_rotary {
                [q, k] = [angles.turn(&q, texts, is_local)?, angles.turn(&k, texts, is_local)?];
            }
            if self.is_tempered {
                q = angles.scale_queries(q, texts)?;
            }
            Ok([q, k])
        };
        let Some([of_queries, of_keys]) = &self.head_norms else { return turned(both) };
        let normed = |[q, k]: [DTensor; 2]| match self.qk_norm {
            QkNorm::All => Ok([of_queries.over_heads(&q)?, of_keys.over_heads(&k)?]),
            _ => Ok::<_, candle_shard::Error>([of_queries.forward(&q)?, of_keys.forward(&k)?]),
        };
        match self.qk_norm {
            QkNorm::HeadBehindRotary | QkNorm::UnweightedBehindRotary => normed(turned(both)?),
            _ => turned(normed(both)?),
        }
    }

    fn options(&self) -> Attention {
        let options = Attention::default().scale(self.scale).cap(self.scores_cap).causal(true);
        let options = match self.is_chunked {
            true => options.chunk(self.window),
            false => options.window(self.window),
        };
        options.log_sums(self.sinks.is_some())
    }

    /// What attention gives beside the sinks, if there are some, in the dtype of the states.
    fn beside_sinks(&self, mixed: DTensor, x: &DTensor) -> Result<DTensor> {
        match &self.sinks {
            Some(sinks) => mixed.with_sinks(sinks, x.dtype()),
            None => Ok(mixed),
        }
    }
}

/// Where the new tokens of each text are.
pub(crate) fn places(turns: &[LayerTokens<'_>]) -> Vec<TokenPositions> {
    turns.iter().map(|turn| [turn.past.len(), turn.tokens]).collect()
}

/// Attention `[batch, tokens, heads, dim]` of queries, keys and values `[batch, heads, tokens, dim]` of whole rows.
pub(crate) fn over_rows(options: Attention, angles: &Angles, [q, k, v]: [&DTensor; 3]) -> Result<DTensor> {
    let [q, k, v] = [q.transpose(1, 2)?, k.transpose(1, 2)?, v.transpose(1, 2)?];
    let options = options.order(angles.order().cloned()).documents(angles.documents().cloned());
    options.of(&q, &k, &v)
}

/// Attention `[batch, tokens, heads, dim]` of queries, keys and values `[batch, heads, tokens, dim]` over caches of which each rank
/// has some tokens, text by text. `read` says what queries meet, of what is kept.
pub(crate) fn over_parts(
    options: &Attention,
    [q, k, v]: [&DTensor; 3],
    texts: Vec<CutTurn<'_>>,
    read: fn(VisibleKv) -> Result<VisibleKv>,
) -> Result<DTensor> {
    let mut start = 0;
    let of_text = |CutTurn { tokens, past }: CutTurn<'_>| {
        let part = |x: &DTensor| x.narrow(2, start, tokens)?.transpose(1, 2);
        let [q, k, v] = [part(q)?, part(k)?, part(v)?];
        start += tokens;
        let VisibleKv { keys, values, order } = read(past.extend([&k, &v])?)?;
        // Each rank computes some of several queries; one query meets the keys of each rank where they are.
        let whole: Placements = q.placements().into();
        let mut parts = whole.clone();
        if q.dims()[1] > 1 {
            parts[q.mesh().axis_index(TOKEN_AXIS)?] = Shard(1);
        }
        let options = options.clone().key_order(order);
        options.of(&q.redistribute(&parts)?, &keys, &values)?.redistribute(&whole)
    };
    match &texts.into_iter().map(of_text).collect::<Result<Vec<_>>>()?[..] {
        [one] => Ok(one.clone()),
        parts => DTensor::cat(parts, 1),
    }
}

/// Takes the gates `[batch, heads, tokens, dim]` from among the queries, each of which has one behind it. Keys and values that have a copy
/// for each keep one for each query.
fn ungated([q, k, v]: [&mut DTensor; 3]) -> Result<DTensor> {
    let every_other = |x: &DTensor, first: usize| x.split_units(1, 2)?.narrow(2, first, 1)?.squeeze(2);
    if k.dims()[1] == q.dims()[1] {
        (*k, *v) = (every_other(k, 0)?, every_other(v, 0)?);
    }
    let gate = every_other(q, 1)?;
    *q = every_other(q, 0)?;
    Ok(gate)
}
