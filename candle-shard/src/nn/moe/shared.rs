//! The experts that all tokens use: one gated feed-forward network.
use super::config::MoEAxes;
use crate::nn::MeshVarBuilder;
use crate::nn::linear::init;
use crate::{DTensor, Result};

/// The weights of the shared experts, cut over the tensor axis as other experts are.
#[derive(Debug, Clone)]
pub(super) struct SharedExperts {
    gate: DTensor,
    up: DTensor,
    down: DTensor,
}

impl SharedExperts {
    pub(super) fn new([width, hidden]: [usize; 2], axes: &MoEAxes, vb: &MeshVarBuilder) -> Result<Self> {
        let make = |name: &str, [out, into]: [usize; 2], dim: usize| {
            let cut = axes.tensor_cut(dim, hidden, vb)?;
            let vb = vb.pp(name);
            vb.cut(&[out, into], "weight", init(into), cut.as_slice())
        };
        Ok(Self {
            gate: make("gate_proj", [hidden, width], 0)?,
            up: make("up_proj", [hidden, width], 0)?,
            down: make("down_proj", [width, hidden], 1)?,
        })
    }

    /// Maps `[.., width]` to `[.., width]`, partial sums over the tensor axis.
    pub(super) fn forward(&self, x: &DTensor) -> Result<DTensor> {
        let hidden = x.linear(&self.gate, None)?.silu_gate(&x.linear(&self.up, None)?)?;
        hidden.linear(&self.down, None)
    }
}
