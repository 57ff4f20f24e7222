//! Vector-Jacobian products.
use super::pass::backward;
use crate::Result;
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Layout, MetalStorage, Shape, Tensor};

/// Returns the gradients of all variables on which `outputs` depend, given the gradients paired with the outputs.
///
/// That includes variables that only a recomputed part of the graph uses, such as inputs of the stage that it captures.
/// The results hold no graph.
pub(crate) fn vjp(outputs: &[(Tensor, Tensor)]) -> Result<GradStore> {
    let mut total: Option<Tensor> = None;
    for (output, gradient) in outputs.iter().filter(|(output, _)| output.track_op()) {
        let seed = output.apply_op1(Seed(gradient.detach()))?;
        total = Some(match total {
            Some(total) => (total + seed)?,
            None => seed,
        });
    }
    let mut found = GradStore::default();
    let Some(total) = total else { return Ok(found) };
    let grads = backward(&total)?;
    for &id in grads.get_ids() {
        if let Some(grad) = grads.get_id(id) {
            found.insert_id(id, grad.detach());
        }
    }
    Ok(found)
}

/// A scalar op whose gradient with respect to its argument is the stored tensor, whatever the incoming gradient.
///
/// Unlike the sum of a product, it neither reads the argument nor computes anything.
struct Seed(Tensor);

fn scalar<S>(storage: &S) -> candle_core::Result<(S, Shape)>
where
    S: BackendStorage,
    S::Device: BackendDevice<Storage = S>,
{
    let shape = Shape::from(());
    Ok((storage.device().zeros_impl(&shape, DType::F32)?, shape))
}

impl CustomOp1 for Seed {
    fn name(&self) -> &'static str {
        "seed"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        scalar(storage)
    }

    fn cuda_fwd(&self, storage: &CudaStorage, _: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        scalar(storage)
    }

    fn metal_fwd(&self, storage: &MetalStorage, _: &Layout) -> candle_core::Result<(MetalStorage, Shape)> {
        scalar(storage)
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(Some(self.0.clone()))
    }
}
