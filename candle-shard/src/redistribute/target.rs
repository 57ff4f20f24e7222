//! The layout that a tensor is to have, axis by axis.
use crate::DTensor;
use crate::layout::{Placement, Shard, Sizes, chunk_sizes};
use smallvec::SmallVec;

/// The target of one axis: a placement, with explicit sizes where they are not the default ones.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Target {
    pub(crate) placement: Placement,
    pub(crate) sizes: Option<Sizes>,
}

pub(crate) type Targets = SmallVec<[Target; 3]>;

impl Target {
    /// Creates a shard target with explicit sizes, or without if they are the default ones.
    pub(crate) fn shard(dim: usize, sizes: &[usize]) -> Self {
        let default = chunk_sizes(sizes.iter().sum(), sizes.len());
        Self { placement: Shard(dim), sizes: (sizes[..] != default[..]).then(|| sizes.into()) }
    }
}

impl From<Placement> for Target {
    fn from(placement: Placement) -> Self {
        Self { placement, sizes: None }
    }
}

impl DTensor {
    /// Returns the current placement and sizes of each axis.
    pub(crate) fn targets(&self) -> Targets {
        let here = |(axis, &placement)| Target { placement, sizes: self.spec().sizes(axis).cloned() };
        self.placements().iter().enumerate().map(here).collect()
    }
}
