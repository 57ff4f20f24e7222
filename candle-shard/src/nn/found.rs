//! The backward pass, including gradients that graph nodes find for variables that are not their inputs.
pub(crate) use crate::changes::{changes, parameters_change};
use crate::nn::{draws, shared};
use crate::{Result, fsdp, scoped};
use candle_core::backprop::GradStore;
use candle_core::{Tensor, TensorId};
use candle_dist::add_grad;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;

thread_local! {
    /// The gradients found so far, until the outermost backward pass collects them.
    static FOUND: RefCell<HashMap<TensorId, Tensor>> = RefCell::new(HashMap::new());
    static RECOMPUTING: Cell<bool> = const { Cell::new(false) };
    /// The nesting depth of backward passes.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    /// The number of segments made so far.
    static SEGMENTS: Cell<usize> = const { Cell::new(0) };
}

/// Adds to the gradient of the variable `id`, in f32 if it has 16 bits.
pub(crate) fn add(id: TensorId, grad: &Tensor) -> candle_core::Result<()> {
    // Detached, since a product with an activation would keep its segment's graph alive until the last segment is done.
    let sum = add_grad(take(id).as_ref(), grad)?;
    FOUND.with_borrow_mut(|found| found.insert(id, sum));
    Ok(())
}

/// Removes and returns the gradient of `id` that was found so far.
pub(crate) fn take(id: TensorId) -> Option<Tensor> {
    FOUND.with_borrow_mut(|found| found.remove(&id))
}

/// Runs a forward pass within the backward pass that needs it.
pub(crate) fn recomputing<T>(f: impl FnOnce() -> T) -> T {
    scoped::with(&RECOMPUTING, true, f)
}

/// Runs the backward pass of a segment within that of the graph that contains the segment as a node.
pub(crate) fn nested<T>(f: impl FnOnce() -> T) -> T {
    scoped::with(&DEPTH, DEPTH.get() + 1, f)
}

/// Returns the nesting depth of backward passes.
pub(crate) fn depth() -> usize {
    DEPTH.get()
}

/// Counts a segment that will be recomputed.
pub(crate) fn segment_made() {
    SEGMENTS.set(SEGMENTS.get().wrapping_add(1));
}

/// Returns the number of segments made so far.
pub(crate) fn segments() -> usize {
    SEGMENTS.get()
}

/// Returns whether this is a forward pass within the backward pass.
pub(crate) fn is_recomputing() -> bool {
    RECOMPUTING.get()
}

/// Runs candle's backward pass of a local scalar, with the gradients of segments that
/// [`checkpoint`](crate::nn::checkpoint) recomputes, and of [fully sharded](crate::fsdp) parameters.
///
/// It is [`DTensor::backward`](crate::DTensor::backward) for values that are local to each rank, such as the seed of
/// one stage of a pipeline.
///
/// Gradients to which several segments or uses of a unit add are f32 for 16-bit variables; see
/// [`candle_dist::round_grads`] for optimizers that require 16 bits.
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
