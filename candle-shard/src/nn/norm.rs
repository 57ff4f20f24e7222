//! Normalization layers whose gradients reach all layers below.
use crate::nn::{Init, MeshVarBuilder};
use crate::parallel::plain::plain_module;
use crate::parallel::{LayerKind, ModuleStyle};
use crate::{DTensor, Result};

/// Layer norm over the last dim (Ba et al. 2016). Fresh weights are 1; fresh biases, if there is a bias, 0.
#[derive(Debug, Clone)]
pub struct LayerNorm {
    weight: DTensor,
    bias: Option<DTensor>,
    eps: f64,
    style: ModuleStyle,
}

impl LayerNorm {
    /// Builds a layer at the builder's path for rows of `width`.
    pub fn new(width: usize, eps: f64, vb: &MeshVarBuilder) -> Result<Self> {
        let layer = layer_norm_no_bias(width, eps, vb)?;
        let layout = layer.style.layout(LayerKind::Norm)?;
        let bias = vb.get(width, "bias", Init::Const(0.0), layout.bias, layout.varying_bias)?;
        Ok(Self { bias: Some(bias), ..layer })
    }

    /// Returns the normalized rows, in the shape of `x`.
    #[track_caller]
    pub fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.style.layer(|| {
            let [x] = self.style.inputs([x])?;
            let y = match &self.bias {
                Some(bias) => x.layer_norm(&self.weight, bias, self.eps)?,
                None => x.layer_norm(&self.weight, &self.weight.zeros_like()?, self.eps)?,
            };
            let [y] = self.style.outputs([&y])?;
            Ok(y)
        })
    }

    /// Returns the weight `[width]`.
    pub fn weight(&self) -> &DTensor {
        &self.weight
    }

    /// Returns the bias `[width]`, if there is one.
    pub fn bias(&self) -> Option<&DTensor> {
        self.bias.as_ref()
    }
}

/// Builds a layer norm at the builder's path for rows of `width`, with the parameter `weight` only.
pub fn layer_norm_no_bias(width: usize, eps: f64, vb: &MeshVarBuilder) -> Result<LayerNorm> {
    let style = vb.style();
    let layout = style.layout(LayerKind::Norm)?;
    let weight = vb.get(width, "weight", Init::Const(1.0), layout.weight, layout.varying)?;
    Ok(LayerNorm { weight, bias: None, eps, style })
}

/// RMS norm over the last dim (Zhang & Sennrich 2019). Fresh weights are 1.
#[derive(Debug, Clone)]
pub struct RmsNorm {
    weight: DTensor,
    eps: f64,
    style: ModuleStyle,
}

impl RmsNorm {
    /// Builds a layer at the builder's path for rows of `width`.
    pub fn new(width: usize, eps: f64, vb: &MeshVarBuilder) -> Result<Self> {
        let style = vb.style();
        let layout = style.layout(LayerKind::Norm)?;
        let weight = vb.get(width, "weight", Init::Const(1.0), layout.weight, layout.varying)?;
        Ok(Self { weight, eps, style })
    }

    /// Returns the normalized rows, in the shape of `x`.
    #[track_caller]
    pub fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.style.layer(|| {
            let [x] = self.style.inputs([x])?;
            let [y] = self.style.outputs([&x.rms_norm(&self.weight, self.eps)?])?;
            Ok(y)
        })
    }
}

plain_module!(LayerNorm, |layer| None);

plain_module!(RmsNorm, |layer| None);
