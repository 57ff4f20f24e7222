//! A layer of Mamba 2 in the place of attention.

use candle_core::DType;
use candle_shard::nn::{Init, MeshVarBuilder, Width};
use candle_shard::random::Distribution;
use candle_shard::{DTensor, Documents, Replicate, Result, Shard};

use crate::cache::LayerTokens;
use crate::config::Config;
use crate::config::mamba::{MambaHeads, StateNorm};
use crate::delta_net::softplus;
use crate::norm::over_dims;
use crate::projection::{Projection, granule, scaled};
use crate::short_conv::{CausalConv, StreamConvs};

/// Heads that are cut by their groups, or by themselves where there is one group.
#[derive(Debug)]
pub(crate) struct Mamba {
    heads: MambaHeads,
    /// Of states: gates of the output, inputs of heads, what writes and reads the states of groups, and steps.
    inputs: [Projection; 5],
    /// Of inputs, and of what writes and reads.
    convs: StreamConvs,
    /// The logarithms of how fast heads forget, or these rates, which are negative.
    a_log: DTensor,
    has_rates: bool,
    dt_bias: DTensor,
    /// The share of a head's inputs that passes by its state.
    skip: DTensor,
    /// Of what heads read, if it is normalized.
    norm: Option<DTensor>,
    eps: f64,
    out: Projection,
    /// Of the projections of states.
    factors: [f64; 5],
}

impl Mamba {
    /// The layer at the builder's path, whose heads are cut where the output projection can be.
    pub(crate) fn new(config: &Config, heads: MambaHeads, vb: &MeshVarBuilder) -> Result<Self> {
        let hidden = config.hidden_size;
        let together = heads.together(granule(&vb.pp("out_proj")));
        let [units, of_unit] = heads.units();
        let by_heads = |each: usize| Width::new(units / together, together * of_unit * each);
        // All ranks have those of one group.
        let (groups, cut) = match heads.has_one_group() {
            true => (heads.state.into(), Replicate),
            false => (Width::new(units / together, together * heads.state), Shard(0)),
        };
        let input = |name: &str, rows: Width| {
            Projection::new(hidden, rows, heads.proj_bias, &vb.pp(format!("in_proj_{name}")))
        };
        let conv = |name: &str, channels: Width, cut| {
            CausalConv::new(channels, heads.taps, cut, heads.conv_bias, &vb.pp(format!("conv1d_{name}")))
        };
        let vector = |vb: &MeshVarBuilder, name: &str, each: usize, init: Init| {
            vb.get_in_units(&[by_heads(each)], name, init, Shard(0), false)
        };
        let (width, inner) = (heads.width, by_heads(heads.width));
        let forgets = Init::Random(Distribution::Uniform { lo: 0.0, up: 16f64.ln() });
        Ok(Self {
            heads,
            inputs: [
                input("z", inner)?,
                input("x", inner)?,
                input("b", groups)?,
                input("c", groups)?,
                input("dt", by_heads(1))?,
            ],
            convs: StreamConvs([
                conv("x", inner, Shard(0))?,
                conv("b", groups, cut)?,
                conv("c", groups, cut)?,
            ]),
            a_log: vector(vb, "A_log", 1, forgets)?,
            has_rates: config.parts.has_rates,
            dt_bias: vector(vb, "dt_bias", 1, Init::Const(1.0))?,
            skip: vector(vb, "D", 1, Init::Const(1.0))?,
            norm: (heads.norm != StateNorm::None)
                .then(|| vector(&vb.pp("norm"), "weight", width, Init::Const(1.0)))
                .transpose()?,
            eps: config.rms_norm_eps,
            out: Projection::new(inner, hidden, heads.proj_bias, &vb.pp("out_proj"))?,
            factors: config.parts.factors.states,
        })
    }

    /// What the layer adds to states `[batch, tokens, hidden]`.
    pub(crate) fn forward(
        &self,
        x: &DTensor,
        documents: Option<&Documents>,
        turns: Option<Vec<LayerTokens<'_>>>,
    ) -> Result<DTensor> {
        let [of_z, of_x, of_b, of_c, of_dt] = &self.inputs;
        let [z, inputs] = of_z.forward_both(of_x, x)?;
        let [b, c] = of_b.forward_both(of_c, x)?;
        let dt = of_dt.forward(x)?;
        let made = |x: &DTensor, at: usize| scaled(x, self.factors[at]);
        let (z, inputs, dt) = (made(&z, 0)?, made(&inputs, 1)?, made(&dt, 4)?);
        let (b, c) = (made(&b, 2)?, made(&c, 3)?);
        let mixed = self.convs.forward(
            [&inputs, &b, &c, &dt],
            documents,
            turns,
            |made, rest, state, documents| self.mixed(made, rest[0], state, documents),
        )?;
        let z = self.by_heads(&z, 2)?.to_dtype(DType::F32)?;
        let read = match self.heads.norm {
            StateNorm::None => z.silu_gate(&mixed)?,
            StateNorm::BeforeGate => z.silu_gate(&self.normed(&mixed)?)?,
            StateNorm::BehindGate => self.normed(&z.silu_gate(&mixed)?)?,
        };
        let read = read.to_dtype(x.dtype())?;
        let heads = if self.heads.has_one_group() { read.squeeze(2)? } else { read.flatten_from(3)? };
        self.out.forward(&heads.flatten_from(2)?)
    }

    /// What the norm of groups makes of numbers `[batch, tokens, groups, heads, width]` in 32 bits, if there is one.
    fn normed(&self, x: &DTensor) -> Result<DTensor> {
        let Some(norm) = &self.norm else { return Ok(x.clone()) };
        over_dims(x, &[3, 4], self.eps)?.mul(&self.by_heads(norm, 0)?.to_dtype(DType::F32)?)
    }

    /// What tokens read `[batch, tokens, groups, heads, width]` in 32 bits, and the states behind the last one, of convolved channels and
    /// steps.
    fn mixed(
        &self,
        [x, b, c]: [DTensor; 3],
        dt: &DTensor,
        state: Option<&DTensor>,
        documents: Option<&Documents>,
    ) -> Result<(DTensor, DTensor)> {
        let of_group = |x: &DTensor| {
            let x = x.silu()?.to_dtype(DType::F32)?;
            if self.heads.has_one_group() { x.unsqueeze(2) } else { x.split_units(2, self.heads.state) }
        };
        let of_head = |x: &DTensor| self.in_groups(&x.to_dtype(DType::F32)?, 0, 1)?.squeeze(2);
        let x = self.by_heads(&x.silu()?.to_dtype(DType::F32)?, 2)?;
        // [batch, tokens, groups, heads]
        let dt = self.in_groups(&dt.to_dtype(DType::F32)?, 2, 1)?.squeeze(4)?;
        let step = softplus(&dt.add(&of_head(&self.dt_bias)?)?)?;
        let rates = of_head(&self.a_log)?;
        let rates = if self.has_rates { rates } else { rates.exp()?.neg()? };
        let g = step.mul(&rates)?;
        let written = x.mul(&step.unsqueeze(4)?)?;
        let (b, c) = (of_group(&b)?, of_group(&c)?);
        let [made, state] = c.state_space_scan([&b, &written], &g, state, documents)?;
        let passed = x.mul(&of_head(&self.skip)?.unsqueeze(2)?)?;
        Ok((made.add(&passed)?, state))
    }

    /// The inputs of heads along a dim, by groups, heads and their width.
    fn by_heads(&self, x: &DTensor, dim: usize) -> Result<DTensor> {
        self.in_groups(x, dim, self.heads.width)
    }

    /// What each head has `each` of along a dim, in three dims: groups, heads, and those of a head.
    fn in_groups(&self, x: &DTensor, dim: usize, each: usize) -> Result<DTensor> {
        let [_, heads] = self.heads.units();
        match self.heads.has_one_group() {
            true => x.split_units(dim, each)?.unsqueeze(dim),
            false => x.split_units(dim, heads * each)?.split_units(dim + 1, each),
        }
    }
}
