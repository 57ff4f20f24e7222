//! Deferred weight gradients for your own ops.
use candle_core::{Result, Tensor};
use candle_dist_kernels::{WeightSink, weight_sink};
use std::fmt;
use std::sync::Arc;

/// The queue of a stage's deferred weight gradients, which are computed after its input gradients are sent.
///
/// A custom op stores it when it is created, in the forward pass, and passes it the gradient of its weight in `bwd`.
/// [`deferred_linear`](super::deferred_linear) is such an op.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_pipe::nn::DeferredGradients;
///
/// let weight = Tensor::new(2f32, &Device::Cpu)?;
/// // Outside of stages nothing is deferred.
/// let gradient = DeferredGradients::of_stage().give(&weight, || Tensor::new(3f32, &Device::Cpu))?;
/// assert_eq!(gradient.unwrap().to_scalar::<f32>()?, 3.0);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone)]
pub struct DeferredGradients(Option<Arc<dyn WeightSink>>);

impl DeferredGradients {
    /// Returns the queue of the stage that this thread runs, if it runs one.
    pub fn of_stage() -> Self {
        Self(weight_sink())
    }

    /// Returns the result of the op's `bwd` for `weight`: `None` if a stage keeps the gradient, to compute it now or
    /// later.
    ///
    /// # Errors
    /// Those of `compute`, if it runs now.
    pub fn give(
        &self,
        weight: &Tensor,
        compute: impl FnOnce() -> Result<Tensor> + Send + 'static,
    ) -> Result<Option<Tensor>> {
        match &self.0 {
            Some(sink) => sink.take(weight, Box::new(compute)),
            None => compute().map(Some),
        }
    }
}

impl fmt::Debug for DeferredGradients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() {
            "DeferredGradients(of a stage)"
        } else {
            "DeferredGradients(none)"
        })
    }
}
