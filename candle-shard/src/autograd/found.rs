//! Gradients that graph nodes find for variables that are not their inputs.
use candle_core::{Tensor, TensorId};
use candle_dist::add_grad;
use std::cell::RefCell;
use std::collections::HashMap;

thread_local! {
    /// The gradients found so far, until the outermost backward pass collects them.
    static FOUND: RefCell<HashMap<TensorId, Tensor>> = RefCell::new(HashMap::new());
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

/// Removes and returns all gradients found so far.
pub(super) fn take_all() -> HashMap<TensorId, Tensor> {
    FOUND.take()
}
