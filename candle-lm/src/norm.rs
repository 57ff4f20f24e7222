//! Norms of hidden states, and of queries and keys.

use candle_core::{Device, Tensor};
use candle_shard::nn::{Init, MeshVarBuilder};
use candle_shard::{DTensor, Placements, Replicate, Result};

use crate::config::Config;
use crate::config::parts::NormKind;

/// A norm of rows.
#[derive(Debug)]
pub(crate) struct Norm {
    weight: DTensor,
    /// Of a norm that takes the mean away.
    bias: Option<DTensor>,
    adds_one: bool,
    eps: f64,
}

impl Norm {
    /// The norm at the builder's path for rows of `width`.
    pub(crate) fn new(width: usize, config: &Config, vb: &MeshVarBuilder) -> Result<Self> {
        let adds_one = config.parts.norms_add_one;
        let init = Init::Const(if adds_one { 0.0 } else { 1.0 });
        let weight = vb.get(width, "weight", init, Replicate, false)?;
        let bias = match config.parts.norm {
            NormKind::Rms => None,
            NormKind::Layer => Some(weight.zeros_like()?),
            NormKind::LayerWithBias => Some(vb.get(width, "bias", Init::Const(0.0), Replicate, false)?),
        };
        Ok(Self { weight, bias, adds_one, eps: config.rms_norm_eps })
    }

    /// A norm without weights, for rows of `width` of the layers that a builder makes.
    pub(crate) fn unweighted(width: usize, config: &Config, vb: &MeshVarBuilder) -> Result<Self> {
        let everywhere = Placements::from_elem(Replicate, vb.mesh().ndim());
        let ones = Tensor::ones(width, vb.dtype(), vb.device())?;
        let weight = DTensor::from_local(ones, vb.mesh(), &everywhere, width)?;
        Ok(Self { weight, bias: None, adds_one: false, eps: config.rms_norm_eps })
    }

    /// The same norm with another number that keeps it from dividing by zero.
    pub(crate) fn with_eps(self, eps: f64) -> Self {
        Self { eps, ..self }
    }

    /// The device of the weight.
    pub(crate) fn device(&self) -> &Device {
        self.weight.device()
    }

    /// The normalized rows.
    pub(crate) fn forward(&self, x: &DTensor) -> Result<DTensor> {
        let weight = if self.adds_one { &self.weight.affine(1.0, 1.0)? } else { &self.weight };
        match &self.bias {
            None => x.rms_norm(weight, self.eps),
            Some(bias) => x.layer_norm(weight, bias, self.eps),
        }
    }

    /// The sum of two tensors, and its normalized rows.
    pub(crate) fn forward_sum(&self, x: &DTensor, more: &DTensor) -> Result<[DTensor; 2]> {
        if self.bias.is_some() || self.adds_one {
            let sum = x.add(more)?;
            let normed = self.forward(&sum)?;
            return Ok([sum, normed]);
        }
        x.add_rms_norm(more, &self.weight, self.eps)
    }

    /// Heads `[batch, heads, tokens, dim]`, normalized by the mean over all of them. Each rank has some heads, and the
    /// ranks exchange one number a token. Heads that are there several times, one after the other, count so.
    pub(crate) fn over_heads(&self, x: &DTensor) -> Result<DTensor> {
        let &[_, heads, _, dim] = x.dims() else { return x.rms_norm(&self.weight, self.eps) };
        let stored = self.weight.dims()[0] / dim;
        let weight = self.weight.reshape((stored, 1, dim))?.broadcast_as((stored, heads / stored, dim))?;
        over_dims(x, &[1, 3], self.eps)?.mul(&weight.reshape((heads, 1, dim))?)
    }
}

/// What is divided by the root of the mean of its squares over some dims, of which each rank may have a part.
pub(crate) fn over_dims(x: &DTensor, dims: &[usize], eps: f64) -> Result<DTensor> {
    let count: usize = dims.iter().map(|&dim| x.dims()[dim]).product();
    let mean = x.sqr()?.sum_keepdim(dims)?.resolve_partial()?.affine(1.0 / count as f64, eps)?;
    x.div(&mean.sqrt()?)
}
