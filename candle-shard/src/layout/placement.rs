//! Placements: how a tensor lies on one axis of a mesh.
use crate::{Error, Result};
use candle_dist::ReduceOp;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use smallvec::SmallVec;
use std::fmt;
use std::str::FromStr;

/// How a tensor lies on one axis of a mesh.
///
/// Text form, also in files: `S(0)`, `R` or `P(sum)`.
///
/// ```
/// use candle_shard::{Placement, Shard};
///
/// assert_eq!("S(1)".parse::<Placement>()?, Shard(1));
/// assert_eq!(Placement::PARTIAL_SUM.to_string(), "P(sum)");
/// # Ok::<(), candle_shard::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Placement {
    /// The ranks hold consecutive pieces of this dim.
    Shard(usize),
    /// Every rank holds the whole tensor.
    Replicate,
    /// Every rank holds an operand of this reduction; the tensor is its result.
    Partial(ReduceOp),
}

pub use Placement::{Partial, Replicate, Shard};

/// One placement per axis of a mesh, outermost first.
pub type Placements = SmallVec<[Placement; 3]>;

impl Placement {
    /// Partial sums, the usual result of a matmul over a sharded dim.
    pub const PARTIAL_SUM: Self = Partial(ReduceOp::Sum);

    /// Returns the sharded dim, if there is one.
    pub const fn shard_dim(self) -> Option<usize> {
        match self {
            Shard(dim) => Some(dim),
            _ => None,
        }
    }

    /// Returns whether ranks hold operands of a reduction.
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

impl FromStr for Placement {
    type Err = Error;

    /// Parses the output of [`Display`](fmt::Display).
    fn from_str(text: &str) -> Result<Self> {
        const REDUCTIONS: [ReduceOp; 5] =
            [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product];
        let shards =
            |dim: &str| dim.bytes().all(|b| b.is_ascii_digit()).then(|| dim.parse().ok().map(Shard))?;
        let reduces = |name: &str| REDUCTIONS.into_iter().find(|op| op.to_string() == name).map(Partial);
        let inside = |kind: &str| text.strip_prefix(kind)?.strip_prefix('(')?.strip_suffix(')');
        let plain = (text == "R").then_some(Replicate);
        plain.or_else(|| inside("S").and_then(shards)).or_else(|| inside("P").and_then(reduces)).ok_or_else(
            || {
                let reductions = REDUCTIONS.map(|op| format!("P({op})")).join(", ");
                Error::Layout(format!(
                    "{text:?} is not a placement; write R, S(dim), or a partial one, {reductions}"
                ))
            },
        )
    }
}

impl Serialize for Placement {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Placement {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}
