//! Gradients of variables that do not pass through candle's `GradStore` during a pass.
use super::slot::{RestoreGuard, add_to, nested};
use candle_core::backprop::GradStore;
use candle_core::{Result, Tensor, TensorId, bail};
use rustc_hash::FxHashMap;
use std::cell::{Cell, RefCell};

/// What a pass keeps.
struct PassState {
    /// The nodes around the pass: it runs inside the innermost of them.
    depth: usize,
    /// The place of each node in the order of the pass.
    places: FxHashMap<TensorId, usize>,
    /// The place of the last visited ticket.
    last: Option<usize>,
    grads: FxHashMap<TensorId, Tensor>,
}

/// The tickets of a thread whose backward steps run.
#[derive(Clone, Copy)]
struct VisitGuard {
    depth: usize,
    /// Whether the innermost one is of the pass that keeps gradients.
    is_kept: bool,
}

thread_local! {
    /// The innermost pass of [`backward`].
    static KEPT: RefCell<Option<PassState>> = const { RefCell::new(None) };
    static VISIT: Cell<VisitGuard> = const { Cell::new(VisitGuard { depth: 0, is_kept: false }) };
}

/// Runs the backward pass of a scalar. The gradients are those of [`Tensor::backward`], up to the order of sums, and only
/// those of variables. candle's pass also returns gradients of constants, such as the batch.
///
/// For the first gradient of a variable, candle makes zeros of its size, and it adds each gradient in new memory. This pass
/// takes the gradients that ops [`keep`] as they are. Linear maps and embeddings of candle-dist-kernels keep theirs.
///
/// It may run inside a node of another pass. Both keep their gradients apart.
///
/// # Errors
/// Those of candle's pass. And if a custom op of candle, inside this pass, runs candle's own backward pass over nodes of the
/// same graph: their gradients could not be told apart. Let that op run this function instead.
pub fn backward(loss: &Tensor) -> Result<GradStore> {
    let nodes = loss.sorted_nodes();
    let places = nodes.iter().enumerate().map(|(place, node)| (node.id(), place)).collect();
    let kept = PassState { depth: VISIT.get().depth, places, last: None, grads: FxHashMap::default() };
    let outer = RestoreGuard(Some(KEPT.replace(Some(kept))), |outer| drop(KEPT.replace(outer)));
    let mut found = nested(|| loss.backward())?;
    let mut kept = KEPT.take().map(|kept| kept.grads).unwrap_or_default();
    drop(outer);
    let mut grads = GradStore::default();
    for variable in nodes.into_iter().filter(|node| node.is_variable()) {
        let grad = match (found.remove(variable), kept.remove(&variable.id())) {
            (Some(sum), Some(grad)) => (sum + grad)?,
            (Some(grad), None) | (None, Some(grad)) => grad,
            (None, None) => continue,
        };
        grads.insert(variable, grad);
    }
    Ok(grads)
}

/// Keeps the gradient of a variable until its pass of [`backward`] ends, and returns `None`. Returns the gradient where it
/// must go through candle: if `x` is not a variable, or the pass is candle's own.
///
/// Only the backward step of an op that [`apply1`](super::apply1) to [`apply3`](super::apply3) or
/// [`record`](super::record) made a node may call it, with an input of the op. The gradient is contiguous, in memory that
/// nothing else uses: a second gradient is added in place.
///
/// # Errors
/// If the gradient has another shape or dtype than the variable.
pub fn keep(x: &Tensor, grad: Tensor) -> Result<Option<Tensor>> {
    if !VISIT.get().is_kept || !x.is_variable() {
        return Ok(Some(grad));
    }
    if grad.shape() != x.shape() || grad.dtype() != x.dtype() {
        let (x_type, grad_type) = (x.dtype().as_str(), grad.dtype().as_str());
        bail!("a variable {x_type}{:?} got a gradient {grad_type}{:?}", x.dims(), grad.dims());
    }
    let grad = grad.detach();
    let earlier = KEPT.with_borrow_mut(|kept| kept.as_mut().and_then(|kept| kept.grads.remove(&x.id())));
    let sum = match earlier {
        Some(sum) => add_to(sum, &grad)?,
        None => grad,
    };
    KEPT.with_borrow_mut(|kept| kept.as_mut().map(|kept| kept.grads.insert(x.id(), sum)));
    Ok(None)
}

/// Runs the backward step of a ticket.
pub(super) fn visiting<R>(ticket: &Tensor, step: impl FnOnce() -> Result<R>) -> Result<R> {
    let outer = VISIT.get();
    let is_kept = KEPT.with_borrow_mut(|kept| match kept {
        Some(kept) if kept.depth == outer.depth => kept.meets(ticket.id()),
        // A pass of candle's own, inside a node of this one.
        _ => Ok(false),
    })?;
    let _outer = RestoreGuard(Some(outer), |outer| VISIT.set(outer));
    VISIT.set(VisitGuard { depth: outer.depth + 1, is_kept });
    step()
}

impl PassState {
    /// Returns whether the pass has come to this ticket. Another pass may meet tickets that are not in its graph.
    fn meets(&mut self, ticket: TensorId) -> Result<bool> {
        let Some(&place) = self.places.get(&ticket) else { return Ok(false) };
        if self.last.is_some_and(|last| place <= last) {
            bail!(
                "a custom op of candle ran a backward pass over nodes of the pass that it was in; in that op, use \
                 candle_dist::edges::backward instead of Tensor::backward"
            );
        }
        self.last = Some(place);
        Ok(true)
    }
}
