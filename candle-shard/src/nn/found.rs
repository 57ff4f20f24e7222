//! The backward pass, with the gradients that nodes of a graph find for variables that are not their inputs.
pub(crate) use crate::changes::{changes, parameters_change};
use crate::nn::{draws, shared};
use crate::{Result, fsdp, scoped};
use candle_core::backprop::GradStore;
use candle_core::{Tensor, TensorId};
use candle_dist::add_grad;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;

thread_local! {
    /// Gradients found, until the outermost backward pass collects them.
    static FOUND: RefCell<HashMap<TensorId, Tensor>> = RefCell::new(HashMap::new());
    static RECOMPUTING: Cell<bool> = const { Cell::new(false) };
    /// Backward passes within which this one runs.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    /// Segments that were made so far.
    static SEGMENTS: Cell<usize> = const { Cell::new(0) };
}

/// Adds to the gradient of the variable `id`, in f32 where it has 16 bits.
pub(crate) fn add(id: TensorId, grad: &Tensor) -> candle_core::Result<()> {
    // Detached: a product with an activation would keep the graph of its segment until the last one is done.
    let sum = add_grad(take(id).as_ref(), grad)?;
    FOUND.with_borrow_mut(|found| found.insert(id, sum));
    Ok(())
}

/// The gradient of `id` that was found so far, which is forgotten.
pub(crate) fn take(id: TensorId) -> Option<Tensor> {
    FOUND.with_borrow_mut(|found| found.remove(&id))
}

/// Runs a forward pass within the backward pass, which goes on with it.
pub(crate) fn recomputing<T>(f: impl FnOnce() -> T) -> T {
    scoped::with(&RECOMPUTING, true, f)
}

/// Runs the backward pass of a segment, within that of a graph which has the segment as a node.
pub(crate) fn nested<T>(f: impl FnOnce() -> T) -> T {
    scoped::with(&DEPTH, DEPTH.get() + 1, f)
}

/// How many backward passes this one runs within.
pub(crate) fn depth() -> usize {
    DEPTH.get()
}

/// Notes that a segment was made, to be recomputed later.
pub(crate) fn segment_made() {
    SEGMENTS.set(SEGMENTS.get().wrapping_add(1));
}

/// How many segments were made so far.
pub(crate) fn segments() -> usize {
    SEGMENTS.get()
}

/// Whether this is a forward pass within the backward pass.
pub(crate) fn is_recomputing() -> bool {
    RECOMPUTING.get()
}

/// candle's backward pass of a local scalar, with the gradients of [`checkpoint`](crate::nn::checkpoint)ed segments and
/// [fully sharded](crate::fsdp) parameters.
///
/// [`DTensor::backward`](crate::DTensor::backward) for what is a scalar on every rank by itself, such as the seed of one
/// stage of a pipeline.
///
/// Gradients that several segments or uses of a unit add to are f32 for 16-bit variables; see
/// [`candle_dist::round_grads`] for optimizers that want 16 bits.
pub fn backward(loss: &Tensor) -> Result<GradStore> {
    FOUND.with_borrow_mut(HashMap::clear);
    RECOMPUTING.set(false);
    DEPTH.set(0);
    fsdp::abandon();
    let made = shared::collecting(|| {
        let grads = fsdp::pass(loss, || loss.backward())?;
        fsdp::finish()?;
        Ok(grads)
    });
    draws::pass_ended();
    if made.is_err() {
        fsdp::abandon();
    }
    let mut grads = made?;
    for (id, grad) in FOUND.take() {
        let sum = add_grad(grads.get_id(id), &grad)?;
        grads.insert_id(id, sum);
    }
    Ok(grads)
}
