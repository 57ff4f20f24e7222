//! Deferred weight gradients, so that the gradients of a stage's inputs can be sent first.
use crate::Result;
use candle_core::backprop::GradStore;
use candle_core::{Tensor, TensorId};
use candle_dist::add_grad;
use candle_dist_kernels::{DeferredGradient, WeightSink, with_weight_sink};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The weight gradients of one run of one stage, deferred or not.
///
/// The gradients of one weight are summed with each other before those of its other uses are added, so the sum is bit
/// by bit the same whether they are deferred or not.
#[derive(Debug, Default)]
pub(crate) struct WeightQueue {
    /// Variables that stand for values of other stages. Their gradients must not be deferred.
    inputs: Vec<TensorId>,
    is_deferring: AtomicBool,
    /// The number of weight gradients that should have been deferred but were computed at once.
    at_once: AtomicUsize,
    weights: Mutex<QueueState>,
}

#[derive(Debug, Default)]
struct QueueState {
    waiting: Vec<DeferredWeight>,
    /// Weights with the sums of the gradients computed so far.
    sums: Vec<(Tensor, Tensor)>,
}

/// A deferred weight gradient.
struct DeferredWeight {
    weight: Tensor,
    gradient: DeferredGradient,
}

impl fmt::Debug for DeferredWeight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeferredWeight({:?})", self.weight.shape())
    }
}

impl WeightQueue {
    /// Creates a queue for a run whose inputs from other stages are the variables `inputs`.
    pub(crate) fn new(inputs: Vec<TensorId>) -> Arc<Self> {
        Arc::new(Self { inputs, ..Self::default() })
    }

    /// Runs `f`; layers in it use this queue.
    pub(crate) fn during<R>(self: &Arc<Self>, f: impl FnOnce() -> R) -> R {
        with_weight_sink(self.clone(), f)
    }

    /// Sets whether weight gradients are deferred from now on.
    pub(crate) fn defer(&self, is_deferring: bool) {
        self.is_deferring.store(is_deferring, Ordering::Relaxed);
    }

    /// Returns the weights with deferred gradients, once per use.
    pub(crate) fn waiting(&self) -> Vec<Tensor> {
        self.lock().waiting.iter().map(|deferred| deferred.weight.clone()).collect()
    }

    /// Returns the number of weight gradients that should have been deferred but were computed at once: those of
    /// weights that are not variables of the stage, such as a gathered fully sharded one.
    pub(crate) fn at_once(&self) -> usize {
        self.at_once.load(Ordering::Relaxed)
    }

    /// Computes the deferred gradients, in their order, and adds all gradients of the queue to `grads`.
    pub(crate) fn finish(&self, grads: &mut GradStore) -> Result<()> {
        let waiting = std::mem::take(&mut self.lock().waiting);
        waiting.into_iter().try_for_each(|deferred| self.add(&deferred.weight, (deferred.gradient)()?))?;
        for (weight, sum) in std::mem::take(&mut self.lock().sums) {
            let whole = match grads.get(&weight) {
                Some(other) => add_grad(Some(other), &sum)?,
                None => sum,
            };
            grads.insert(&weight, whole);
        }
        Ok(())
    }

    fn add(&self, weight: &Tensor, grad: Tensor) -> candle_core::Result<()> {
        let mut weights = self.lock();
        match weights.sums.iter_mut().find(|(other, _)| other.id() == weight.id()) {
            Some((_, sum)) => *sum = add_grad(Some(sum), &grad)?,
            None => weights.sums.push((weight.clone(), grad)),
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.weights.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WeightSink for WeightQueue {
    /// Returns the gradient of `weight`, unless it is one of this stage's own variables: then the queue keeps it.
    fn take(&self, weight: &Tensor, gradient: DeferredGradient) -> candle_core::Result<Option<Tensor>> {
        let is_deferring = self.is_deferring.load(Ordering::Relaxed);
        if !weight.is_variable() || self.inputs.contains(&weight.id()) {
            self.at_once.fetch_add(usize::from(is_deferring), Ordering::Relaxed);
            return gradient().map(Some);
        }
        if is_deferring {
            self.lock().waiting.push(DeferredWeight { weight: weight.clone(), gradient });
        } else {
            self.add(weight, gradient()?)?;
        }
        Ok(None)
    }
}
