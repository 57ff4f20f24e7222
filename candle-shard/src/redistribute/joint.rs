//! Several axes changed by one collective over all of their ranks, where all change alike.
use super::Target;
use crate::dtensor::Axes;
use crate::placement::{Partial, Placement, Replicate, Shard};
use crate::{DTensor, Result};
use candle_core::Tensor;
use candle_dist::functional::Exchange;
use candle_dist::{ProcessGroup, ReduceOp};

impl DTensor {
    /// This tensor with the inner axes that shard a dim and become replicated gathered at once.
    ///
    /// A gradient that is the same on all ranks goes axis by axis instead: each axis may yet have its view.
    pub(super) fn gathered_jointly(&self, targets: &[Target], vary: Axes) -> Result<Self> {
        let mut at = self.clone();
        for dim in 0..self.rank() {
            let all: Vec<usize> = at.sharded_axes(dim).collect();
            let kept = all.iter().rposition(|&axis| targets[axis].placement != Replicate).map_or(0, |last| last + 1);
            let axes = at.with_several_ranks(&all[kept..]);
            let bits = bits(&axes);
            if axes.len() < 2 || at.tracked() && vary & bits != bits {
                continue;
            }
            let cut = at.spec().joint_cut(&axes, dim);
            let exchange = if at.tracked() { Exchange::all_gather(cut) } else { Exchange::all_gather_invariant(cut) };
            at = at.joint_step((&axes, Replicate), targets, at.varying() | vary & bits, |x, group| {
                Ok(exchange.apply(x, group)?)
            })?;
        }
        Ok(at)
    }

    /// This tensor with the partial axes that go to one placement reduced at once, unless they differ in kind.
    pub(super) fn reduced_jointly(&self, targets: &[Target]) -> Result<Self> {
        let mut partial = self.placements().iter().filter(|p| p.is_partial());
        let Some(&Partial(op)) = partial.next().filter(|first| partial.all(|p| p == *first)) else {
            return Ok(self.clone());
        };
        let mut at = self.clone();
        for to in (0..self.rank()).map(Shard).chain([Replicate]) {
            let going = |&axis: &usize| at.placements()[axis].is_partial() && targets[axis].placement == to;
            let axes = at.with_several_ranks(&(0..targets.len()).filter(going).collect::<Vec<_>>());
            // Shards are made from the outer axis inwards: others of the dim are there already or will be further in.
            let free = |axis: usize| match (at.placements()[axis] == to, targets[axis].placement == to) {
                _ if axes.contains(&axis) => true,
                (true, _) => axis < axes[0] && at.lies_on(axis, &targets[axis]),
                (false, will_be) => !will_be || axes.iter().all(|&joint| joint < axis),
            };
            let sum = op == ReduceOp::Sum;
            at = match to {
                _ if axes.len() < 2 => continue,
                Shard(dim) if sum && (0..targets.len()).all(free) => {
                    at.joint_step((&axes, to), targets, at.varying(), |x, group| {
                        let mut spec = at.spec().clone();
                        axes.iter().for_each(|&axis| spec.place(axis, to, targets[axis].sizes.clone()));
                        Ok(Exchange::reduce_scatter(spec.joint_cut(&axes, dim)).apply(x, group)?)
                    })?
                }
                Replicate if sum => at.joint_step((&axes, to), targets, at.varying(), |x, group| {
                    Ok(Exchange::all_reduce().apply(x, group)?)
                })?,
                Replicate if !at.tracked() => {
                    at.joint_step((&axes, to), targets, 0, |x, group| Ok(group.all_reduce(x, op)?))?
                }
                _ => continue,
            };
        }
        Ok(at)
    }

    /// Moves all of `axes` to one placement by `exchange`, which is kept for further uses where the sizes are default.
    fn joint_step(
        &self,
        (axes, to): (&[usize], Placement),
        targets: &[Target],
        varying: Axes,
        exchange: impl FnOnce(&Tensor, &ProcessGroup) -> Result<Tensor>,
    ) -> Result<Self> {
        let mut spec = self.spec().clone();
        axes.iter().for_each(|&axis| spec.place(axis, to, targets[axis].sizes.clone()));
        let default = axes.iter().all(|&axis| targets[axis].sizes.is_none());
        let make = || {
            let names: Vec<&str> = axes.iter().map(|&axis| self.mesh().names()[axis].as_str()).collect();
            let local = exchange(self.to_local(), self.mesh().axes(&names)?.group()?)?;
            Ok(Self::assemble(local, spec.shared(), varying))
        };
        if default { self.kept_step((bits(axes), to, varying), make) } else { make() }
    }

    /// Whether an axis is where `target` wants it, in its sizes.
    fn lies_on(&self, axis: usize, target: &Target) -> bool {
        self.placements()[axis] == target.placement && self.spec().sizes(axis) == target.sizes.as_ref()
    }

    fn with_several_ranks(&self, axes: &[usize]) -> Vec<usize> {
        axes.iter().copied().filter(|&axis| self.mesh().shape()[axis] > 1).collect()
    }
}

fn bits(axes: &[usize]) -> Axes {
    axes.iter().map(|axis| 1 << axis).sum()
}
