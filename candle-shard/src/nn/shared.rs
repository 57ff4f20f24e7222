//! Replicated variables that ranks use differently, perhaps many times: one sum over the ranks for all uses.
use crate::nn::found;
use crate::{DTensor, Result};
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, Shape, Tensor, TensorId};
use candle_dist::backend::{Fresh, Ready};
use candle_dist::{ProcessGroup, ReduceOp, add_grad};
use std::cell::{Cell, RefCell};

thread_local! {
    /// This rank's shares of gradients, until the backward pass ends.
    static SHARES: RefCell<Vec<Share>> = const { RefCell::new(Vec::new()) };
    static IS_COLLECTING: Cell<bool> = const { Cell::new(false) };
}

/// This rank's share of the gradient of a variable, to be summed over a group.
struct Share {
    group: ProcessGroup,
    variable: TensorId,
    sum: Tensor,
}

/// A copy of a variable for one use, from which a share of the gradient comes back.
///
/// A recurrent model uses a weight at each step. An optimizer writes to it in place, so that no copy can be kept for several
/// uses; their shares are kept instead, and summed over the ranks when the backward pass ends, all of a group in one call.
pub(crate) fn view(variable: &Tensor, group: &ProcessGroup) -> Result<Tensor> {
    let copy = Ready::new(Fresh::copy_of(variable)?);
    Ok(variable.apply_op1(Use { group: group.clone(), copy })?)
}

struct Use {
    group: ProcessGroup,
    copy: Ready,
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
            return Ok(Some(self.group.all_reduce(grad, ReduceOp::Sum)?));
        }
        SHARES.with_borrow_mut(|shares| {
            let is_mine = |share: &&mut Share| share.variable == variable.id() && share.group.is_same(&self.group);
            match shares.iter_mut().find(is_mine) {
                Some(share) => share.sum = add_grad(Some(&share.sum), grad)?,
                None => {
                    let sum = add_grad(None, grad)?;
                    shares.push(Share { group: self.group.clone(), variable: variable.id(), sum });
                }
            }
            Ok(None)
        })
    }
}

/// Collects the shares of the backward pass `f`, and adds their sums to what it found.
pub(super) fn collecting<T>(f: impl FnOnce() -> Result<T>) -> Result<T> {
    SHARES.take();
    IS_COLLECTING.set(true);
    let made = f();
    IS_COLLECTING.set(false);
    let mut shares = SHARES.take();
    let made = made?;
    while let Some(group) = shares.first().map(|share| share.group.clone()) {
        let (mine, others): (Vec<_>, Vec<_>) = shares.into_iter().partition(|share| share.group.is_same(&group));
        shares = others;
        let (variables, sums): (Vec<_>, Vec<_>) = mine.into_iter().map(|share| (share.variable, share.sum)).unzip();
        for (variable, sum) in variables.into_iter().zip(group.all_reduce_coalesced(&sums, ReduceOp::Sum)?) {
            found::add(variable, &sum)?;
        }
    }
    Ok(made)
}

/// Whether several uses of a tensor must not share a copy of it, and share a sum instead.
pub(crate) fn is_shared(tensor: &DTensor) -> bool {
    tensor.to_local().is_variable() && tensor.trail().is_none()
}
