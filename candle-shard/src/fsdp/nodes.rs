//! The two graph nodes that notify a unit of the backward pass.
use crate::Result;
use crate::autograd::order::NodeSpan;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Layout, Shape, Tensor, TensorId};
use candle_dist::backend::{Ready, no_memory};
use std::sync::{Arc, Weak};

/// A unit, as its nodes see it.
pub(super) trait InPass: Send + Sync {
    /// Makes the unit whole for the backward pass, which is at the node `at`: the end of a run.
    fn before_backward(self: Arc<Self>, at: TensorId, span: NodeSpan, stays: bool) -> Result<()>;

    /// Takes the gradient of a whole parameter, complete at this point.
    fn take_grad(self: Arc<Self>, which: usize, grad: &Tensor) -> Result<()>;
}

/// From this rank's piece of a parameter to the whole parameter, which has memory only while its unit is whole.
///
/// Created once, with the parameter; the unit fills it for each run.
pub(super) struct UnshardNode {
    /// Weak, because the unit owns the tensor that owns this node.
    pub(super) unit: Weak<dyn InPass>,
    /// The index of the parameter in the unit.
    pub(super) which: usize,
    pub(super) shape: Shape,
    pub(super) dtype: DType,
}

impl CustomOp1 for UnshardNode {
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
    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let Some(unit) = self.unit.upgrade() else {
            candle_core::bail!(
                "a backward pass through a fully sharded unit that was dropped; keep the model until then"
            )
        };
        unit.take_grad(self.which, grad)?;
        Ok(None)
    }
}

/// The identity at the end of a result of a unit.
pub(super) struct UnitEnd {
    pub(super) unit: Arc<dyn InPass>,
    /// The nodes of the run.
    pub(super) span: NodeSpan,
    /// Whether the parameters must stay until the pass has left the run, not only until all their gradients exist.
    pub(super) stays: bool,
    pub(super) made: Ready,
}

impl CustomOp1 for UnitEnd {
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
        self.unit.clone().before_backward(end.id(), self.span, self.stays)?;
        Ok(Some(grad.clone()))
    }
}
