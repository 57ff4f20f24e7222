//! From an op's table of rows to local tensors and the layout of the result.
//!
//! A [`Row`] says, for *one* axis, which placements of the inputs give which placement of the output without
//! communication. An op lists its rows; each axis takes the row that costs the fewest bytes, independently of the
//! other axes (`plan.rs`). All replicated is always possible and need not be listed. A plan is made once for inputs
//! that lie alike and kept (`cache.rs`).
//!
//! The gradient rule: on an axis where the output is not replicated, every replicated input is used through its
//! varying view, because each rank computes only a share of that input's gradient. Where the output is replicated and
//! an input is varying, the output is varying too, and the other inputs go through their views.
mod cache;
mod plan;

use crate::explain;
use crate::placement::Placement;
use crate::redistribute::{Moves, Target, Targets};
use crate::spec::Spec;
use crate::strict;
use crate::{DTensor, Result};
use candle_core::{DType, Tensor};
use candle_dist::backend::Dims;
pub(crate) use plan::{Plan, check_meshes};
use smallvec::{SmallVec, smallvec};
use std::panic::Location;
use std::sync::Arc;

/// One way to run an op on one axis.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Row {
    pub(crate) out: Placement,
    pub(crate) ins: SmallVec<[Placement; 3]>,
}

/// The rows of an op, best first among equals.
pub(crate) type Rows = SmallVec<[Row; 8]>;

impl Row {
    pub(crate) fn new(out: Placement, ins: &[Placement]) -> Self {
        Self { out, ins: SmallVec::from_slice(ins) }
    }
}

/// What an op may do with its inputs, and what it makes of them.
pub(crate) struct Signature {
    rows: Rows,
    /// Global shape and dtype of each output; all lie as the row says.
    outs: SmallVec<[(Dims, DType); 1]>,
}

impl Signature {
    pub(crate) fn new(rows: Rows, shape: &[usize], dtype: DType) -> Self {
        Self { rows, outs: smallvec![(Dims::from_slice(shape), dtype)] }
    }

    /// With a further output.
    pub(crate) fn and(mut self, shape: &[usize], dtype: DType) -> Self {
        self.outs.push((Dims::from_slice(shape), dtype));
        self
    }
}

/// Runs an op: lays out the inputs by the cheapest rows, runs `local` on them, and wraps what it made.
///
/// `signature` checks the arguments and is asked only where the answer is not known yet: it may depend on nothing but
/// `op`, `attributes` and the specs of the inputs. `local` is not called where a rank has no elements of the output,
/// but is called with empty inputs.
#[track_caller]
pub(crate) fn run(
    op: &'static str,
    attributes: &[usize],
    inputs: &[&DTensor],
    signature: impl FnOnce() -> Result<Signature>,
    local: impl FnOnce(&[DTensor], &Spec) -> Result<Tensor>,
) -> Result<DTensor> {
    let mut made = run_all(op, attributes, inputs, signature, |x, outs| Ok(smallvec![local(x, &outs[0])?]))?;
    Ok(made.remove(0))
}

/// Like [`run`] with as many outputs as the signature has.
#[track_caller]
pub(crate) fn run_all(
    op: &'static str,
    attributes: &[usize],
    inputs: &[&DTensor],
    signature: impl FnOnce() -> Result<Signature>,
    local: impl FnOnce(&[DTensor], &[Arc<Spec>]) -> Result<SmallVec<[Tensor; 1]>>,
) -> Result<SmallVec<[DTensor; 1]>> {
    run_planned(op, attributes, inputs, || Plan::new(op, inputs, signature()?), local)
}

/// Like [`run_all`] for ops that make their own plans.
#[track_caller]
pub(crate) fn run_planned(
    op: &'static str,
    attributes: &[usize],
    inputs: &[&DTensor],
    plan: impl FnOnce() -> Result<Plan>,
    local: impl FnOnce(&[DTensor], &[Arc<Spec>]) -> Result<SmallVec<[Tensor; 1]>>,
) -> Result<SmallVec<[DTensor; 1]>> {
    let plan = cache::plan(op, attributes, inputs, plan)?;
    if plan.communicates {
        strict::unasked(op, inputs, &plan, Location::caller())?;
    }
    let mut step = explain::open(op);
    if let Some(step) = &mut step {
        let sums = |x: &DTensor| if x.tracked() { plan.vary & !x.varying() } else { 0 };
        let convert = |(&x, moves): (&&DTensor, &Moves)| explain::Conversion::new(x, moves, sums(x));
        step.note(inputs.iter().zip(&plan.inputs).map(convert), &plan.outs);
    }
    let laid_out: SmallVec<[DTensor; 3]> =
        inputs.iter().zip(&plan.inputs).map(|(&input, moves)| input.moved(moves)).collect::<Result<_>>()?;
    if let Some(step) = &mut step {
        step.laid_out();
    }
    let made = if plan.nothing {
        plan.outs.iter().map(|out| nothing(&laid_out, out)).collect::<Result<_>>()?
    } else {
        local(&laid_out, &plan.outs)?
    };
    let wrap = |(local, spec): (Tensor, &Arc<Spec>)| {
        let made = DTensor::assemble(local, spec.clone(), plan.varying);
        match (inputs, &plan.inputs[..]) {
            ([x], [moves]) if moves.is_empty() => made.made_locally_of(x),
            _ => made,
        }
    };
    Ok(made.into_iter().zip(&plan.outs).map(wrap).collect())
}

/// An input of `op` with each axis where `place` puts it: for what an op needs before it can make a plan.
#[track_caller]
pub(crate) fn lay_out(op: &'static str, input: &DTensor, place: impl Fn(Placement) -> Placement) -> Result<DTensor> {
    let places: SmallVec<[Placement; 3]> = input.placements().iter().map(|&p| place(p)).collect();
    let number = |p: &Placement| p.shard_dim().map_or(usize::from(p.is_partial()), |dim| dim + 2);
    let attributes: SmallVec<[usize; 4]> = std::iter::once(usize::MAX).chain(places.iter().map(number)).collect();
    let plan = || {
        let target = |(axis, &placement): (usize, &Placement)| {
            let stays = input.placements()[axis] == placement;
            Target { placement, sizes: input.spec().sizes(axis).filter(|_| stays).cloned() }
        };
        let targets: Targets = places.iter().enumerate().map(target).collect();
        Plan::laid(&[input], [targets.clone()], &targets, &[(Dims::from_slice(input.dims()), input.dtype())])
    };
    let mut made = run_planned(op, &attributes, &[input], plan, |x, _| Ok(smallvec![x[0].to_local().clone()]))?;
    Ok(made.remove(0).aliasing(input))
}

/// The result of any op where it has no elements on this rank.
///
/// candle drops inputs from the graph there. They must stay in it, in their order: a rank with an empty shard takes
/// part in the communication of their backward passes like every other rank.
fn nothing(inputs: &[DTensor], spec: &Spec) -> Result<Tensor> {
    let nothing_of = |x: &DTensor| x.to_local().flatten_all()?.narrow(0, 0, 0)?.to_dtype(spec.dtype());
    let tracked = inputs.iter().filter(|x| x.tracked() && spec.dtype().is_float());
    let tracked = tracked.map(nothing_of).collect::<candle_core::Result<Vec<_>>>()?;
    let shape = spec.local_shape();
    match &tracked[..] {
        [] => Ok(Tensor::zeros(shape.as_slice(), spec.dtype(), inputs[0].device())?),
        parts => Ok(Tensor::cat(parts, 0)?.reshape(shape.as_slice())?),
    }
}
