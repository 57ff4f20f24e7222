//! The order of the moves from one layout to another, derived only from the layouts.
//!
//! Shards are gathered from the inner axis outwards and cut from the outer axis inwards, so that at every move an axis
//! cuts the part that the outer axes leave. Several axes with the same change share one move.
use super::table::{self, MovedAxes};
use super::target::Target;
use crate::layout::{Axes, Partial, Placement, Replicate, Shard, Spec, axes_of};
use crate::{DTensor, Error, Result};
use candle_dist::ReduceOp;
use candle_dist::functional::Step;
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;

/// A move from one layout to the next.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Move {
    pub(super) axes: MovedAxes,
    /// What changes: nothing on axes with one rank, where every placement is the same tensor.
    pub(crate) step: Step,
    /// The layout after the move.
    pub(crate) spec: Arc<Spec>,
    pub(super) varying: Axes,
    /// Whether the result is kept for later uses.
    pub(super) kept: bool,
    /// The bytes that this rank passes to the move's collective.
    pub(crate) bytes: usize,
    /// The most bytes that a rank receives, equal on all ranks.
    pub(crate) received: usize,
}

/// The moves to a layout.
pub(crate) type Moves = SmallVec<[Move; 2]>;

impl Move {
    /// Returns the names of the axes, joined by commas.
    pub(crate) fn axis_names(&self) -> String {
        let names = self.spec.mesh().names();
        self.axes.iter().map(|&axis| names[axis].as_str()).collect::<Vec<_>>().join(", ")
    }
}

/// Returns whether a tensor in the layout `spec` already has the layout `targets`, varying on `vary`.
fn lies_as(spec: &Spec, (varying, tracked): (Axes, bool), targets: &[Target], vary: Axes) -> bool {
    let lies = |(axis, target): (usize, &Target)| {
        let here = target.placement == spec.placements()[axis];
        let sized = target.placement.shard_dim().is_none() || target.sizes.as_ref() == spec.sizes(axis);
        let view = target.placement == Replicate && vary & (1 << axis) != 0 && tracked;
        here && sized && (!view || varying & (1 << axis) != 0)
    };
    targets.iter().enumerate().all(lies)
}

/// Returns the moves that bring `x` to `targets`, with the result's gradient left partial on the axes `vary`.
///
/// # Errors
/// If there are no such moves; equal on all ranks.
pub(crate) fn moves(x: &DTensor, targets: &[Target], vary: Axes) -> Result<Moves> {
    if lies_as(x.spec(), (x.varying(), x.tracked()), targets, vary) {
        return Ok(Moves::new());
    }
    let start = (x.shared_spec().clone(), x.varying());
    let mut way = MoveBuilder {
        at: start.0,
        varying: start.1,
        tracked: x.tracked(),
        targets,
        vary,
        moves: Moves::new(),
    };
    way.gather_jointly();
    for axis in (0..targets.len()).rev() {
        let now = way.at.placements()[axis];
        let Some(dim) = now.shard_dim() else { continue };
        let target = &targets[axis];
        let to = target.placement.shard_dim();
        let away = way.misaligned(axis, dim) || to.is_some_and(|dim| way.misaligned(axis, dim));
        way.transform_axis(axis, if away { Replicate.into() } else { target.clone() })?;
    }
    way.reduce_jointly();
    for (axis, target) in targets.iter().enumerate() {
        way.transform_axis(axis, target.clone())?;
    }
    Ok(way.moves)
}

/// The layout of a tensor during its moves, and the moves so far.
struct MoveBuilder<'a> {
    at: Arc<Spec>,
    varying: Axes,
    tracked: bool,
    targets: &'a [Target],
    vary: Axes,
    moves: Moves,
}

impl MoveBuilder<'_> {
    /// Returns whether the cuts of `dim` by the axes outside of `axis` still change: then no shard of `dim` can be made
    /// or kept on `axis`.
    fn misaligned(&self, axis: usize, dim: usize) -> bool {
        (0..axis).any(|outer| {
            let (now, then) = (self.is_cut(outer, dim), self.targets[outer].placement == Shard(dim));
            now != then || now && self.targets[outer].sizes.as_ref() != self.at.sizes(outer)
        })
    }

    fn is_cut(&self, axis: usize, dim: usize) -> bool {
        self.at.placements()[axis] == Shard(dim)
    }

    fn several_ranks(&self, axes: impl Iterator<Item = usize>) -> MovedAxes {
        axes.filter(|&axis| self.at.mesh().shape()[axis] > 1).collect()
    }

    /// Adds a move of `axes` to a layout.
    fn push(&mut self, (axes, step): (MovedAxes, Step), spec: Spec, varying: Axes, kept: bool) {
        let (bytes, received) = match step {
            Step::Identity | Step::ToVarying => (0, 0),
            _ => {
                let received =
                    table::received(&self.at, &axes, spec.placements()[axes[0]], spec.sizes(axes[0]));
                (table::bytes(&step, &self.at, &spec), received.unwrap_or(0))
            }
        };
        let spec = spec.shared();
        self.moves.push(Move { axes, step, spec: spec.clone(), varying, kept, bytes, received });
        (self.at, self.varying) = (spec, varying);
    }

    /// Changes one axis; all others stay as they are.
    fn transform_axis(&mut self, axis: usize, target: Target) -> Result<()> {
        let (bit, sum): (Axes, _) = (1 << axis, ReduceOp::Sum);
        let (from, to) = (self.at.placements()[axis], target.placement);
        if from == to && (from.shard_dim().is_none() || target.sizes.as_ref() == self.at.sizes(axis)) {
            self.view(axis);
            return Ok(());
        }
        if to != Replicate && matches!(from, Partial(op) if op != sum) {
            self.transform_axis(axis, Replicate.into())?;
            return self.transform_axis(axis, target);
        }
        let sized = target.sizes.is_some();
        let mut spec = Spec::clone(&self.at);
        spec.place(axis, to, target.sizes);
        let varying = self.varying & !bit;
        if self.at.mesh().shape()[axis] == 1 {
            self.push((smallvec![axis], Step::Identity), spec, varying, false);
            return Ok(());
        }
        if (from, to) == (Replicate, Partial(sum)) && self.at.dtype().is_int() {
            let reason = format!("no shares of {} on axis {axis}; only floats can become {to}", self.at);
            return Error::op("redistribute", reason);
        }
        let is_gathered = from.shard_dim().is_some() && to == Replicate;
        let varies = if is_gathered { self.vary & bit != 0 } else { self.varying & bit != 0 };
        let step = table::step(&self.at, &spec, &[axis], varies);
        let Some(step) = step.filter(|step| !self.tracked || step.transpose().is_some()) else {
            let fix = "partial placements are results of ops, and only sums of them carry a gradient on";
            let reason = format!("no way from {from} to {to} on axis {axis} of {}: {fix}", self.at);
            return Error::op("redistribute", reason);
        };
        let gathered = if is_gathered && varies { bit } else { 0 };
        let kept = gathered != 0 || from == Partial(sum) && !sized;
        self.push((smallvec![axis], step), spec, varying | gathered, kept);
        if from.is_partial() {
            self.view(axis);
        }
        Ok(())
    }

    /// Adds the view of a replicated axis whose gradient must become partial.
    fn view(&mut self, axis: usize) {
        let bit: Axes = 1 << axis;
        if self.at.placements()[axis] == Replicate
            && self.vary & bit != 0
            && self.tracked
            && self.varying & bit == 0
        {
            let spec = Spec::clone(&self.at);
            self.push((smallvec![axis], Step::ToVarying), spec, self.varying | bit, false);
        }
    }

    /// Moves several axes to their targets in one move; `varies` says whether a gathered whole is varying.
    fn transform_jointly(&mut self, axes: MovedAxes, to: Placement, varies: bool, varying: Axes) {
        let mut spec = Spec::clone(&self.at);
        axes.iter().for_each(|&axis| spec.place(axis, to, self.targets[axis].sizes.clone()));
        let kept = axes.iter().all(|&axis| self.targets[axis].sizes.is_none());
        if let Some(step) = table::step(&self.at, &spec, &axes, varies) {
            self.push((axes, step), spec, varying, kept);
        }
    }

    /// Gathers in one move the inner axes that shard a dim and become replicated.
    ///
    /// If the gradient is equal on all ranks, they are gathered axis by axis instead, because each axis may still need
    /// its view.
    fn gather_jointly(&mut self) {
        for dim in 0..self.at.dims().len() {
            let all: MovedAxes = (0..self.targets.len()).filter(|&axis| self.is_cut(axis, dim)).collect();
            let stays = |axis: &usize| self.targets[*axis].placement != Replicate;
            let kept = all.iter().rposition(stays).map_or(0, |last| last + 1);
            let axes = self.several_ranks(all[kept..].iter().copied());
            let bits = axes_of(&axes);
            if axes.len() < 2 || self.tracked && self.vary & bits != bits {
                continue;
            }
            let varying = self.varying | self.vary & bits;
            self.transform_jointly(axes, Replicate, self.tracked, varying);
        }
    }

    /// Reduces in one move the partial axes with the same target, unless their reductions differ.
    fn reduce_jointly(&mut self) {
        let mut partial = self.at.placements().iter().filter(|p| p.is_partial());
        let Some(&Partial(op)) = partial.next().filter(|first| partial.all(|p| p == *first)) else { return };
        for to in (0..self.at.dims().len()).map(Shard).chain([Replicate]) {
            let going = |axis: &usize| {
                self.at.placements()[*axis].is_partial() && self.targets[*axis].placement == to
            };
            let axes = self.several_ranks((0..self.targets.len()).filter(going));
            // Shards are cut from the outer axis inwards: other axes of the dim are already there, or follow further
            // in.
            let free =
                |axis: usize| match (self.at.placements()[axis] == to, self.targets[axis].placement == to) {
                    _ if axes.contains(&axis) => true,
                    (true, _) => axis < axes[0] && self.lies_on(axis),
                    (false, will_be) => !will_be || axes.iter().all(|&joint| joint < axis),
                };
            let sum = op == ReduceOp::Sum;
            match to {
                _ if axes.len() < 2 => {}
                Shard(_) if sum && (0..self.targets.len()).all(free) => {
                    self.transform_jointly(axes, to, false, self.varying);
                }
                Replicate if sum || !self.tracked => {
                    self.transform_jointly(axes, to, false, self.varying);
                }
                _ => {}
            }
        }
    }

    /// Returns whether an axis has its target placement, in its target sizes.
    fn lies_on(&self, axis: usize) -> bool {
        let target = &self.targets[axis];
        self.at.placements()[axis] == target.placement && self.at.sizes(axis) == target.sizes.as_ref()
    }
}
