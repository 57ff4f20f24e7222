//! Weight gradients that can be put off, for ops of one's own.
use crate::tape::WeightQueue;
use candle_core::{Result, Tensor};
use std::sync::Arc;

/// Where the gradients of a stage's weights wait when its input gradients leave first.
///
/// A custom op takes it along when it is made, in the forward pass, and gives it the gradient of its weight in `bwd`.
/// [`deferred_linear`](super::deferred_linear) is such an op.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_pipe::nn::LateGradients;
///
/// let weight = Tensor::new(2f32, &Device::Cpu)?;
/// // Outside of stages nothing waits.
/// let gradient = LateGradients::of_stage().give(&weight, || Tensor::new(3f32, &Device::Cpu))?;
/// assert_eq!(gradient.unwrap().to_scalar::<f32>()?, 3.0);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct LateGradients(Option<Arc<WeightQueue>>);

impl LateGradients {
    /// Those of the stage that this thread runs, if it runs one.
    pub fn of_stage() -> Self {
        Self(WeightQueue::current())
    }

    /// What the op's `bwd` returns for `weight`: nothing where a stage takes the gradient, to compute it now or later.
    ///
    /// # Errors
    /// Those of `compute`, if it runs now.
    pub fn give(
        &self,
        weight: &Tensor,
        compute: impl FnOnce() -> Result<Tensor> + Send + 'static,
    ) -> Result<Option<Tensor>> {
        match &self.0 {
            Some(queue) => queue.take(weight, compute),
            None => compute().map(Some),
        }
    }
}
