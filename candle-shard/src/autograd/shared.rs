//! Replicated variables that ranks use differently, perhaps many times: their gradients are summed over the ranks once.
use super::off_graph;
use crate::tensor::Origin;
use crate::{Result, scoped};
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, Shape, Tensor, TensorId};
use candle_dist::backend::{Fresh, Ready};
use candle_dist::{ProcessGroup, ReduceOp, add_grad};
use std::cell::{Cell, RefCell};

thread_local! {
    /// This rank's parts of gradients, until the backward pass ends.
    static SHARES: RefCell<Vec<Share>> = const { RefCell::new(Vec::new()) };
    static IS_COLLECTING: Cell<bool> = const { Cell::new(false) };
}

/// This rank's part of the gradient of a variable, to be summed over each of the groups in order.
struct Share {
    groups: Vec<ProcessGroup>,
    variable: TensorId,
    sum: Tensor,
}

/// Copies a variable, or a view of it, for one use, whose gradient is a part of the variable's gradient.
///
/// A recurrent model uses a weight, or its transpose, at each step. No copy can be shared by several uses, since an
/// optimizer writes to the weight in place. Instead the parts of the gradient are collected, and summed over the ranks
/// at the end of the backward pass, all of a group in one call.
pub(crate) fn view(origin: &Origin, groups: Vec<ProcessGroup>) -> Result<Tensor> {
    let Origin { variable, view } = origin.clone();
    let copy = Ready::new(Fresh::copy_of(view.as_ref().unwrap_or(&variable))?);
    // An op on the variable itself: candle requires a gradient for nodes in between.
    Ok(variable.apply_op1(Use { groups, view, copy })?)
}

struct Use {
    groups: Vec<ProcessGroup>,
    /// The view of the variable that was copied, if it was not the variable itself.
    view: Option<Tensor>,
    copy: Ready,
}

impl Use {
    /// Converts the gradient of the copy to that of the variable.
    fn of_variable(&self, variable: &Tensor, grad: &Tensor) -> candle_core::Result<Tensor> {
        let Some(view) = &self.view else { return Ok(grad.clone()) };
        let found = (view * grad.detach())?.sum_all()?.backward()?.remove(variable);
        found.map_or_else(|| variable.zeros_like(), |grad| Ok(grad.detach()))
    }
}

fn is_same(some: &[ProcessGroup], others: &[ProcessGroup]) -> bool {
    some.len() == others.len() && some.iter().zip(others).all(|(one, other)| one.is_same(other))
}

impl CustomOp1 for Use {
    fn name(&self) -> &'static str {
        "shared-variable"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        self.copy.cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        self.copy.cuda()
    }

    fn bwd(&self, variable: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let grad = self.of_variable(variable, grad)?;
        if !IS_COLLECTING.get() {
            // candle's own backward pass, at whose end nothing would sum them.
            let sum = self.groups.iter().try_fold(grad, |sum, group| group.all_reduce(&sum, ReduceOp::Sum))?;
            return Ok(Some(sum));
        }
        SHARES.with_borrow_mut(|shares| {
            let is_mine = |share: &&mut Share| share.variable == variable.id() && is_same(&share.groups, &self.groups);
            match shares.iter_mut().find(is_mine) {
                Some(share) => share.sum = add_grad(Some(&share.sum), &grad)?,
                None => {
                    let sum = add_grad(None, &grad)?;
                    shares.push(Share { groups: self.groups.clone(), variable: variable.id(), sum });
                }
            }
            Ok(None)
        })
    }
}

/// Collects the parts of the backward pass `f`, and adds their sums to its gradients.
pub(super) fn collecting<T>(f: impl FnOnce() -> Result<T>) -> Result<T> {
    SHARES.take();
    let made = scoped::with(&IS_COLLECTING, true, f);
    let mut shares = SHARES.take();
    let made = made?;
    while let Some(groups) = shares.first().map(|share| share.groups.clone()) {
        let (mine, others): (Vec<_>, Vec<_>) = shares.into_iter().partition(|share| is_same(&share.groups, &groups));
        shares = others;
        let (variables, mut sums): (Vec<_>, Vec<_>) = mine.into_iter().map(|share| (share.variable, share.sum)).unzip();
        for group in &groups {
            sums = group.all_reduce_coalesced(&sums, ReduceOp::Sum)?;
        }
        for (variable, sum) in variables.into_iter().zip(sums) {
            off_graph::add(variable, &sum)?;
        }
    }
    Ok(made)
}
