//! Weight gradients that are left to someone else, who may compute them later.

use std::cell::RefCell;
use std::sync::Arc;

use candle_core::{Result, Tensor};

/// The gradient of a linear layer's weight as the two factors of its product.
#[derive(Debug, Clone)]
pub struct WeightProduct {
    /// The weight `[n, k]`.
    pub weight: Tensor,
    /// The layer's input `[rows, k]`.
    pub x: Tensor,
    /// The gradient of the layer's output `[rows, n]`.
    pub grad: Tensor,
}

impl WeightProduct {
    /// The product for a layer with inputs `[.., k]` and outputs `[.., n]`, none of which holds a graph.
    pub(super) fn new(weight: &Tensor, x: &Tensor, grad: &Tensor) -> Result<Self> {
        let (n, k) = weight.dims2()?;
        let rows = x.dims()[..x.rank() - 1].iter().product::<usize>();
        let (x, grad) = (x.detach().reshape((rows, k))?, grad.detach().reshape((rows, n))?);
        Ok(Self { weight: weight.clone(), x, grad })
    }

    /// The gradient `[n, k]`.
    ///
    /// # Errors
    /// Those of candle.
    pub fn compute(&self) -> Result<Tensor> {
        if self.x.elem_count() == 0 || self.grad.elem_count() == 0 {
            return self.weight.zeros_like();
        }
        self.grad.t()?.matmul(&self.x)
    }
}

/// Who takes the gradients of weights from linear layers in their backward pass.
pub trait WeightSink: Send + Sync {
    /// The gradient of a weight, or nothing if the sink keeps the product: then the weight gets none from this use.
    ///
    /// # Errors
    /// Those of candle.
    fn take(&self, product: WeightProduct) -> Result<Option<Tensor>>;
}

thread_local! {
    static CURRENT: RefCell<Option<Arc<dyn WeightSink>>> = const { RefCell::new(None) };
}

/// What `f` gives; of all linear layers whose forward pass it runs on this thread, `sink` takes the weights' gradients.
///
/// For pipelines, whose stages first compute the gradients that other stages wait for. On a CPU,
/// [`linear`](super::linear()) is such a layer, and with it every linear layer of a
/// [`DTensor`](crate::DTensor) whose weight is sharded as its output is used.
///
/// ```
/// use candle_core::{Device::Cpu, Result, Tensor, Var};
/// use candle_shard::kernels::{WeightProduct, WeightSink, linear, with_weight_sink};
/// use std::sync::{Arc, Mutex};
///
/// #[derive(Default)]
/// struct Later(Mutex<Vec<WeightProduct>>);
/// impl WeightSink for Later {
///     fn take(&self, product: WeightProduct) -> Result<Option<Tensor>> {
///         self.0.lock().unwrap().push(product);
///         Ok(None)
///     }
/// }
///
/// let (weight, later) = (Var::new(&[[3f32, 4.]], &Cpu)?, Arc::new(Later::default()));
/// let x = Var::new(&[[1f32, 2.]], &Cpu)?;
/// let y = with_weight_sink(later.clone(), || linear(&x, &weight, None))?;
/// let grads = y.sum_all()?.backward()?;
/// assert!(grads.get(&x).is_some() && grads.get(&weight).is_none());
/// assert_eq!(later.0.lock().unwrap()[0].compute()?.to_vec2::<f32>()?, [[1., 2.]]);
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
