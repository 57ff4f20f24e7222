//! Weight gradients that are passed to a sink, which may compute them later.

use std::cell::RefCell;
use std::sync::Arc;

use candle_core::{Result, Tensor};

/// A deferred weight gradient, computed from tensors that hold no graph.
pub type DeferredGradient = Box<dyn FnOnce() -> Result<Tensor> + Send>;

/// A receiver of weight gradients in the backward pass of the layers that support it.
pub trait WeightSink: Send + Sync {
    /// Takes the gradient of a weight. Returns the gradient, or `None` if the sink keeps it; then the weight gets none
    /// from this use.
    ///
    /// # Errors
    /// Those of candle.
    fn take(&self, weight: &Tensor, gradient: DeferredGradient) -> Result<Option<Tensor>>;
}

thread_local! {
    static CURRENT: RefCell<Option<Arc<dyn WeightSink>>> = const { RefCell::new(None) };
}

/// Runs `f` with `sink` as the receiver of the weight gradients of all linear layers whose forward pass `f` runs on
/// this thread.
///
/// This is for pipelines, whose stages first compute the gradients that other stages wait for. The sink applies to
/// [`linear`](super::linear()) and to every linear layer of `candle-shard` whose weight needs no redistribution, also
/// where its `recompute` runs the layer again.
///
/// ```
/// use candle_core::{Device::Cpu, Result, Tensor, Var};
/// use candle_dist_kernels::{DeferredGradient, WeightSink, linear, with_weight_sink};
/// use std::sync::{Arc, Mutex};
///
/// #[derive(Default)]
/// struct Later(Mutex<Vec<DeferredGradient>>);
/// impl WeightSink for Later {
///     fn take(&self, _weight: &Tensor, gradient: DeferredGradient) -> Result<Option<Tensor>> {
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
    /// Restores the previous sink, even if a layer panics.
    struct Restore(Option<Arc<dyn WeightSink>>);

    impl Drop for Restore {
        fn drop(&mut self) {
            CURRENT.set(self.0.take());
        }
    }

    let _restore = Restore(CURRENT.replace(Some(sink)));
    f()
}

/// Returns the sink of this thread, for layers of other crates.
pub fn weight_sink() -> Option<Arc<dyn WeightSink>> {
    CURRENT.with_borrow(Clone::clone)
}
