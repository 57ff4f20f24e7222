//! Attention of a decoder layer: projections, norms of heads, rotary positions, and the keys and values of a cache.

use candle_shard::nn::{Heads, Init, MeshVarBuilder, TextCache, TextTokens, Width};
use candle_shard::{Attention, DTensor, Error, Placements, Result, Shard};

use crate::TOKEN_AXIS;
use crate::cache::{self, CutTurn, LayerKeys, LayerTokens, SeenKeys, SharedKeys, Texts, VisibleKv};
use crate::config::Config;
use crate::config::parts::QkNorm;
use crate::norm::Norm;
use crate::projection::{Projection, Qkv};
use crate::rope::{Angles, TokenPositions};

/// The dim of heads in queries, keys and values `[batch, heads, tokens, dim]`.
const HEADS: usize = 1;

/// Attention with grouped heads.
#[derive(Debug)]
pub(crate) struct SelfAttention {
    /// The number of the layer.
    layer: usize,
    /// The layer whose keys and values it uses, if it makes none.
    key_source: Option<usize>,
    /// Whether other layers use its keys and values.
    is_key_source: bool,
    qkv: Qkv,
    query_norm: Option<Norm>,
    key_norm: Option<Norm>,
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
        let key_source = parts.key_source(layer);
        let names = parts.qk_norm.names();
        let head_norm = |which: usize| match parts.qk_norm.widths(heads) {
            Some(widths) => Ok(Some(Norm::new(widths[which], config, &vb.pp(names[which]))?)),
            None if parts.qk_norm == QkNorm::UnweightedBehindRotary && is_rotary => {
                Ok(Some(Norm::unweighted(heads.dim, config, vb)?))
            }
            None => Ok::<_, Error>(None),
        };
        let qkv = match key_source {
            Some(_) => Qkv::of_queries(hidden, heads, parts.qkv_bias, vb)?,
            None => {
                let has = [parts.gated_attention, parts.has_values(layer)];
                Qkv::new(hidden, heads, has, parts.qkv_bias, vb)?
            }
        };
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
            layer,
            key_source,
            is_key_source: parts.is_key_source(layer),
            sinks: parts.sinks.then(sinks).transpose()?,
            o_proj: Projection::new(qkv.width(), hidden, parts.output_bias, &vb.pp("o_proj"))?,
            qkv,
            query_norm: head_norm(0)?,
            key_norm: if key_source.is_none() { head_norm(1)? } else { None },
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

    /// How many numbers of its matrices each rank has, if some have more than others: heads are whole. Keys that ranks have in common
    /// count on none.
    pub(crate) fn unlike_loads(&self, config: &Config, vb: &MeshVarBuilder) -> Result<Vec<usize>> {
        let (sizes, parts) = (vb.shard_sizes(self.qkv.width())?, &config.parts);
        if sizes.windows(2).all(|pair| pair[0] == pair[1]) {
            return Ok(Vec::new());
        }
        let Heads { query, key_value, dim } = config.heads_of(self.layer);
        let group = query / key_value.max(1);
        let are_apart = sizes.iter().all(|size| size.is_multiple_of(group * dim));
        let pairs = match self.key_source {
            None if are_apart => 1 + usize::from(parts.has_values(self.layer)),
            _ => 0,
        };
        // Queries, perhaps with gates, and the output.
        let of_queries = 2 + usize::from(self.is_gated);
        let of_rank = |size: &usize| config.hidden_size * (size * of_queries + size / group * pairs);
        Ok(sizes.iter().map(of_rank).collect())
    }

    /// What attention adds to states `[batch, tokens, hidden]`. `shared` has the keys and values of layers before that others use too, and
    /// gets those of this one.
    pub(crate) fn forward(
        &self,
        x: &DTensor,
        angles: &Angles,
        turns: Option<Vec<LayerTokens<'_>>>,
        shared: &mut SharedKeys,
    ) -> Result<DTensor> {
        let at = turns.as_ref().map_or_else(|| angles.rows_of(x.dims()[1]), |turns| places(turns));
        let (mut q, own) = self.qkv.forward(x)?;
        let mut gate = None;
        let keys = match own {
            Some([mut k, mut v]) => {
                if let Some(norm) = &self.value_norm {
                    v = norm.forward(&v)?;
                }
                if self.is_gated {
                    gate = Some(ungated([&mut q, &mut k, &mut v])?.transpose(1, 2)?.sigmoid()?);
                }
                let [turned, k] = self.placed_both([q, k], angles, &at)?;
                q = turned;
                LayerKeys { new: [k, v], seen: SeenKeys::Untold }
            }
            None => {
                q = self.queries_placed(q, angles, &at)?;
                let LayerKeys { new: [k, v], seen } = self.keys_of_another(shared)?;
                let new = [k.redistribute_with(&q, HEADS)?, v.redistribute_with(&q, HEADS)?];
                LayerKeys { new, seen: seen.clone() }
            }
        };
        let (mixed, seen) = self.mixed(&q, &keys, angles, turns)?;
        if self.is_key_source {
            shared.insert(self.layer, LayerKeys { seen, ..keys });
        }
        let mixed = self.beside_sinks(mixed, x)?;
        let mixed = gate.map_or(Ok(mixed.clone()), |gate| mixed.mul(&gate))?;
        self.o_proj.forward(&mixed.flatten_from(2)?)
    }

    /// Attention `[batch, tokens, heads, dim]` of queries over keys, and what the tokens of texts have seen.
    fn mixed(
        &self,
        q: &DTensor,
        LayerKeys { new: [k, v], seen }: &LayerKeys,
        angles: &Angles,
        turns: Option<Vec<LayerTokens<'_>>>,
    ) -> Result<(DTensor, SeenKeys)> {
        let (options, inputs) = (self.options(), [q, k, v]);
        let Some(turns) = turns else { return Ok((over_rows(options, angles, inputs)?, SeenKeys::Untold)) };
        if let Some(tokens) = cache::shared(&turns) {
            let mixed = match seen {
                SeenKeys::Whole(seen) => {
                    let texts = tokens.into_iter().zip(seen);
                    let texts =
                        texts.map(|(tokens, seen)| TextTokens { tokens, cache: TextCache::Seen(seen) });
                    options.of_texts(inputs, texts.collect())?
                }
                SeenKeys::Cut(seen) => over_visible(&options, q, seen)?,
                SeenKeys::Untold => {
                    return Err(Error::Layout(format!(
                        "layer {} uses keys of another that has not told what its tokens see",
                        self.layer
                    )));
                }
            };
            return Ok((mixed, SeenKeys::Untold));
        }
        Ok(match cache::texts(turns)? {
            Texts::Whole(texts) if self.is_key_source => {
                let (mixed, seen) = options.of_texts_seen(inputs, texts)?;
                (mixed, SeenKeys::Whole(seen))
            }
            Texts::Whole(texts) => (options.of_texts(inputs, texts)?, SeenKeys::Untold),
            Texts::Cut(texts) => {
                let seen = visible([k, v], texts)?;
                (over_visible(&options, q, &seen)?, SeenKeys::Cut(seen))
            }
        })
    }

    /// The keys and values of the layer that this one uses.
    fn keys_of_another<'a>(&self, shared: &'a SharedKeys) -> Result<&'a LayerKeys> {
        let keys = self.key_source.and_then(|source| shared.get(&source));
        keys.ok_or_else(|| {
            Error::Layout(format!("layer {} has no keys of layer {:?}", self.layer, self.key_source))
        })
    }

    /// Queries and keys behind their norms and rotary positions; the tokens are those of texts, one behind another.
    fn placed_both(
        &self,
        [q, k]: [DTensor; 2],
        angles: &Angles,
        at: &[TokenPositions],
    ) -> Result<[DTensor; 2]> {
        let normed = |[q, k]: [DTensor; 2]| {
            Ok::<_, Error>([self.normed(q, &self.query_norm)?, self.normed(k, &self.key_norm)?])
        };
        let turned = |[q, k]: [DTensor; 2]| {
            let [q, k] = match self.is_rotary {
                true => angles.turn_both([&q, &k], at, self.window.is_some())?,
                false => [q, k],
            };
            Ok::<_, Error>([self.tempered(q, angles, at)?, k])
        };
        if self.is_normed_behind_rotary() { normed(turned([q, k])?) } else { turned(normed([q, k])?) }
    }

    /// Queries behind their norm and rotary positions.
    fn queries_placed(&self, q: DTensor, angles: &Angles, at: &[TokenPositions]) -> Result<DTensor> {
        let turned = |q: DTensor| {
            let q = if self.is_rotary { angles.turn(&q, at, self.window.is_some())? } else { q };
            self.tempered(q, angles, at)
        };
        match self.is_normed_behind_rotary() {
            true => self.normed(turned(q)?, &self.query_norm),
            false => turned(self.normed(q, &self.query_norm)?),
        }
    }

    fn is_normed_behind_rotary(&self) -> bool {
        matches!(self.qk_norm, QkNorm::HeadBehindRotary | QkNorm::UnweightedBehindRotary)
    }

    fn tempered(&self, q: DTensor, angles: &Angles, at: &[TokenPositions]) -> Result<DTensor> {
        if self.is_tempered { angles.scale_queries(q, at) } else { Ok(q) }
    }

    fn normed(&self, x: DTensor, norm: &Option<Norm>) -> Result<DTensor> {
        match (norm, self.qk_norm) {
            (None, _) => Ok(x),
            (Some(norm), QkNorm::All) => norm.over_heads(&x),
            (Some(norm), _) => norm.forward(&x),
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

/// What the new tokens of each text see in caches of which each rank has some tokens, when keys and values `[batch, heads, tokens, dim]` are
/// appended to them, text by text.
pub(crate) fn visible(new: [&DTensor; 2], texts: Vec<CutTurn<'_>>) -> Result<Vec<VisibleKv>> {
    let mut start = 0;
    let of_text = |CutTurn { tokens, past }: CutTurn<'_>| {
        let [k, v] = new.map(|x| x.narrow(2, start, tokens)?.transpose(1, 2));
        start += tokens;
        past.extend([&k?, &v?])
    };
    texts.into_iter().map(of_text).collect()
}

/// Attention `[batch, tokens, heads, dim]` of queries `[batch, heads, tokens, dim]` over what the tokens of each text see.
pub(crate) fn over_visible(options: &Attention, q: &DTensor, texts: &[VisibleKv]) -> Result<DTensor> {
    let mut start = 0;
    let of_text = |VisibleKv { tokens, keys, values, order }: &VisibleKv| {
        let q = q.narrow(2, start, *tokens)?.transpose(1, 2)?;
        start += tokens;
        // Each rank computes some of several queries; one query meets the keys of each rank where they are.
        let whole: Placements = q.placements().into();
        let mut parts = whole.clone();
        if q.dims()[1] > 1 {
            parts[q.mesh().axis_index(TOKEN_AXIS)?] = Shard(1);
        }
        let options = options.clone().key_order(order.clone());
        options.of(&q.redistribute(&parts)?, keys, values)?.redistribute(&whole)
    };
    match &texts.iter().map(of_text).collect::<Result<Vec<_>>>()?[..] {
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
