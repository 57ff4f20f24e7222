//! What stands in place of a norm and needs no statistics.
use crate::nn::{Init, MeshVarBuilder};
use crate::parallel::plain::plain_module;
use crate::parallel::{LayerKind, ModuleStyle};
use crate::{DTensor, Error, Result};

/// The dynamic tanh `weight · tanh(alpha · x) + bias` over the last dim, in place of a norm (Zhu et al. 2025).
///
/// `alpha` is one number. Fresh weights are 1 and fresh biases 0. Any dim of the input may stay sharded: no row is reduced.
#[derive(Debug, Clone)]
pub struct DynamicTanh {
    alpha: DTensor,
    weight: DTensor,
    bias: DTensor,
    style: ModuleStyle,
}

impl DynamicTanh {
    /// Builds a layer at the builder's path for rows of `width`; a fresh `alpha` is this number, 0.5 in the paper.
    ///
    /// # Errors
    /// If the plan has a style here that is not for norms.
    pub fn new(width: usize, alpha: f64, vb: &MeshVarBuilder) -> Result<Self> {
        let style = vb.style();
        let layout = style.layout(LayerKind::Norm)?;
        let alpha = vb.get(1, "alpha", Init::Const(alpha), layout.weight, layout.varying)?;
        let weight = vb.get(width, "weight", Init::Const(1.0), layout.weight, layout.varying)?;
        let bias = vb.get(width, "bias", Init::Const(0.0), layout.bias, layout.varying_bias)?;
        Ok(Self { alpha, weight, bias, style })
    }

    /// Returns the layer's output, in the shape of `x`.
    ///
    /// # Errors
    /// If the last dim of `x` has another width.
    #[track_caller]
    pub fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.style.layer(|| {
            let width = self.weight.dims();
            if !x.dims().ends_with(width) {
                // Multiplication would broadcast.
                let reason = format!("an input {}: expected a last dim of {}", x.spec(), width[0]);
                return Error::op("dynamic_tanh", reason);
            }
            let [x] = self.style.inputs([x])?;
            let y = x.mul(&self.alpha)?.tanh()?.mul(&self.weight)?.add(&self.bias)?;
            let [y] = self.style.outputs([&y])?;
            Ok(y)
        })
    }
}

plain_module!(DynamicTanh, |layer| None);
