//! Moving a tensor from one layout to another, gradient included.
//!
//! A change of layout is a sequence of single-axis steps, each one row of this table:
//!
//! | from | to | step | backward |
//! |---|---|---|---|
//! | `S(d)` | `R` invariant | all_gather | slice |
//! | `S(d)` | `R` varying | all_gather | reduce_scatter |
//! | `S(i)` | `S(j)` | all_to_all | all_to_all |
//! | `S(d)` | `P(sum)` | zero-pad | slice |
//! | `R` invariant | `S(d)` | slice | all_gather |
//! | `R` varying | `S(d)` | slice | zero-pad |
//! | `P(sum)` | `R` | all_reduce | identity |
//! | `P(sum)` | `S(d)` | reduce_scatter | all_gather |
//! | `R` | `P(sum)` | divide by n | identity |
//! | `R` invariant | `R` varying | identity | all_reduce |
//!
//! Reductions other than the sum become `R` first, and only without gradient.
//!
//! Gathers for varying uses and sums of partials are kept with a tracked tensor, so that several uses share them.
//!
//! Shards are undone from the inner axis outwards and made from the outer axis inwards, so that at every step an axis
//! cuts what the axes outside of it have left. Several axes that change alike do so in one step (`joint.rs`).
mod joint;

use crate::dtensor::{Axes, DTensor};
use crate::nn::shared;
use crate::placement::{Partial, Placement, Replicate, Shard};
use crate::spec::{Sizes, Spec, chunk_sizes};
use crate::{Error, Result};
use candle_core::Tensor;
use candle_dist::ReduceOp;
use candle_dist::functional::Exchange;
use smallvec::SmallVec;

/// Where one axis should go: a placement, with explicit sizes where they are not the default ones.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Target {
    pub(crate) placement: Placement,
    pub(crate) sizes: Option<Sizes>,
}

pub(crate) type Targets = SmallVec<[Target; 3]>;

impl Target {
    /// This shard in explicit sizes, or in the default ones if these are.
    pub(crate) fn shard(dim: usize, sizes: &[usize]) -> Self {
        let default = chunk_sizes(sizes.iter().sum(), sizes.len());
        Self { placement: Shard(dim), sizes: (sizes[..] != default[..]).then(|| sizes.into()) }
    }
}

impl From<Placement> for Target {
    fn from(placement: Placement) -> Self {
        Self { placement, sizes: None }
    }
}

impl DTensor {
    /// The same tensor in another layout, with one placement per axis.
    ///
    /// Communicates what the step table says and nothing more; a layout that is already there is free.
    ///
    /// # Errors
    /// If the placements do not fit the tensor, or ask for a reduction that was not there before.
    pub fn redistribute(&self, placements: &[Placement]) -> Result<Self> {
        self.spec().derive(placements, self.dims())?;
        self.to_targets(&placements.iter().map(|&p| Target::from(p)).collect::<Targets>(), 0)
    }

    /// Where each axis is now.
    pub(crate) fn targets(&self) -> Targets {
        let here = |(axis, &placement)| Target { placement, sizes: self.spec().sizes(axis).cloned() };
        self.placements().iter().enumerate().map(here).collect()
    }

    /// The same tensor with each axis where `place` puts it, and sizes kept on those that stay.
    pub(crate) fn placed(&self, place: impl Fn(usize, Placement) -> Placement) -> Result<Self> {
        let target = |(axis, &now): (usize, &Placement)| {
            let placement = place(axis, now);
            let sizes = (placement == now).then(|| self.spec().sizes(axis).cloned()).flatten();
            Target { placement, sizes }
        };
        self.to_targets(&self.placements().iter().enumerate().map(target).collect::<Targets>(), 0)
    }

    /// Whether [`to_targets`](Self::to_targets) has nothing to do.
    pub(crate) fn lies_as(&self, targets: &[Target], vary: Axes) -> bool {
        let lies = |(axis, target): (usize, &Target)| {
            let here = target.placement == self.placements()[axis];
            let sized = target.placement.shard_dim().is_none() || target.sizes.as_ref() == self.spec().sizes(axis);
            let view = target.placement == Replicate && vary & (1 << axis) != 0 && self.tracked();
            here && sized && (!view || self.is_varying(axis))
        };
        targets.iter().enumerate().all(lies)
    }

    /// Like [`redistribute`](Self::redistribute), with the result's gradient left partial on the axes `vary`.
    pub(crate) fn to_targets(&self, targets: &[Target], vary: Axes) -> Result<Self> {
        if self.lies_as(targets, vary) {
            return Ok(self.clone());
        }
        let mut at = self.gathered_jointly(targets, vary)?;
        for axis in (0..targets.len()).rev() {
            let now = at.placements()[axis];
            let Some(dim) = now.shard_dim() else { continue };
            let mut target = targets[axis].clone();
            // A shard can only be made where the axes outside of it already cut the dim as they will in the end.
            let misaligned = |dim: usize| {
                (0..axis).any(|a| {
                    let (now, then) = (at.placements()[a] == Shard(dim), targets[a].placement == Shard(dim));
                    now != then || now && targets[a].sizes.as_ref() != at.spec().sizes(a)
                })
            };
            let resized = target.placement == now && target.sizes.as_ref() != at.spec().sizes(axis);
            if resized || target.placement.shard_dim().is_some_and(misaligned) || misaligned(dim) {
                target = Replicate.into();
            }
            at = at.step(axis, target, vary)?;
        }
        at = at.reduced_jointly(targets)?;
        for (axis, target) in targets.iter().enumerate() {
            at = at.step(axis, target.clone(), vary)?;
        }
        Ok(at)
    }

    /// Changes one axis, all others staying as they are.
    fn step(&self, axis: usize, target: Target, vary: Axes) -> Result<Self> {
        let bit: Axes = 1 << axis;
        let (from, to) = (self.placements()[axis], target.placement);
        if from == to && (from.shard_dim().is_none() || target.sizes.as_ref() == self.spec().sizes(axis)) {
            let wants_view = from == Replicate && vary & bit != 0 && self.tracked() && !self.is_varying(axis);
            return if wants_view { self.varying_view(axis) } else { Ok(self.clone()) };
        }
        if to != Replicate && matches!(from, Partial(op) if op != ReduceOp::Sum) {
            return self.step(axis, Replicate.into(), vary)?.step(axis, target, vary);
        }
        let sized = target.sizes.is_some();
        let mut spec = self.spec().clone();
        spec.place(axis, to, target.sizes);
        let varying = self.varying() & !bit;
        if self.mesh().shape()[axis] == 1 {
            return Ok(DTensor::assemble(self.to_local().clone(), spec.shared(), varying).aliasing(self));
        }
        let sum = ReduceOp::Sum;
        if (from, to) == (Replicate, Partial(sum)) && self.dtype().is_int() {
            let reason = format!("no shares of {} on axis {axis}; only floats can become {to}", self.spec());
            return Error::op("redistribute", reason);
        }
        let exchange = match (from, to) {
            (Shard(dim), Replicate) if vary & bit != 0 => {
                return self.kept_step((bit, to, varying | bit), || {
                    let local = self.apply(axis, Exchange::all_gather(self.spec().cut(axis, dim)))?;
                    Ok(DTensor::assemble(local, spec.shared(), varying | bit))
                });
            }
            (Shard(dim), Replicate) => {
                let local = self.apply(axis, Exchange::all_gather_invariant(self.spec().cut(axis, dim)))?;
                return Ok(DTensor::assemble(local, spec.shared(), varying).gathered_from(self, axis));
            }
            (Shard(i), Shard(j)) if i != j => Exchange::all_to_all(spec.cut(axis, j), self.spec().cut(axis, i)),
            (Shard(dim), Partial(ReduceOp::Sum)) => Exchange::zero_pad(self.spec().cut(axis, dim)),
            (Replicate, Shard(dim)) if self.is_varying(axis) => Exchange::slice_varying(spec.cut(axis, dim)),
            (Replicate, Shard(dim)) => Exchange::slice(spec.cut(axis, dim)),
            (Replicate, Partial(ReduceOp::Sum)) if self.is_varying(axis) => Exchange::to_partial_varying(),
            (Replicate, Partial(ReduceOp::Sum)) => Exchange::to_partial(),
            (Partial(op), Replicate) if op == sum => Exchange::all_reduce(),
            (Partial(op), Shard(dim)) if op == sum => Exchange::reduce_scatter(spec.cut(axis, dim)),
            (Partial(op), Replicate) if !self.tracked() => {
                let local = self.mesh().axis_group(axis)?.all_reduce(self.to_local(), op)?;
                return Ok(DTensor::assemble(local, spec.shared(), varying));
            }
            (from, to) => {
                let fix = "partial placements are results of ops, and only sums of them carry a gradient on";
                let reason = format!("no way from {from} to {to} on axis {axis} of {}: {fix}", self.spec());
                return Error::op("redistribute", reason);
            }
        };
        let make = || Ok(DTensor::assemble(self.apply(axis, exchange)?, spec.shared(), varying));
        let adds_up = from == Partial(sum) && !sized;
        let made = if adds_up { self.kept_step((bit, to, varying), make)? } else { make()? };
        if to == Replicate && vary & bit != 0 && made.tracked() { made.varying_view(axis) } else { Ok(made) }
    }

    fn apply(&self, axis: usize, exchange: Exchange) -> Result<Tensor> {
        Ok(exchange.apply(self.to_local(), self.mesh().axis_group(axis)?)?)
    }

    /// This replicated tensor for uses that differ among the ranks of an axis: its gradients are summed there.
    ///
    /// The view is kept, so several uses share one communication in the backward pass; and where the tensor was
    /// gathered on this axis, its view turns the gather's backward into the reduce_scatter that both together are.
    fn varying_view(&self, axis: usize) -> Result<Self> {
        let group = self.mesh().axis_group(axis)?;
        let varying = self.varying() | 1 << axis;
        if shared::is_shared(self) {
            return Ok(self.viewed(shared::view(self.to_local(), group)?, varying));
        }
        let local = self.view(varying, || {
            let gathered = self.trail().and_then(|trail| trail.gathered.as_ref());
            if let Some((source, _)) = gathered.filter(|(source, a)| *a == axis && source.varying() == self.varying()) {
                let dim = source.placements()[axis].shard_dim().unwrap_or(0);
                let pair = Exchange::all_gather(source.spec().cut(axis, dim));
                return Ok(pair.with_known_result(source.to_local(), self.to_local(), group)?);
            }
            Ok(Exchange::to_varying().apply(self.to_local(), group)?)
        })?;
        Ok(self.viewed(local, varying))
    }
}

/// The bytes that one rank must receive to bring an axis to `to`.
pub(crate) fn conversion_cost(spec: &Spec, axis: usize, to: Placement) -> Option<usize> {
    let (n, bytes) = (spec.mesh().shape()[axis], spec.local_bytes());
    match (spec.placements()[axis], to) {
        (from, to) if from == to => Some(0),
        _ if n == 1 => Some(0),
        (Replicate, Shard(_)) => Some(0),
        (Replicate, Partial(ReduceOp::Sum)) if !spec.dtype().is_int() => Some(0),
        (Shard(_), Replicate) => Some(bytes * (n - 1)),
        (Shard(_), Shard(_)) => Some(bytes * (n - 1) / n),
        (Partial(_), Replicate) => Some(2 * bytes * (n - 1) / n),
        (Partial(ReduceOp::Sum), Shard(_)) => Some(bytes * (n - 1) / n),
        _ => None,
    }
}
