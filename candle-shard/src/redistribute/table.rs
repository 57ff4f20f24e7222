//! The steps by which one or several axes change, and what each sends: the one table for moving and for planning.
//!
//! | from | to | step | backward | bytes that a rank receives |
//! |---|---|---|---|---|
//! | `S(d)` | `R` invariant | all_gather | slice | (n - 1) pieces |
//! | `S(d)` | `R` varying | all_gather | reduce_scatter | (n - 1) pieces |
//! | `S(i)` | `S(j)` | all_to_all | all_to_all | (n - 1) / n of a piece |
//! | `S(d)` | `S(d)` in other sizes | all_to_all of what changes hands | the same | that |
//! | `S(d)` | `P(sum)` | zero-pad | slice | none |
//! | `R` invariant | `S(d)` | slice | all_gather | none |
//! | `R` varying | `S(d)` | slice | zero-pad | none |
//! | `P(sum)` | `R` | all_reduce | identity | 2 (n - 1) / n of the whole |
//! | `P(sum)` | `S(d)` | reduce_scatter | all_gather | (n - 1) / n of the whole |
//! | `R` | `P(sum)` | the first rank keeps it | identity | none |
//! | `R` invariant | `R` varying | identity | all_reduce | none |
//!
//! Reductions other than the sum become `R` first, and only without gradient.
use super::Target;
use crate::placement::{Partial, Placement, Replicate, Shard};
use crate::spec::{Sizes, Spec, chunk_sizes};
use candle_core::Tensor;
use candle_dist::functional::Exchange;
use candle_dist::{ProcessGroup, ReduceOp};
use smallvec::SmallVec;

/// A row of the table.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Kind {
    /// Pieces to the whole; `varying` says what its gradient is.
    Gather { varying: bool },
    /// Pieces of one dim to pieces of another.
    Swap,
    /// Pieces to pieces of other sizes.
    Recut,
    /// A piece to an operand of a sum.
    Pad,
    /// The whole to a piece.
    Slice { varying: bool },
    /// The whole to operands of a sum.
    Share { varying: bool },
    /// Operands to their reduction.
    Reduce(ReduceOp),
    /// Operands of a sum to pieces of it.
    ReduceScatter,
}

impl Kind {
    /// The row for one axis, whose gradient is partial where it is replicated and `varying`; `None` if there is none.
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

    /// What it is called, after its collective where it has one.
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

    /// Whether ranks send anything to each other.
    pub(super) fn communicates(self) -> bool {
        !matches!(self, Self::Pad | Self::Slice { .. } | Self::Share { .. })
    }

    /// What moves a local tensor from one layout to another that differs on `axes` alone; `None` for reductions that
    /// have no gradient.
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

    /// Moves a local tensor as [`exchange`](Self::exchange) says.
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

    /// The bytes that this rank hands to its collective, the measure of [`comm::record`](candle_dist::comm::record).
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

    /// The bytes that a rank receives at most, equal on all ranks, where `axes` change; `sizes` are those of a recut.
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
                // `bytes` are those of the n-th part of the dim.
                let received = most_received(&all(from.sizes(axes[0])), &all(sizes));
                (bytes * n).checked_div(len).unwrap_or(0) * received
            }
        }
    }
}

/// What planning counts where one axis goes to `to`, equal on all ranks; `None` if there is no way.
///
/// These are the bytes that a rank receives at most, now or later.
pub(crate) fn cost(spec: &Spec, axis: usize, to: &Target) -> Option<usize> {
    let from = spec.placements()[axis];
    let there = from == to.placement && (from.shard_dim().is_none() || to.sizes.as_ref() == spec.sizes(axis));
    if there || spec.mesh().shape()[axis] == 1 {
        return Some(0);
    }
    let kind = Kind::between(from, to.placement, false)?;
    match kind {
        Kind::Share { .. } if spec.dtype().is_int() => None,
        // Nothing is sent, but whole operands are left, which somebody must add up: that is its price.
        Kind::Pad => Some(2 * spec.local_bytes() * (spec.mesh().shape()[axis] - 1)),
        kind => Some(kind.received(spec, &[axis], to.sizes.as_ref())),
    }
}

/// The most elements of a dim that a rank gets from others where its pieces change their sizes.
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
