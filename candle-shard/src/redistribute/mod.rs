//! Moves a tensor from one layout to another, gradient included.
//!
//! `table.rs` defines the steps and their costs; `moves.rs` orders them. They derive the moves of an op's spec or of
//! [`DTensor::redistribute`] only from the layouts; this file runs them.
//!
//! Gathers for varying uses and sums of partials are kept with a tracked tensor, so that several uses share them.
mod explained;
mod moves;
mod table;
mod target;
mod whole;

use crate::DTensor;
use crate::autograd::shared;
use crate::layout::{Axes, Placement, axes_of};
use crate::{Error, Result, explain};
use candle_dist::ProcessGroup;
use candle_dist::backend::called_from;
use candle_dist::functional::Step;
pub(crate) use explained::explained_input;
pub(crate) use moves::{Move, Moves, moves};
use smallvec::SmallVec;
use std::panic::Location;
pub(crate) use table::cost;
pub(crate) use target::{Target, Targets};

impl DTensor {
    /// Redistributes the tensor to another layout, with one placement per axis.
    ///
    /// Communicates only what the table of steps requires; if the tensor already has the layout, the call is free.
    ///
    /// # Errors
    /// If the placements do not fit the tensor, or the table of steps cannot produce a partial placement.
    #[track_caller]
    pub fn redistribute(&self, placements: &[Placement]) -> Result<Self> {
        self.spec().derive(placements, self.dims())?;
        let targets = placements.iter().map(|&p| Target::from(p)).collect::<Targets>();
        called_from(Location::caller(), || self.to_targets(&targets, 0))
    }

    /// Redistributes the tensor to the layout of `other`, whose dim `dim` has a multiple of its elements: each rank gets those that
    /// belong to its elements of `other`. So key heads get to the query heads that they serve.
    ///
    /// # Errors
    /// If the meshes or the numbers of dims differ, the sizes of `dim` are no multiple, or a rank has a part of the elements that belong to one
    /// of this tensor; if other dims cannot be distributed alike.
    ///
    /// ```
    /// use candle_core::{DType, Device::Cpu, Tensor};
    /// use candle_dist::World;
    /// use candle_shard::{DTensor, Replicate, Result, Shard};
    ///
    /// World::threads(2).run(|ctx| -> Result<()> {
    ///     let mesh = ctx.mesh(&[("tp", 2)])?;
    ///     let of = |heads: usize| Tensor::ones((1, heads, 3, 4), DType::F32, &Cpu);
    ///     let query = DTensor::distribute(&of(6)?, &mesh, &[Shard(1)])?.narrow(1, 0, 4)?; // 3 and 1 heads
    ///     let key = DTensor::distribute(&of(4)?, &mesh, &[Replicate])?.redistribute_with(&query, 1)?;
    ///     assert_eq!(key.to_local().dims()[1], [3, 1][ctx.rank()]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    #[track_caller]
    pub fn redistribute_with(&self, other: &Self, dim: usize) -> Result<Self> {
        const OP: &str = "redistribute_with";
        let wrong = || {
            let (own, of) = (self.spec(), other.spec());
            let want =
                "expected tensors of a mesh, and parts of a multiple of its elements that end between these";
            Error::op(OP, format!("{own} with dim {dim} of {of}: {want}"))
        };
        let sizes = (self.dims().get(dim), other.dims().get(dim));
        let fits = self.mesh() == other.mesh() && self.rank() == other.rank();
        let (Some(&own), Some(&of), true) = (sizes.0, sizes.1, fits) else { return wrong() };
        if own == 0 || !of.is_multiple_of(own) {
            return wrong();
        }
        let (mut targets, times) = (other.targets(), of / own);
        for (axis, target) in
            targets.iter_mut().enumerate().filter(|(_, at)| at.placement == Placement::Shard(dim))
        {
            let parts = &other.spec().cut(axis, dim).sizes;
            if parts.iter().any(|size| !size.is_multiple_of(times)) {
                return wrong();
            }
            *target = Target::shard(dim, &parts.iter().map(|size| size / times).collect::<Vec<_>>());
        }
        called_from(Location::caller(), || self.to_targets(&targets, 0))
    }

    /// Completes partial values: each `Partial` placement becomes `Replicate`, and other axes stay as they are, uneven sizes included.
    ///
    /// One reduction on each axis of partial values, and none without them.
    ///
    /// # Errors
    /// Those of the group.
    #[track_caller]
    pub fn resolve_partial(&self) -> Result<Self> {
        let resolved = |_, now: Placement| if now.is_partial() { Placement::Replicate } else { now };
        called_from(Location::caller(), || self.placed(resolved))
    }

    /// Redistributes each axis to the placement that `place` returns; unchanged axes keep their sizes.
    pub(crate) fn placed(&self, place: impl Fn(usize, Placement) -> Placement) -> Result<Self> {
        let target = |(axis, &now): (usize, &Placement)| {
            let placement = place(axis, now);
            let sizes = (placement == now).then(|| self.spec().sizes(axis).cloned()).flatten();
            Target { placement, sizes }
        };
        self.to_targets(&self.placements().iter().enumerate().map(target).collect::<Targets>(), 0)
    }

    /// Like [`redistribute`](Self::redistribute), but leaves the result's gradient partial on the axes `vary`.
    pub(crate) fn to_targets(&self, targets: &[Target], vary: Axes) -> Result<Self> {
        self.check_memory("redistribute")?;
        let moves = moves(self, targets, vary)?;
        if moves.is_empty() {
            return Ok(self.clone());
        }
        let mut explained = explain::open("redistribute");
        if let Some(explained) = &mut explained {
            explained.note([explained_input(self, &moves, 0)], moves.last().map(|last| &last.spec));
        }
        let moved = self.moved(&moves);
        if let Some(explained) = &mut explained {
            explained.laid_out();
        }
        moved
    }

    /// Runs these moves, which were derived for a tensor with the same layout.
    pub(crate) fn moved(&self, moves: &[Move]) -> Result<Self> {
        let mut now = self.clone();
        for next in moves {
            let axes = axes_of(&next.axes);
            let make = || {
                let group = now.described(now.group_of(&next.axes)?, axes);
                let local = next.step.apply(now.to_local(), &group)?;
                let made = Self::assemble(local, next.spec.clone(), next.varying).moved_from(&now, axes);
                Ok(match (&next.step, &next.axes[..]) {
                    (Step::AllGather { varying: false, .. }, &[axis]) => made.gathered_from(&now, axis),
                    _ => made,
                })
            };
            now = match next.step {
                Step::Identity => {
                    let renamed = Self::assemble(now.to_local().clone(), next.spec.clone(), next.varying);
                    renamed.made_locally_of(&now).aliasing(&now).moved_from(&now, axes)
                }
                Step::ToVarying => now.varying_view(next.axes[0])?,
                _ if next.kept => {
                    now.kept_move((axes, next.spec.placements()[next.axes[0]], next.varying), make)?
                }
                _ => make()?,
            };
        }
        Ok(now)
    }

    /// Returns the group of ranks whose coordinates differ only on these axes.
    pub(crate) fn group_of(&self, axes: &[usize]) -> Result<ProcessGroup> {
        if let [axis] = *axes {
            return Ok(self.mesh().axis_group(axis)?.clone());
        }
        let names: SmallVec<[&str; 3]> =
            axes.iter().map(|&axis| self.mesh().names()[axis].as_str()).collect();
        Ok(self.mesh().axes(&names)?.group()?.clone())
    }

    /// Returns a view of this replicated tensor for uses that differ among the ranks of an axis; its gradients are
    /// summed there.
    ///
    /// The view is kept, so several uses share one communication in the backward pass. If the tensor was gathered on
    /// this axis, its view replaces the gather's backward by the equivalent reduce_scatter.
    fn varying_view(&self, axis: usize) -> Result<Self> {
        let group = &self.described(self.mesh().axis_group(axis)?.clone(), 1 << axis);
        let varying = self.varying() | 1 << axis;
        let used = self.trail().and_then(|trail| trail.used.clone());
        if let Some((origin, axes)) = used.or_else(|| self.origin().map(|origin| (origin, 0))) {
            let axes = axes | 1 << axis;
            return Ok(self.used(shared::view(&origin, self.mesh(), axes)?, varying, (origin, axes)));
        }
        let local = self.view(varying, || {
            let gathered = self.trail().and_then(|trail| trail.gathered.as_ref());
            if let Some((source, _)) =
                gathered.filter(|(source, a)| *a == axis && source.varying() == self.varying())
            {
                let dim = source.placements()[axis].shard_dim().unwrap_or(0);
                let gather = Step::AllGather { cut: source.spec().cut(axis, dim), varying: true };
                return Ok(gather.with_known_result(source.to_local(), self.to_local(), group)?);
            }
            Ok(Step::ToVarying.apply(self.to_local(), group)?)
        })?;
        Ok(self.viewed(local, varying))
    }
}
