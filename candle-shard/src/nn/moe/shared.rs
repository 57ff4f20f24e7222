//! The experts that all tokens use: one gated feed-forward network, whose result may be multiplied by a gate of its own.
use super::config::{MoEAxes, MoEConfig};
use crate::layout::Replicate;
use crate::nn::MeshVarBuilder;
use crate::nn::linear::init;
use crate::{DTensor, Result};

/// The weights of the shared experts, cut over the tensor axis as other experts are.
#[derive(Debug, Clone)]
pub(super) struct SharedExperts {
    gate: DTensor,
    up: DTensor,
    down: DTensor,
    /// `[1, width]`: the linear layer whose logistic function multiplies the result.
    factor: Option<DTensor>,
}

impl SharedExperts {
    /// Builds the experts of a layer at the builder's path.
    pub(super) fn new(config: &MoEConfig, axes: &MoEAxes, vb: &MeshVarBuilder) -> Result<Self> {
        let &MoEConfig { width, shared_hidden: hidden, .. } = config;
        let experts = vb.pp("shared_experts");
        let make = |name: &str, [out, into]: [usize; 2], dim: usize| {
            let cut = axes.tensor_cut(dim, hidden, &experts)?;
            experts.pp(name).cut(&[out, into], "weight", init(into), cut.as_slice())
        };
        let factor = || {
            let vb = vb.pp("shared_expert_gate");
            vb.part(&[1.into(), width.into()], "weight".into(), init(width), Replicate, false)
        };
        Ok(Self {
            gate: make("gate_proj", [hidden, width], 0)?,
            up: make("up_proj", [hidden, width], 0)?,
            down: make("down_proj", [width, hidden], 1)?,
            factor: config.shared_gate.then(factor).transpose()?,
        })
    }

    /// Maps `[.., width]` to `[.., width]`, partial sums over the tensor axis.
    pub(super) fn forward(&self, x: &DTensor) -> Result<DTensor> {
        let hidden = x.linear(&self.gate, None)?.silu_gate(&x.linear(&self.up, None)?)?;
        let made = hidden.linear(&self.down, None)?;
        match &self.factor {
            Some(factor) => made.mul(x.linear(factor, None)?.sigmoid()?),
            None => Ok(made),
        }
    }
}
