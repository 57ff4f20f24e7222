//! Group norm as a layer.
use crate::nn::{Init, MeshVarBuilder, Module};
use crate::parallel::{LayerKind, ModuleStyle};
use crate::{DTensor, Error, Result};

/// Group norm of `[batch, channels, ..]` (Wu & He 2018). Fresh weights are 1 and fresh biases 0.
///
/// Under a plan its parameters are sharded with the channels (colwise), or replicated.
#[derive(Debug, Clone)]
pub struct GroupNorm {
    weight: DTensor,
    bias: DTensor,
    eps: f64,
    channels: usize,
    groups: usize,
    style: ModuleStyle,
}

impl GroupNorm {
    /// Creates a layer with these parameters, outside of any plan.
    ///
    /// # Errors
    /// If the groups do not divide the channels.
    pub fn new(weight: DTensor, bias: DTensor, channels: usize, groups: usize, eps: f64) -> Result<Self> {
        if groups == 0 || !channels.is_multiple_of(groups) {
            return Error::op("group_norm", format!("{groups} groups do not divide {channels} channels"));
        }
        Ok(Self { weight, bias, eps, channels, groups, style: ModuleStyle::default() })
    }
}

impl Module for GroupNorm {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        if x.rank() < 3 || x.dims()[1] != self.channels {
            let reason = format!("an input {}: expected [batch, {}, ..]", x.spec(), self.channels);
            return Error::op("group_norm", reason);
        }
        let [x] = self.style.inputs_of(LayerKind::Channels, [x])?;
        let [y] = self.style.outputs([&x.group_norm(self.groups, &self.weight, &self.bias, self.eps)?])?;
        Ok(y)
    }
}

/// Builds a [`GroupNorm`] at the builder's path with the parameters `weight` and `bias`.
///
/// # Errors
/// If the groups do not divide the channels.
pub fn group_norm(groups: usize, channels: usize, eps: f64, vb: &MeshVarBuilder) -> Result<GroupNorm> {
    let style = vb.style();
    let layout = style.layout(LayerKind::Channels)?;
    let weight = vb.get(channels, "weight", Init::Const(1.0), layout.weight, layout.varying)?;
    let bias = vb.get(channels, "bias", Init::Const(0.0), layout.bias, layout.varying_bias)?;
    Ok(GroupNorm { style, ..GroupNorm::new(weight, bias, channels, groups, eps)? })
}
