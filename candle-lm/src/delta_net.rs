//! A layer with the gated delta rule in the place of attention.

use candle_core::{DType, Tensor};
use candle_shard::nn::{Init, MeshVarBuilder, Width};
use candle_shard::random::Distribution;
use candle_shard::{DTensor, Documents, Placements, Replicate, Result, Shard};

use crate::cache::LayerTokens;
use crate::config::Config;
use crate::config::mixers::DeltaHeads;
use crate::projection::{Projection, granule};
use crate::short_conv::{CausalConv, StreamConvs};

/// What keeps norms of queries and keys from dividing by zero, as a sum over a head.
const EPS: f64 = 1e-6;

/// Key heads with the value heads of each, which are cut together.
#[derive(Debug)]
pub(crate) struct DeltaNet {
    heads: DeltaHeads,
    inputs: DeltaInputs,
    /// Of queries, keys and values.
    convs: StreamConvs,
    /// The logarithms of how fast value heads forget, or these rates, which are negative.
    a_log: DTensor,
    has_rates: bool,
    dt_bias: DTensor,
    norm: DTensor,
    eps: f64,
    /// What normalized queries and keys are multiplied by.
    scales: [DTensor; 2],
    out: Projection,
}

/// The projections of states, as files have them.
#[derive(Debug)]
enum DeltaInputs {
    /// Each by itself: queries, keys, values and gates of the output, then shares and decays of value heads.
    Apart(Box<[Projection; 6]>),
    /// Two, whose rows are those of one key head after the other.
    ByKeyHead(Box<[Projection; 2]>),
}

/// What the projections make of states `[batch, tokens, hidden]`.
struct DeltaStreams {
    /// Queries, keys and values `[batch, tokens, channels]`.
    channels: [DTensor; 3],
    /// Gates of the output `[batch, tokens, heads, values · width]`.
    z: DTensor,
    /// Shares and decays `[batch, tokens, heads, values]`.
    gates: [DTensor; 2],
}

impl DeltaNet {
    /// The layer at the builder's path, whose key heads are cut where the output projection can be.
    pub(crate) fn new(config: &Config, heads: DeltaHeads, vb: &MeshVarBuilder) -> Result<Self> {
        let hidden = config.hidden_size;
        let granule = granule(&vb.pp("out_proj"));
        let together = heads.together(granule);
        let width = |per_head: usize| Width::new(heads.key / together, together * per_head);
        let (values, all) = (heads.values(), heads.values() * heads.value_dim);
        let input = |name: &str, per_head: usize| {
            Projection::new(hidden, width(per_head), false, &vb.pp(format!("in_proj_{name}")))
        };
        let inputs = match heads.by_key_head {
            true => DeltaInputs::ByKeyHead(Box::new([
                input("qkvz", 2 * heads.key_dim + 2 * all)?,
                input("ba", 2 * values)?,
            ])),
            false => DeltaInputs::Apart(Box::new([
                input("q", heads.key_dim)?,
                input("k", heads.key_dim)?,
                input("v", all)?,
                input("z", all)?,
                input("b", values)?,
                input("a", values)?,
            ])),
        };
        let conv = |part: &str, per_head: usize| {
            CausalConv::new(width(per_head), heads.taps, Shard(0), false, &vb.pp(format!("conv1d_{part}")))
        };
        let of_value_heads =
            |name: &str, init: Init| vb.get_in_units(&[width(values)], name, init, Shard(0), false);
        let forgets = Init::Random(Distribution::Uniform { lo: 0.0, up: 16f64.ln() });
        let scale = |factor: f64| {
            let values = Tensor::full(factor as f32, heads.key_dim, vb.device())?;
            let everywhere = Placements::from_elem(Replicate, vb.mesh().ndim());
            DTensor::from_local(values, vb.mesh(), &everywhere, heads.key_dim)
        };
        let root = (heads.key_dim as f64).sqrt();
        Ok(Self {
            heads,
            inputs,
            convs: StreamConvs([conv("q", heads.key_dim)?, conv("k", heads.key_dim)?, conv("v", all)?]),
            a_log: of_value_heads("A_log", forgets)?,
            has_rates: config.parts.has_rates,
            dt_bias: of_value_heads("dt_bias", Init::Const(1.0))?,
            norm: vb.pp("norm").get(heads.value_dim, "weight", Init::Const(1.0), Replicate, false)?,
            eps: config.rms_norm_eps,
            // Of the root of a mean to that of a sum; scores are divided by the root of a key's width too.
            scales: [scale(1.0 / (root * root))?, scale(1.0 / root)?],
            out: Projection::new(width(all), hidden, false, &vb.pp("out_proj"))?,
        })
    }

    /// What the layer adds to states `[batch, tokens, hidden]`.
    pub(crate) fn forward(
        &self,
        x: &DTensor,
        documents: Option<&Documents>,
        turns: Option<Vec<LayerTokens<'_>>>,
    ) -> Result<DTensor> {
        let DeltaStreams { channels: [q, k, v], z, gates: [b, a] } = self.inputs.forward(x, self.heads)?;
        let (beta, g) = (b.sigmoid()?.to_dtype(DType::F32)?, self.log_decay(&a)?);
        let mixed = self.convs.forward(
            [&q, &k, &v, &beta, &g],
            documents,
            turns,
            |made, rest, state, documents| self.mixed(made, [rest[0], rest[1]], state, documents),
        )?;
        // [batch, tokens, heads, values, width]
        let width = self.heads.value_dim;
        let normed = mixed.to_dtype(x.dtype())?.split_units(3, width)?.rms_norm(&self.norm, self.eps)?;
        let gated = z.split_units(3, width)?.silu_gate(&normed)?;
        self.out.forward(&gated.flatten_from(3)?.flatten_from(2)?)
    }

    /// What tokens read `[batch, tokens, heads, values · width]` in 32 bits, and the states behind the last one, of convolved channels.
    fn mixed(
        &self,
        [q, k, v]: [DTensor; 3],
        gates: [&DTensor; 2],
        state: Option<&DTensor>,
        documents: Option<&Documents>,
    ) -> Result<(DTensor, DTensor)> {
        let (key, value) = (self.heads.key_dim, self.heads.values() * self.heads.value_dim);
        let heads = |x: &DTensor, unit: usize| x.silu()?.split_units(2, unit)?.to_dtype(DType::F32);
        let unit = |x: &DTensor, scale: &DTensor| heads(x, key)?.rms_norm(scale, EPS / key as f64);
        let (q, k) = (unit(&q, &self.scales[0])?, unit(&k, &self.scales[1])?);
        let [made, state] = q.gated_delta_rule([&k, &heads(&v, value)?], gates, state, documents)?;
        Ok((made, state))
    }

    /// The logarithm of how much of the state each token keeps: `-exp(A_log) · softplus(a + dt_bias)`, in 32 bits.
    fn log_decay(&self, a: &DTensor) -> Result<DTensor> {
        let of_heads = |x: &DTensor| x.to_dtype(DType::F32)?.split_units(0, self.heads.values());
        let time = a.to_dtype(DType::F32)?.add(&of_heads(&self.dt_bias)?)?;
        let rates = of_heads(&self.a_log)?;
        softplus(&time)?.mul(&if self.has_rates { rates } else { rates.exp()?.neg()? })
    }
}

impl DeltaInputs {
    fn forward(&self, x: &DTensor, heads: DeltaHeads) -> Result<DeltaStreams> {
        let (key, values, all) = (heads.key_dim, heads.values(), heads.values() * heads.value_dim);
        match self {
            Self::Apart(inputs) => {
                let [q, k, v, z, b, a] = &**inputs;
                let [q, k] = q.forward_both(k, x)?;
                let [v, z] = v.forward_both(z, x)?;
                let [b, a] = b.forward_both(a, x)?;
                Ok(DeltaStreams {
                    channels: [q, k, v],
                    z: z.split_units(2, all)?,
                    gates: [b.split_units(2, values)?, a.split_units(2, values)?],
                })
            }
            Self::ByKeyHead(inputs) => {
                let [qkvz, ba] = &**inputs;
                let qkvz = qkvz.forward(x)?.split_units(2, 2 * key + 2 * all)?;
                let ba = ba.forward(x)?.split_units(2, 2 * values)?;
                let channels = |start: usize, len: usize| qkvz.narrow(3, start, len)?.flatten_from(2);
                Ok(DeltaStreams {
                    channels: [channels(0, key)?, channels(key, key)?, channels(2 * key, all)?],
                    z: qkvz.narrow(3, 2 * key + all, all)?,
                    gates: [ba.narrow(3, 0, values)?, ba.narrow(3, values, values)?],
                })
            }
        }
    }
}

/// `ln(1 + e^x)` without overflow: `max(x, 0) + ln(1 + e^-|x|)`.
pub(crate) fn softplus(x: &DTensor) -> Result<DTensor> {
    x.relu()?.add(&x.abs()?.neg()?.exp()?.affine(1.0, 1.0)?.log()?)
}
