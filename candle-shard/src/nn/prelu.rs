//! The parametric ReLU.
use crate::nn::{Init, MeshVarBuilder, Module};
use crate::parallel::{LayerKind, ModuleStyle};
use crate::{DTensor, Result};

/// `x` where it is positive, else `weight · x`, with one weight or one per channel, which is dim 1 (He et al. 2015).
///
/// Under a plan the weights of channels are sharded with them (colwise), or replicated.
#[derive(Debug, Clone)]
pub struct PReLU {
    weight: DTensor,
    is_scalar: bool,
    style: ModuleStyle,
}

impl PReLU {
    /// Creates a layer with these weights, outside of any plan.
    pub fn new(weight: DTensor, is_scalar: bool) -> Self {
        Self { weight, is_scalar, style: ModuleStyle::default() }
    }

    /// Returns the weights.
    pub fn weight(&self) -> &DTensor {
        &self.weight
    }

    /// Returns whether all elements share one weight.
    pub fn is_scalar(&self) -> bool {
        self.is_scalar
    }
}

impl Module for PReLU {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        let [x] = self.style.inputs_of(LayerKind::Channels, [x])?;
        let y = if self.is_scalar { x.prelu(&self.weight.reshape(())?) } else { x.prelu(&self.weight) };
        let [y] = self.style.outputs([&y?])?;
        Ok(y)
    }
}

/// Builds a [`PReLU`] at the builder's path with the parameter `weight`: one number, or one per channel. Fresh weights
/// are 0.25.
///
/// # Errors
/// If a style would shard a single weight.
pub fn prelu(channels: Option<usize>, vb: &MeshVarBuilder) -> Result<PReLU> {
    let style = vb.style();
    let layout = style.layout(LayerKind::Channels)?;
    if channels.is_none() && layout.weight.shard_dim().is_some() {
        return Err(style.error("is a PReLU of one weight, which no style cuts; leave it out of the plan"));
    }
    let weight = vb.get(channels.unwrap_or(1), "weight", Init::Const(0.25), layout.weight, layout.varying)?;
    Ok(PReLU { style, ..PReLU::new(weight, channels.is_none()) })
}
