//! The transforms that change one or several axes, and the data that each sends: one table for both choosing and moving.
//!
//! | from | to | transform | backward | bytes that a rank receives |
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
use candle_core::Tensor;
use candle_dist::functional::Exchange;
use candle_dist::{ProcessGroup, ReduceOp};
use smallvec::SmallVec;

/// A row of the table.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Transform {
    /// Gathers pieces to the whole; `varying` is the kind of its gradient.
    Gather { varying: bool },
    /// Exchanges pieces of one dim for pieces of another.
    Swap,
    /// Changes the sizes of pieces.
    Recut,
    /// Pads a piece to an operand of a sum.
    Pad,
    /// Slices a piece out of the whole.
    Slice { varying: bool },
    /// Turns the whole into operands of a sum.
    Share { varying: bool },
    /// Reduces operands.
    Reduce(ReduceOp),
    /// Reduces operands of a sum to pieces of it.
    ReduceScatter,
}

impl Transform {
    /// Returns the row for one axis, where `varying` says whether a replicated gradient is partial; `None` if there is
    /// no row.
    pub(super) fn between(from: Placement, to: Placement, varying: bool) -> Option<Self> {
        Some(match (from, to) {
            (Shard(_), Replicate) => Self::Gather { varying },
            (Shard(i), Shard(j)) if i != j => Self::Swap,
            (Shard(_), Shard(_)) => Self::Recut,
            (Shard(_), Partial(ReduceOp::Sum)) => Self::Pad,
            (Replicate, Shard(_)) => Self::Slice { varying },
            (Replicate, Partial(ReduceOp::Sum)) => Self::Share { varying },
            (Partial(op), Replicate) => Self::Reduce(op),
            (Partial(ReduceOp::Sum), Shard(_)) => Self::ReduceScatter,
            _ => return None,
        })
    }

    /// Returns the name of the transform: that of its collective if it has one.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Gather { .. } => "all_gather",
            Self::Swap => "all_to_all",
            Self::Recut => "all_to_all_single",
            Self::Pad => "pad",
            Self::Slice { .. } => "slice",
            Self::Share { .. } => "share",
            Self::Reduce(_) => "all_reduce",
            Self::ReduceScatter => "reduce_scatter",
        }
    }

    /// Returns whether ranks send data to each other.
    pub(super) fn communicates(self) -> bool {
        !matches!(self, Self::Pad | Self::Slice { .. } | Self::Share { .. })
    }

    /// Returns the exchange that moves a local tensor between two layouts that differ only on `axes`; `None` for
    /// reductions without a gradient.
    pub(super) fn exchange(self, from: &Spec, to: &Spec, axes: &[usize]) -> Option<Exchange> {
        let cut = |spec: &Spec| {
            let dim = spec.placements()[axes[0]].shard_dim().unwrap_or(0);
            if let [axis] = *axes { spec.cut(axis, dim) } else { spec.joint_cut(axes, dim) }
        };
        Some(match self {
            Self::Gather { varying: true } => Exchange::all_gather(cut(from)),
            Self::Gather { varying: false } => Exchange::all_gather_invariant(cut(from)),
            Self::Swap => Exchange::all_to_all(cut(to), cut(from)),
            Self::Recut => Exchange::recut(cut(from), cut(to)),
            Self::Pad => Exchange::zero_pad(cut(from)),
            Self::Slice { varying: true } => Exchange::slice_varying(cut(to)),
            Self::Slice { varying: false } => Exchange::slice(cut(to)),
            Self::Share { varying: true } => Exchange::to_partial_varying(),
            Self::Share { varying: false } => Exchange::to_partial(),
            Self::Reduce(ReduceOp::Sum) => Exchange::all_reduce(),
            Self::Reduce(_) => return None,
            Self::ReduceScatter => Exchange::reduce_scatter(cut(to)),
        })
    }

    /// Moves a local tensor with the [`exchange`](Self::exchange).
    pub(super) fn run(
        self,
        x: &Tensor,
        (from, to): (&Spec, &Spec),
        axes: &[usize],
        group: &ProcessGroup,
    ) -> candle_dist::Result<Tensor> {
        match (self, self.exchange(from, to, axes)) {
            (Self::Reduce(op), None) => group.all_reduce(x, op),
            (_, exchange) => exchange.map_or_else(|| Ok(x.clone()), |exchange| exchange.apply(x, group)),
        }
    }

    /// Returns the bytes that this rank passes to its collective, as [`comm::record`](candle_dist::comm::record) counts
    /// them.
    pub(super) fn bytes(self, from: &Spec, to: &Spec, axes: &[usize]) -> usize {
        let local = |spec: &Spec| spec.local_shape().iter().product::<usize>() * spec.dtype().size_in_bytes();
        match self {
            _ if !self.communicates() => 0,
            Self::Recut => {
                let dim = from.placements()[axes[0]].shard_dim().unwrap_or(0);
                let (mine, then) = (from.local_block()[dim].clone(), to.local_block()[dim].clone());
                let stays = mine.end.min(then.end).saturating_sub(mine.start.max(then.start));
                local(from).checked_div(mine.len()).unwrap_or(0) * (mine.len() - stays)
            }
            _ => local(from),
        }
    }

    /// Returns the most bytes that a rank receives when `axes` change, equal on all ranks; `sizes` are the new sizes of
    /// a recut.
    pub(super) fn received(self, from: &Spec, axes: &[usize], sizes: Option<&Sizes>) -> usize {
        let (n, bytes) = (axes.iter().map(|&axis| from.mesh().shape()[axis]).product::<usize>(), from.local_bytes());
        match self {
            Self::Pad | Self::Slice { .. } | Self::Share { .. } => 0,
            Self::Gather { .. } => bytes * (n - 1),
            Self::Swap | Self::ReduceScatter => bytes * (n - 1) / n,
            Self::Reduce(_) => 2 * bytes * (n - 1) / n,
            Self::Recut => {
                let dim = from.placements()[axes[0]].shard_dim().unwrap_or(0);
                let len = from.dims()[dim];
                let all = |sizes: Option<&Sizes>| {
                    sizes.map_or_else(|| chunk_sizes(len, n), |sizes| candle_dist::backend::Dims::from_slice(sizes))
                };
                // `bytes` is the size of the n-th part of the dim.
                let received = most_received(&all(from.sizes(axes[0])), &all(sizes));
                (bytes * n).checked_div(len).unwrap_or(0) * received
            }
        }
    }
}

/// Returns the cost of moving one axis to `to`, equal on all ranks; `None` if it is impossible.
///
/// The cost is the most bytes that a rank receives, now or later.
pub(crate) fn cost(spec: &Spec, axis: usize, to: &Target) -> Option<usize> {
    let from = spec.placements()[axis];
    let there = from == to.placement && (from.shard_dim().is_none() || to.sizes.as_ref() == spec.sizes(axis));
    if there || spec.mesh().shape()[axis] == 1 {
        return Some(0);
    }
    let transform = Transform::between(from, to.placement, false)?;
    match transform {
        Transform::Share { .. } if spec.dtype().is_int() => None,
        // Nothing is sent, but the result is whole operands; the cost is that of their later reduction.
        Transform::Pad => Some(2 * spec.local_bytes() * (spec.mesh().shape()[axis] - 1)),
        transform => Some(transform.received(spec, &[axis], to.sizes.as_ref())),
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

/// The axes of a move.
pub(super) type MovedAxes = SmallVec<[usize; 2]>;
