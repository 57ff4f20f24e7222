//! Weight gradients that are left to someone else, who may compute them later.

use std::cell::RefCell;
use std::sync::Arc;

use candle_core::{Result, Tensor};

/// A gradient that is still to be computed, of tensors that hold no graph.
pub type LateGradient = Box<dyn FnOnce() -> Result<Tensor> + Send>;

/// Who takes the gradients of weights in the backward pass of the layers that know it.
pub trait WeightSink: Send + Sync {
    /// The gradient of a weight, or nothing if the sink has it, now or later: then the weight gets none from this use.
    ///
    /// # Errors
    /// Those of candle.
    fn take(&self, weight: &Tensor, gradient: LateGradient) -> Result<Option<Tensor>>;
}

thread_local! {
    static CURRENT: RefCell<Option<Arc<dyn WeightSink>>> = const { RefCell::new(None) };
}

/// What `f` gives; of all linear layers whose forward pass it runs on this thread, `sink` takes the weights' gradients.
///
/// For pipelines, whose stages first compute the gradients that other stages wait for. [`linear`](super::linear()) is such a
/// layer, and with it every linear layer of a [`DTensor`](crate::DTensor) whose weight is sharded as its output is used, also
/// where a [`checkpoint`](crate::nn::checkpoint) runs it a second time.
///
/// ```
/// use candle_core::{Device::Cpu, Result, Tensor, Var};
/// use candle_shard::kernels::{LateGradient, WeightSink, linear, with_weight_sink};
/// use std::sync::{Arc, Mutex};
///
/// #[derive(Default)]
/// struct Later(Mutex<Vec<LateGradient>>);
/// impl WeightSink for Later {
///     fn take(&self, _weight: &Tensor, gradient: LateGradient) -> Result<Option<Tensor>> {
///         self.0.lock().unwrap().push(gradient);
///         Ok(None)
///     }
/// }
///
/// let (weight, later) = (Var::new(&[[3f32, 4.]], &Cpu)?, Arc::new(Later::default()));
/// let x = Var::new(&[[1f32, 2.]], &Cpu)?;
/// let y = with_weight_sink(later.clone(), || linear(&x, &weight, None))?;
/// let grads = y.sum_all()?.backward()?;
/// assert!(grads.get(&x).is_some() && grads.get(&weight).is_none());
/// let gradient = later.0.lock().unwrap().remove(0);
/// assert_eq!(gradient()?.to_vec2::<f32>()?, [[1., 2.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn with_weight_sink<R>(sink: Arc<dyn WeightSink>, f: impl FnOnce() -> R) -> R {
    /// Puts back the sink of before, also when a layer panics.
    struct Restore(Option<Arc<dyn WeightSink>>);

    impl Drop for Restore {
        fn drop(&mut self) {
            CURRENT.set(self.0.take());
        }
    }

    let _restore = Restore(CURRENT.replace(Some(sink)));
    f()
}

/// The sink of this thread, for layers of other crates.
pub fn weight_sink() -> Option<Arc<dyn WeightSink>> {
    CURRENT.with_borrow(Clone::clone)
}
