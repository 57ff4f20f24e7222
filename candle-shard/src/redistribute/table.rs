//! The steps that change one or several axes, and the data that each sends: one table for both choosing and moving.
//!
//! | from | to | step | backward | bytes that a rank receives |
//! |---|---|---|---|---|
//! | `S(d)` | `R` invariant | all_gather | slice | (n - 1) pieces |
//! | `S(d)` | `R` varying | all_gather | reduce_scatter | (n - 1) pieces |
//! | `S(i)` | `S(j)` | all_to_all | all_to_all | (n - 1) / n of a piece |
//! | `S(d)` | `S(d)` in other sizes | all_to_all of the moving elements | the same | those elements |
//! | `S(d)` | `P(sum)` | zero-pad | slice | none |
//! | `R` invariant | `S(d)` | slice | all_gather | none |
//! | `R` varying | `S(d)` | slice | zero-pad | none |
//! | `P(sum)` | `R` | all_reduce | identity | 2 (n - 1) / n of the whole |
//! | `P(sum)` | `S(d)` | reduce_scatter | all_gather | (n - 1) / n of the whole |
//! | `R` | `P(sum)` | the first rank keeps it | identity | none |
//! | `R` invariant | `R` varying | identity | all_reduce | none |
//!
//! Reductions other than the sum become `R` first, and only without gradient.
use super::target::Target;
use crate::layout::{Partial, Placement, Replicate, Shard, Sizes, Spec, chunk_sizes};
use candle_dist::ReduceOp;
use candle_dist::backend::Dims;
use candle_dist::functional::Step;
use smallvec::SmallVec;

/// The axes of a move.
pub(super) type MovedAxes = SmallVec<[usize; 2]>;

/// Returns the step between two layouts that differ only on `axes`, where `varying` says whether a replicated gradient is
/// partial; `None` if there is none.
pub(super) fn step(from: &Spec, to: &Spec, axes: &[usize], varying: bool) -> Option<Step> {
    let cut = |spec: &Spec| {
        let dim = spec.placements()[axes[0]].shard_dim().unwrap_or(0);
        if let [axis] = *axes { spec.cut(axis, dim) } else { spec.joint_cut(axes, dim) }
    };
    Some(match (from.placements()[axes[0]], to.placements()[axes[0]]) {
        (Shard(_), Replicate) => Step::AllGather { cut: cut(from), varying },
        (Shard(i), Shard(j)) if i != j => Step::AllToAll { split: cut(to), concat: cut(from) },
        (Shard(_), Shard(_)) => Step::Recut { from: cut(from), to: cut(to) },
        (Shard(_), Partial(ReduceOp::Sum)) => Step::Pad(cut(from)),
        (Replicate, Shard(_)) => Step::Slice { cut: cut(to), varying },
        (Replicate, Partial(ReduceOp::Sum)) => Step::ToPartial { varying },
        (Partial(op), Replicate) => Step::AllReduce(op),
        (Partial(ReduceOp::Sum), Shard(_)) => Step::ReduceScatter(cut(to)),
        _ => return None,
    })
}

/// Returns the bytes that this rank passes to the collective of a step, as
/// [`comm::record`](candle_dist::comm::record) counts them.
pub(super) fn bytes(step: &Step, from: &Spec, to: &Spec) -> usize {
    let local: usize = from.local_shape().iter().product::<usize>() * from.dtype().size_in_bytes();
    match step {
        Step::Recut { from: pieces, .. } => {
            let (mine, then) = (from.local_block()[pieces.dim].clone(), to.local_block()[pieces.dim].clone());
            let stays = mine.end.min(then.end).saturating_sub(mine.start.max(then.start));
            local.checked_div(mine.len()).unwrap_or(0) * (mine.len() - stays)
        }
        step if step.communicates() => local,
        _ => 0,
    }
}

/// Returns the most bytes that a rank receives when `axes` change to a placement, equal on all ranks; `None` if there is no
/// such step. `sizes` are the new sizes of a shard.
pub(super) fn received(spec: &Spec, axes: &[usize], to: Placement, sizes: Option<&Sizes>) -> Option<usize> {
    let n: usize = axes.iter().map(|&axis| spec.mesh().shape()[axis]).product();
    let bytes = spec.local_bytes();
    Some(match (spec.placements()[axes[0]], to) {
        (Shard(_), Replicate) => bytes * (n - 1),
        (Shard(i), Shard(j)) if i != j => bytes * (n - 1) / n,
        (Shard(dim), Shard(_)) => {
            let len = spec.dims()[dim];
            let all = |sizes: Option<&Sizes>| {
                sizes.map_or_else(|| chunk_sizes(len, n), |sizes| Dims::from_slice(sizes))
            };
            // `bytes` is the size of the n-th part of the dim.
            let received = most_received(&all(spec.sizes(axes[0])), &all(sizes));
            (bytes * n).checked_div(len).unwrap_or(0) * received
        }
        (Shard(_) | Replicate, Partial(ReduceOp::Sum)) | (Replicate, Shard(_)) => 0,
        (Partial(_), Replicate) => 2 * bytes * (n - 1) / n,
        (Partial(ReduceOp::Sum), Shard(_)) => bytes * (n - 1) / n,
        _ => return None,
    })
}

/// Returns the cost of moving one axis to `to`, equal on all ranks; `None` if it is impossible.
///
/// The cost is the most bytes that a rank receives, now or later.
pub(crate) fn cost(spec: &Spec, axis: usize, to: &Target) -> Option<usize> {
    let (from, ranks) = (spec.placements()[axis], spec.mesh().shape()[axis]);
    let there = from == to.placement && (from.shard_dim().is_none() || to.sizes.as_ref() == spec.sizes(axis));
    if there || ranks == 1 {
        return Some(0);
    }
    match (from, to.placement) {
        (Replicate, Partial(_)) if spec.dtype().is_int() => None,
        // Nothing is sent, but the result is whole operands; the cost is that of their later reduction.
        (Shard(_), Partial(ReduceOp::Sum)) => Some(2 * spec.local_bytes() * (ranks - 1)),
        (_, to_placement) => received(spec, &[axis], to_placement, to.sizes.as_ref()),
    }
}

/// Returns the most elements of a dim that a rank receives from others when its pieces change their sizes.
fn most_received(from: &[usize], to: &[usize]) -> usize {
    let (mut a, mut b, mut most) = (0, 0, 0);
    for (&old, &new) in from.iter().zip(to) {
        let kept = (a + old).min(b + new).saturating_sub(a.max(b));
        most = most.max(new - kept);
        (a, b) = (a + old, b + new);
    }
    most
}
