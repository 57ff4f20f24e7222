//! How a parameter lies on the mesh.
use crate::layout::{Placement, Sizes};
use candle_core::DType;

/// An axis that shards a dim of a parameter.
#[derive(Debug, Clone)]
pub(super) struct AxisCut {
    pub(super) axis: usize,
    pub(super) dim: usize,
    /// The sizes of the shards; `None` means the default ones.
    pub(super) sizes: Option<Sizes>,
}

/// How a parameter lies on the mesh.
pub(super) struct ParameterPlace<'a> {
    /// The placement on the plan's axis.
    pub(super) placement: Placement,
    /// The axes that shard it beyond the plan.
    pub(super) cuts: &'a [AxisCut],
    /// The dtype, if it is not the builder's.
    pub(super) dtype: Option<DType>,
}

impl From<Placement> for ParameterPlace<'_> {
    fn from(placement: Placement) -> Self {
        Self { placement, cuts: &[], dtype: None }
    }
}
