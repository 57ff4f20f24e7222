//! Gradients that reach their variables outside of candle's graph: those of variables that are not inputs of the node
//! that computes them.
use candle_core::{Tensor, TensorId};
use candle_dist::add_grad;
use std::cell::RefCell;
use std::collections::HashMap;

thread_local! {
    /// The gradients so far, until the outermost backward pass collects them.
    static OFF_GRAPH: RefCell<HashMap<TensorId, Tensor>> = RefCell::new(HashMap::new());
}

/// Adds to the gradient of the variable `id`, in f32 if it has 16 bits.
pub(crate) fn add(id: TensorId, grad: &Tensor) -> candle_core::Result<()> {
    // Detached, since a product with an activation would keep its segment's graph alive until the last segment is done.
    let sum = add_grad(take(id).as_ref(), grad)?;
    OFF_GRAPH.with_borrow_mut(|all| all.insert(id, sum));
    Ok(())
}

/// Removes and returns the gradient of `id` so far.
pub(crate) fn take(id: TensorId) -> Option<Tensor> {
    OFF_GRAPH.with_borrow_mut(|all| all.remove(&id))
}

/// Removes and returns all gradients.
pub(super) fn take_all() -> HashMap<TensorId, Tensor> {
    OFF_GRAPH.take()
}
