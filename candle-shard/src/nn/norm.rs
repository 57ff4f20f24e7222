//! Normalisation layers whose gradients reach everything below them.
use crate::nn::{Init, ShardedVarBuilder};
use crate::parallel::{LayerKind, ModuleStyle};
use crate::{DTensor, Result};

/// Layer norm over the last dim (Ba et al. 2016), with `weight` one and `bias` zero where fresh.
#[derive(Debug, Clone)]
pub struct LayerNorm {
    weight: DTensor,
    bias: DTensor,
    eps: f64,
    style: ModuleStyle,
}

impl LayerNorm {
    /// A layer at the builder's path for rows of `width`.
    pub fn new(width: usize, eps: f64, vb: &ShardedVarBuilder) -> Result<Self> {
        let style = vb.style();
        let layout = style.layout(LayerKind::Norm)?;
        let weight = vb.get(width, "weight", Init::Const(1.0), layout.weight, layout.varying)?;
        let bias = vb.get(width, "bias", Init::Const(0.0), layout.bias, layout.varying_bias)?;
        Ok(Self { weight, bias, eps, style })
    }

    /// The normalised rows, in the shape of `x`.
    pub fn forward(&self, x: &DTensor) -> Result<DTensor> {
        let [x] = self.style.inputs([x])?;
        let [y] = self.style.outputs([&x.layer_norm(&self.weight, &self.bias, self.eps)?])?;
        Ok(y)
    }
}

/// RMS norm over the last dim (Zhang & Sennrich 2019), with `weight` one where fresh.
#[derive(Debug, Clone)]
pub struct RmsNorm {
    weight: DTensor,
    eps: f64,
    style: ModuleStyle,
}

impl RmsNorm {
    /// A layer at the builder's path for rows of `width`.
    pub fn new(width: usize, eps: f64, vb: &ShardedVarBuilder) -> Result<Self> {
        let style = vb.style();
        let layout = style.layout(LayerKind::Norm)?;
        let weight = vb.get(width, "weight", Init::Const(1.0), layout.weight, layout.varying)?;
        Ok(Self { weight, eps, style })
    }

    /// The normalised rows, in the shape of `x`.
    pub fn forward(&self, x: &DTensor) -> Result<DTensor> {
        let [x] = self.style.inputs([x])?;
        let [y] = self.style.outputs([&x.rms_norm(&self.weight, self.eps)?])?;
        Ok(y)
    }
}
