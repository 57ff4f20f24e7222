//! How a tensor lies along one axis of a mesh.
use candle_dist::ReduceOp;
use smallvec::SmallVec;
use std::fmt;

/// How a tensor lies along one axis of a mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Placement {
    /// The ranks hold consecutive pieces of this dim.
    Shard(usize),
    /// Every rank holds the whole.
    Replicate,
    /// Every rank holds an operand of this reduction; only the reduction is the tensor.
    Partial(ReduceOp),
}

pub use Placement::{Partial, Replicate, Shard};

/// One placement for each axis of a mesh, outermost first.
pub type Placements = SmallVec<[Placement; 3]>;

impl Placement {
    /// Partial sums, the usual outcome of a matmul over a sharded dim.
    pub const PARTIAL_SUM: Self = Partial(ReduceOp::Sum);

    /// The sharded dim, if there is one.
    pub const fn shard_dim(self) -> Option<usize> {
        match self {
            Shard(dim) => Some(dim),
            _ => None,
        }
    }

    /// Whether ranks hold operands of a reduction.
    pub const fn is_partial(self) -> bool {
        matches!(self, Partial(_))
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Shard(dim) => write!(f, "S({dim})"),
            Replicate => f.write_str("R"),
            Partial(op) => write!(f, "P({op})"),
        }
    }
}
