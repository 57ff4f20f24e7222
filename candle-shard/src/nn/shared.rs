//! Replicated variables that ranks use differently, perhaps many times: one sum over the ranks for all uses.
use crate::nn::found;
use crate::{DTensor, Result, scoped};
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, Shape, Tensor, TensorId};
use candle_dist::backend::{Fresh, Ready};
use candle_dist::{ProcessGroup, ReduceOp, add_grad};
use std::cell::{Cell, RefCell};

thread_local! {
    /// This rank's shares of gradients, until the backward pass ends.
    static SHARES: RefCell<Vec<Share>> = const { RefCell::new(Vec::new()) };
    static IS_COLLECTING: Cell<bool> = const { Cell::new(false) };
}

/// This rank's share of the gradient of a variable, to be summed over one group after the other.
struct Share {
    groups: Vec<ProcessGroup>,
    variable: TensorId,
    sum: Tensor,
}

/// A copy of a variable for one use, from which a share of the gradient comes back.
///
/// A recurrent model uses a weight at each step. An optimizer writes to it in place, so that no copy can be kept for several
/// uses; their shares are kept instead, and summed over the ranks when the backward pass ends, all of a group in one call.
pub(crate) fn view(variable: &Tensor, groups: Vec<ProcessGroup>) -> Result<Tensor> {
    let copy = Ready::new(Fresh::copy_of(variable)?);
    Ok(variable.apply_op1(Use { groups, copy })?)
}

struct Use {
    groups: Vec<ProcessGroup>,
    copy: Ready,
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
        if !IS_COLLECTING.get() {
            // candle's own backward pass, at whose end nobody would sum.
            let sum = self.groups.iter().try_fold(grad.clone(), |sum, group| group.all_reduce(&sum, ReduceOp::Sum))?;
            return Ok(Some(sum));
        }
        SHARES.with_borrow_mut(|shares| {
            let is_mine = |share: &&mut Share| share.variable == variable.id() && is_same(&share.groups, &self.groups);
            match shares.iter_mut().find(is_mine) {
                Some(share) => share.sum = add_grad(Some(&share.sum), grad)?,
                None => {
                    let sum = add_grad(None, grad)?;
                    shares.push(Share { groups: self.groups.clone(), variable: variable.id(), sum });
                }
            }
            Ok(None)
        })
    }
}

/// Collects the shares of the backward pass `f`, and adds their sums to what it found.
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
            found::add(variable, &sum)?;
        }
    }
    Ok(made)
}

/// Whether several uses of a tensor must not share a copy of it, and share a sum instead.
pub(crate) fn is_shared(tensor: &DTensor) -> bool {
    tensor.to_local().is_variable() && tensor.trail().is_none()
}
