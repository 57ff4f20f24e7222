//! The rows of an op: which placements of the inputs give which placement of the output.
use crate::layout::Placement;
use candle_core::DType;
use candle_dist::backend::Dims;
use smallvec::{SmallVec, smallvec};

/// One way to run an op on one axis: the placements of the inputs, and the resulting placement of the output.
#[derive(Debug, Clone, PartialEq)]
pub struct ShardingRule {
    pub(crate) out: Placement,
    pub(crate) ins: SmallVec<[Placement; 3]>,
}

/// The former name of [`ShardingRule`].
#[deprecated(since = "0.1.0", note = "renamed to ShardingRule")]
pub type Row = ShardingRule;

/// The rows of an op, made with `ShardingRules::from_iter` or `collect`. Among rows that move the same bytes, the first one
/// wins.
pub type ShardingRules = SmallVec<[ShardingRule; 8]>;

/// The former name of [`ShardingRules`].
#[deprecated(since = "0.1.0", note = "renamed to ShardingRules")]
pub type Rows = ShardingRules;

impl ShardingRule {
    /// Creates a row: the output is `out` if the inputs are placed as `ins`, one placement per input.
    pub fn new(out: Placement, ins: &[Placement]) -> Self {
        Self { out, ins: SmallVec::from_slice(ins) }
    }
}

/// The rows of an op, and the shapes and dtypes of its outputs.
#[derive(Debug, Clone)]
pub struct Signature {
    pub(crate) rows: ShardingRules,
    /// Global shape and dtype of each output; all have the placement of the row.
    pub(super) outs: SmallVec<[(Dims, DType); 1]>,
    /// The dim of the outputs that has another size than the one of the inputs that it is sharded with.
    pub(super) resized: Option<usize>,
}

impl Signature {
    /// Creates a signature with these rows and one output of this global shape.
    pub fn new(rows: ShardingRules, shape: &[usize], dtype: DType) -> Self {
        Self { rows, outs: smallvec![(Dims::from_slice(shape), dtype)], resized: None }
    }

    /// Says that a dim of the outputs has another size than that of the inputs, so that its shards have the default sizes.
    pub(crate) fn resized(self, dim: usize) -> Self {
        Self { resized: Some(dim), ..self }
    }

    /// Adds an output with the layout of the first one.
    pub fn and(mut self, shape: &[usize], dtype: DType) -> Self {
        self.outs.push((Dims::from_slice(shape), dtype));
        self
    }
}
