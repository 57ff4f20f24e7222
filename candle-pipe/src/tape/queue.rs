//! Weight gradients put off, so that the gradients of a stage's inputs can leave first.
use crate::Result;
use candle_core::backprop::GradStore;
use candle_core::{Tensor, TensorId};
use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The weight gradients of one run of one stage that are still to be computed.
#[derive(Debug, Default)]
pub(crate) struct WeightQueue {
    /// Variables that stand for values of other stages, whose gradients nobody may wait for.
    inputs: Vec<TensorId>,
    is_deferring: AtomicBool,
    entries: Mutex<Vec<WeightProduct>>,
}

/// A weight's gradient as the two factors of its product.
#[derive(Debug)]
pub(crate) struct WeightProduct {
    /// The weight `[n, k]`.
    pub(crate) weight: Tensor,
    /// The layer's input `[rows, k]`.
    pub(crate) x: Tensor,
    /// The gradient of the layer's output `[rows, n]`.
    pub(crate) grad: Tensor,
}

impl WeightProduct {
    /// The gradient `[n, k]`.
    pub(crate) fn compute(&self) -> candle_core::Result<Tensor> {
        if self.x.elem_count() == 0 || self.grad.elem_count() == 0 {
            return self.weight.zeros_like();
        }
        self.grad.t()?.matmul(&self.x)
    }
}

thread_local! {
    /// The queue of the stage that this thread runs.
    static CURRENT: RefCell<Option<Arc<WeightQueue>>> = const { RefCell::new(None) };
}

impl WeightQueue {
    /// A queue for a run whose inputs from other stages are the variables `inputs`.
    pub(crate) fn new(inputs: Vec<TensorId>) -> Arc<Self> {
        Arc::new(Self { inputs, ..Self::default() })
    }

    /// The queue of the stage that this thread runs, if it runs one.
    pub(crate) fn current() -> Option<Arc<Self>> {
        CURRENT.with_borrow(Clone::clone)
    }

    /// What `f` gives when the layers that it runs use this queue.
    pub(crate) fn during<R>(self: &Arc<Self>, f: impl FnOnce() -> R) -> R {
        /// Puts back the queue of before, also when a layer panics.
        struct Restore(Option<Arc<WeightQueue>>);

        impl Drop for Restore {
            fn drop(&mut self) {
                CURRENT.set(self.0.take());
            }
        }

        let _restore = Restore(CURRENT.replace(Some(self.clone())));
        f()
    }

    /// Sets whether weight gradients are put off from now on, or computed on the way.
    pub(crate) fn defer(&self, is_deferring: bool) {
        self.is_deferring.store(is_deferring, Ordering::Relaxed);
    }

    /// Keeps the entry, if gradients are put off and the weight is this stage's own variable; else gives it back.
    pub(crate) fn push(&self, entry: WeightProduct) -> Option<WeightProduct> {
        let is_own = entry.weight.is_variable() && !self.inputs.contains(&entry.weight.id());
        if !(is_own && self.is_deferring.load(Ordering::Relaxed)) {
            return Some(entry);
        }
        self.lock().push(entry);
        None
    }

    /// The weights whose gradients are put off; one stands for each entry.
    pub(crate) fn weights(&self) -> Vec<Tensor> {
        self.lock().iter().map(|entry| entry.weight.clone()).collect()
    }

    /// Computes what was put off, in that order, and adds it to `grads`.
    pub(crate) fn drain(&self, grads: &mut GradStore) -> Result<()> {
        let entries = std::mem::take(&mut *self.lock());
        for entry in entries {
            let grad = entry.compute()?;
            let sum = match grads.get(&entry.weight) {
                Some(sum) => (sum + grad)?,
                None => grad,
            };
            grads.insert(&entry.weight, sum);
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<WeightProduct>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
