//! A tensor as one value: gathered, read, or differentiated.
use crate::autograd::backward;
use crate::layout::{Partial, Placement, Replicate};
use crate::{DTensor, Error, Result, explain};
use candle_core::backprop::GradStore;
use candle_core::{Tensor, WithDType};
use candle_dist::ReduceOp;
use candle_dist::backend::called_from;
use candle_dist::functional::Step;
use smallvec::SmallVec;
use std::panic::Location;

impl DTensor {
    /// Returns the whole tensor on every rank. A gradient that enters through it must be the same on every rank.
    ///
    /// For a parameter it is a copy: an optimizer's step does not change it.
    #[track_caller]
    pub fn full_tensor(&self) -> Result<Tensor> {
        called_from(Location::caller(), || {
            let whole = self.redistribute(&vec![Replicate; self.mesh().ndim()])?;
            let local =
                if whole.is_in_variable() { whole.to_local().copy()? } else { whole.to_local().clone() };
            let varying = (0..self.mesh().ndim()).filter(|&axis| whole.tracked() && whole.is_varying(axis));
            varying.into_iter().try_fold(local, |local, axis| {
                let group = whole.described(self.mesh().axis_group(axis)?.clone(), 1 << axis);
                Ok(Step::ToInvariant.apply(&local, &group)?)
            })
        })
    }

    /// Returns the [whole tensor](Self::full_tensor) on the host, without a gradient: elements that the host may read.
    #[track_caller]
    pub(crate) fn whole_on_host(&self) -> Result<Tensor> {
        Ok(self.mesh().to_host(&self.detach().full_tensor()?)?)
    }

    /// Returns the only element, the same on every rank. Shards are gathered and partial results reduced first.
    ///
    /// # Errors
    /// If the tensor does not have exactly one element, or not the dtype `S`.
    #[track_caller]
    pub fn to_scalar<S: WithDType>(&self) -> Result<S> {
        if self.elem_count() != 1 || self.dtype() != S::DTYPE {
            let want = S::DTYPE.as_str();
            return Error::op(
                "to_scalar",
                format!("{} is not a single {want}; reduce or convert it first", self.spec()),
            );
        }
        Ok(self.whole_on_host()?.reshape(())?.to_scalar()?)
    }

    /// Returns the gradients of this scalar with respect to every variable, as local tensors laid out like the
    /// variables.
    ///
    /// The number of ranks never scales a gradient. Every rank calls it.
    ///
    /// # Errors
    /// If the tensor has more than one element. If it depends on no variable, that is a warning, and there are no gradients.
    pub fn backward(&self) -> Result<GradStore> {
        if self.elem_count() != 1 || self.placements().iter().any(|p| p.shard_dim().is_some()) {
            return Error::op(
                "backward",
                format!("{} is not a scalar; reduce it with sum_all or mean_all", self.spec()),
            );
        }
        let linear = |p: &Placement| matches!(p, Replicate | Partial(ReduceOp::Sum));
        if !self.placements().iter().all(linear) {
            let whole = self.redistribute(&vec![Replicate; self.mesh().ndim()])?;
            return whole.backward();
        }
        if !self.tracked() {
            candle_dist::warn(format_args!(
                "backward: the loss depends on no variable, so there is no gradient: all that it comes from is frozen, \
                 detached, or no parameter of a builder"
            ));
        }
        let _explained = explain::open("backward");
        // A varying loss is the same number on every rank; each rank's loss stands for a part of it.
        let varies = |&axis: &usize| self.placements()[axis] == Replicate && self.is_varying(axis);
        let varies: SmallVec<[usize; 3]> = (0..self.mesh().ndim()).filter(varies).collect();
        if varies.is_empty() {
            return backward(self.to_local());
        }
        // The part of one rank is the whole, since 1/n could be rounded. Not `affine`, which cuts the graph at zero.
        let first = varies.iter().all(|&axis| self.mesh().coordinate()[axis] == 0);
        let share = Tensor::full(f64::from(u8::from(first)), self.to_local().shape(), self.device())?;
        backward(&(self.to_local() * share.to_dtype(self.dtype())?)?)
    }
}
