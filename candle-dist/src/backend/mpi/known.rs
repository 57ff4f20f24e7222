//! A cache of calls with their plans, since programs repeat the same calls.
use super::header::CallDigest;
use super::operation::HostInput;
use super::plan::{Member, MessagePlan, plan};
use super::sums::Sums;
use crate::backend::recent::Recent;
use crate::backend::{Call, Dims};
use crate::{Error, Result};
use candle_core::DType;
use smallvec::SmallVec;
use std::sync::Arc;

/// A call with tensors of these dtypes and shapes, and everything derived from it.
pub(super) struct CallPlan {
    pub(super) call: Arc<Call>,
    /// The dtypes and shapes of this member's inputs.
    given: SmallVec<[(DType, Dims); 1]>,
    pub(super) signature: CallDigest,
    /// One share per tensor of the call.
    pub(super) shares: SmallVec<[TensorPlan; 1]>,
    /// Whether the plans send nothing to the next member, so that a header alone shows it the call.
    pub(super) shows_itself: bool,
}

/// The plan and shape of one tensor of a call.
pub(super) struct TensorPlan {
    pub(super) plan: MessagePlan,
    pub(super) dtype: DType,
    /// The shape of the result.
    pub(super) shape: Dims,
}

impl CallPlan {
    pub(super) fn new(call: Arc<Call>, me: Member, given: &[HostInput], sums: Sums) -> Result<Self> {
        let given: SmallVec<[(DType, Dims); 1]> = given.iter().map(shape_of).collect();
        let shares = (0..call.count()).map(|nth| TensorPlan::new(&call, me, nth, given.get(nth), sums));
        let shares = shares.collect::<Result<SmallVec<[TensorPlan; 1]>>>()?;
        let shows_itself = !shares.iter().any(|share| share.plan.sends_to(me.after(1)));
        Ok(Self { signature: CallDigest::of(&call), call, given, shares, shows_itself })
    }

    /// Returns whether it belongs to `call` with these tensors: a plan depends on nothing else.
    fn is_of(&self, call: &Call, given: &[HostInput]) -> bool {
        let alike = |((dtype, shape), other): (&(DType, Dims), &HostInput)| {
            (*dtype, &shape[..]) == (other.hold.tensor().dtype(), other.hold.tensor().dims())
        };
        self.call.difference(call).is_none()
            && self.given.len() == given.len()
            && self.given.iter().zip(given).all(alike)
    }
}

fn shape_of(given: &HostInput) -> (DType, Dims) {
    (given.hold.tensor().dtype(), Dims::from_slice(given.hold.tensor().dims()))
}

impl TensorPlan {
    fn new(call: &Call, me: Member, nth: usize, input: Option<&(DType, Dims)>, sums: Sums) -> Result<Self> {
        if call.collective.has_input(me.rank) && input.is_none() {
            return Err(Error::Unsupported(format!("{} without a tensor", call.op())));
        }
        let given = input.map_or(&call.shape, |(_, shape)| shape);
        let dtype = input.map(|(dtype, _)| *dtype).or(call.dtype).unwrap_or(DType::U8);
        let plan = plan(call, nth, me, given, dtype.size_in_bytes(), sums)?;
        let shape =
            if plan.result.is_some() { call.collective.output(nth, given, me.rank) } else { given.clone() };
        Ok(Self { plan, dtype, shape })
    }
}

/// The calls of a group, with their plans.
#[derive(Default)]
pub(super) struct CallPlans(Recent<CallPlan>);

impl CallPlans {
    /// Returns the cached entry of `call`, if there is one.
    pub(super) fn find(&mut self, call: &Call, given: &[HostInput]) -> Option<Arc<CallPlan>> {
        self.0.find(|known| known.is_of(call, given))
    }

    /// Caches a new call, unless it is not likely to be repeated.
    pub(super) fn keep(&mut self, known: &Arc<CallPlan>) {
        // Counts of rows depend on data.
        if known.call.collective.counts().is_none() {
            self.0.keep(known.clone());
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;
    use crate::backend::Form;
    use crate::{Collective, Cut};
    use candle_core::{Device, Tensor};
    use smallvec::smallvec;

    fn tensor(shape: &[usize], dtype: DType) -> SmallVec<[HostInput; 1]> {
        let tensor = Tensor::zeros(shape, dtype, &Device::Cpu).unwrap();
        // SAFETY: the lock is the tensor's.
        smallvec![unsafe { HostInput::new(&tensor, &tensor.storage_and_layout().0).unwrap() }]
    }

    /// The call of something that is cut and joined, so that all of its attributes count.
    fn call() -> Call {
        let given = tensor(&[4, 1], DType::F32);
        let x = given[0].hold.tensor();
        Call::on(Collective::AllToAll { split: Cut::new(0, &[2, 2]), concat: Cut::new(1, &[1, 1]) }, x)
    }

    fn known(call: &Call, given: &[HostInput]) -> Arc<CallPlan> {
        let me = Member { rank: 0, size: 2 };
        Arc::new(CallPlan::new(Arc::new(call.clone()), me, given, Sums::RankOrder).unwrap())
    }

    #[test]
    fn a_plan_is_used_again_for_calls_that_differ_in_nothing() {
        let given = tensor(&[4, 1], DType::F32);
        let mut calls = CallPlans::default();
        assert!(calls.find(&call(), &given).is_none());
        calls.keep(&known(&call(), &given));
        assert!(calls.find(&call(), &given).is_some());
        type Change = fn(&mut Call);
        fn split(call: &mut Call) -> &mut Cut {
            let Collective::AllToAll { split, .. } = &mut call.collective else {
                panic!("another collective")
            };
            split
        }
        let changes: [(&str, Change); 7] = [
            ("op", |c| c.collective = Collective::all_gather(Cut::new(0, &[4, 4]))),
            ("dtype", |c| c.dtype = Some(DType::U32)),
            ("shape", |c| c.shape[0] = 5),
            ("rest", |c| c.rest.push((DType::F32, smallvec![1]))),
            ("dim", |c| split(c).dim = 1),
            ("sizes", |c| split(c).sizes = smallvec![1, 3]),
            ("form", |c| c.form = Form::InPlace),
        ];
        for (what, change) in changes {
            let mut other = call();
            change(&mut other);
            assert!(calls.find(&other, &given).is_none(), "{what}");
        }
        // Dims of any size are equal in the call, and differ between the inputs.
        assert!(calls.find(&call(), &tensor(&[4, 3], DType::F32)).is_none());
        assert!(calls.find(&call(), &tensor(&[4, 1], DType::U32)).is_none());
        assert!(calls.find(&call(), &[]).is_none());
    }

    #[test]
    fn calls_whose_sizes_are_data_are_not_kept() {
        let (x, mut calls) = (tensor(&[3, 1], DType::F32), CallPlans::default());
        let routed = Call::on(Collective::all_to_all_single(&[[1, 2], [2, 2]]), x[0].hold.tensor());
        calls.keep(&known(&routed, &x));
        assert!(calls.find(&routed, &x).is_none());
    }
}
