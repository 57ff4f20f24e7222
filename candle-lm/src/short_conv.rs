//! A gated short convolution in the place of attention.

use candle_shard::nn::{Init, MeshVarBuilder, Width};
use candle_shard::random::Distribution;
use candle_shard::{DTensor, Documents, Placement, Result, Shard};

use crate::cache::{self, LayerTokens, TextState};
use crate::config::Config;
use crate::projection::{Projection, granule, in_blocks};

/// What a token adds is `out(c ⊙ conv(b ⊙ x))`, of three projections of its states.
#[derive(Debug)]
pub(crate) struct ShortConv {
    b: Projection,
    c: Projection,
    x: Projection,
    conv: CausalConv,
    out: Projection,
}

impl ShortConv {
    /// The layer at the builder's path, whose channels are cut where the output projection can be.
    pub(crate) fn new(config: &Config, taps: usize, vb: &MeshVarBuilder) -> Result<Self> {
        let hidden = config.hidden_size;
        let channels = in_blocks(hidden, granule(&vb.pp("out_proj")));
        let input = |name: &str| Projection::new(hidden, channels, false, &vb.pp(name));
        Ok(Self {
            b: input("b_proj")?,
            c: input("c_proj")?,
            x: input("x_proj")?,
            conv: CausalConv::new(channels, taps, Shard(0), false, &vb.pp("conv"))?,
            out: Projection::new(channels, hidden, false, &vb.pp("out_proj"))?,
        })
    }

    /// What the layer adds to states `[batch, tokens, hidden]`.
    pub(crate) fn forward(
        &self,
        x: &DTensor,
        documents: Option<&Documents>,
        turns: Option<Vec<LayerTokens<'_>>>,
    ) -> Result<DTensor> {
        let [b, c] = self.b.forward_both(&self.c, x)?;
        let gated = b.mul(&self.x.forward(x)?)?;
        let mixed = match turns {
            None => self.conv.forward(&gated, documents)?,
            Some(turns) => cache::of_each_text([&gated], cache::states(turns)?, |[gated], state| {
                self.conv.next(gated, &mut state.slots[0])
            })?,
        };
        self.out.forward(&c.mul(&mixed)?)
    }
}

/// The convolutions of three streams, before a scan that keeps a matrix.
#[derive(Debug)]
pub(crate) struct StreamConvs(pub(crate) [CausalConv; 3]);

impl StreamConvs {
    /// What `scan` makes of the first three inputs, convolved, and of the others: of whole sequences `[batch, tokens, ..]`, or of each
    /// text with its state. It returns the state behind the last token too.
    pub(crate) fn forward<const N: usize>(
        &self,
        inputs: [&DTensor; N],
        documents: Option<&Documents>,
        turns: Option<Vec<LayerTokens<'_>>>,
        scan: impl Fn(
            [DTensor; 3],
            &[&DTensor],
            Option<&DTensor>,
            Option<&Documents>,
        ) -> Result<(DTensor, DTensor)>,
    ) -> Result<DTensor> {
        let Some(turns) = turns else {
            let conv = |at: usize| self.0[at].forward(inputs[at], documents);
            return Ok(scan([conv(0)?, conv(1)?, conv(2)?], &inputs[3..], None, documents)?.0);
        };
        cache::of_each_text(inputs, cache::states(turns)?, |inputs, text| {
            let TextState { slots: [first, second, third, matrix], .. } = text;
            let conv = |at: usize, state: &mut Option<DTensor>| self.0[at].next(inputs[at], state);
            let made = [conv(0, first)?, conv(1, second)?, conv(2, third)?];
            let (mixed, last) = scan(made, &inputs[3..], matrix.as_ref(), None)?;
            *matrix = Some(last);
            Ok(mixed)
        })
    }
}

/// A causal convolution of each channel with a few taps of its own.
#[derive(Debug)]
pub(crate) struct CausalConv {
    /// `[channels, 1, taps]`, as files have it.
    weight: DTensor,
    bias: Option<DTensor>,
    taps: usize,
}

impl CausalConv {
    /// The convolution at the builder's path; where its channels are `cut`, it is as they are.
    pub(crate) fn new(
        channels: Width,
        taps: usize,
        cut: Placement,
        has_bias: bool,
        vb: &MeshVarBuilder,
    ) -> Result<Self> {
        let bound = 1.0 / (taps.max(1) as f64).sqrt();
        let init = Init::Random(Distribution::Uniform { lo: -bound, up: bound });
        let dims = [channels, 1.into(), taps.into()];
        let bias = has_bias.then(|| vb.get_in_units(&[channels], "bias", Init::Const(0.0), cut, false));
        Ok(Self {
            weight: vb.get_in_units(&dims, "weight", init, cut, false)?,
            bias: bias.transpose()?,
            taps,
        })
    }

    /// Whole sequences `[batch, tokens, channels]`, which begin with nothing before them.
    pub(crate) fn forward(&self, x: &DTensor, documents: Option<&Documents>) -> Result<DTensor> {
        self.of(&x.pad_with_zeros(1, self.taps - 1, 0)?, documents)
    }

    /// The tokens `[1, tokens, channels]` of a text behind those whose last inputs are the state, which becomes that of these.
    pub(crate) fn next(&self, x: &DTensor, state: &mut Option<DTensor>) -> Result<DTensor> {
        let x = match state {
            None => x.pad_with_zeros(1, self.taps - 1, 0)?,
            Some(state) => DTensor::cat(&[state.clone(), x.clone()], 1)?,
        };
        let inputs = x.dims()[1];
        // Of its own memory: that of a long prompt is free again.
        *state = Some(x.narrow(1, inputs + 1 - self.taps, self.taps - 1)?.force_contiguous()?);
        self.of(&x, None)
    }

    fn of(&self, x: &DTensor, documents: Option<&Documents>) -> Result<DTensor> {
        let made = x.short_conv(&self.weight.squeeze(1)?, documents)?;
        self.bias.as_ref().map_or(Ok(made.clone()), |bias| made.add(bias))
    }
}
