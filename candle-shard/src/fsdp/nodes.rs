//! The two graph nodes that notify a unit of the backward pass.
use super::unit::Unit;
use crate::autograd::order::Span;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Layout, Shape, Tensor};
use candle_dist::backend::{Ready, no_memory};
use std::sync::{Arc, Weak};

/// From this rank's piece of a parameter to the whole parameter, which has memory only while its unit is whole.
///
/// Created once, with the parameter; the unit fills it for each run.
pub(super) struct Whole {
    /// Weak, because the unit owns the tensor that owns this node.
    pub(super) unit: Weak<Unit>,
    /// The index of the parameter in the unit.
    pub(super) which: usize,
    pub(super) shape: Shape,
    pub(super) dtype: DType,
}

impl CustomOp1 for Whole {
    fn name(&self) -> &'static str {
        "fully_shard-whole"
    }

    fn cpu_fwd(&self, piece: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((no_memory(piece.device(), self.dtype)?, self.shape.clone()))
    }

    fn cuda_fwd(&self, piece: &CudaStorage, _: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        Ok((no_memory(piece.device(), self.dtype)?, self.shape.clone()))
    }

    /// Passes the whole gradient to the unit; the gradient of the piece is computed with those of the unit's other
    /// parameters.
    fn bwd(&self, _: &Tensor, whole: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let Some(unit) = self.unit.upgrade() else {
            candle_core::bail!(
                "a backward pass through a fully sharded unit that was dropped; keep the model until then"
            )
        };
        Unit::take_grad(&unit, self.which, whole.id(), grad)?;
        Ok(None)
    }
}

/// The identity at the end of a unit.
pub(super) struct End {
    pub(super) unit: Arc<Unit>,
    /// The nodes of the run.
    pub(super) span: Span,
    /// Whether the parameters must stay until the pass has left the run, not only until all their gradients exist.
    pub(super) stays: bool,
    pub(super) made: Ready,
}

impl CustomOp1 for End {
    fn name(&self) -> &'static str {
        "fully_shard-end"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        self.made.cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        self.made.cuda()
    }

    fn bwd(&self, _: &Tensor, end: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Unit::before_backward(&self.unit, end.id(), self.span, self.stays)?;
        Ok(Some(grad.clone()))
    }
}
