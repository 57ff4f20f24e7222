//! Weight gradients that can be put off, for ops of one's own.
use candle_core::{Result, Tensor};
use candle_shard::kernels::{WeightSink, weight_sink};
use std::fmt;
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
#[derive(Clone)]
pub struct LateGradients(Option<Arc<dyn WeightSink>>);

impl LateGradients {
    /// Those of the stage that this thread runs, if it runs one.
    pub fn of_stage() -> Self {
        Self(weight_sink())
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
            Some(sink) => sink.take(weight, Box::new(compute)),
            None => compute().map(Some),
        }
    }
}

impl fmt::Debug for LateGradients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "LateGradients(of a stage)" } else { "LateGradients(none)" })
    }
}
