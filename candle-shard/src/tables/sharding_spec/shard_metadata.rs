//! Metadata of one shard: offsets, sizes and placement.
use super::remote_device::RemoteDevice;
use crate::layout::Block;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A block of a tensor: the global indices of its first element, its size in each dim, and its placement.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ShardMetadata {
    /// The global index of the first element, one per dim.
    pub offsets: Vec<usize>,
    /// The sizes, one per dim; zero for an empty shard.
    pub sizes: Vec<usize>,
    /// The rank and device that hold the shard.
    pub placement: Option<RemoteDevice>,
}

impl ShardMetadata {
    /// Creates a shard with as many offsets as sizes.
    ///
    /// ```
    /// use candle_shard::sharding_spec::{DeviceName, RemoteDevice, ShardMetadata};
    ///
    /// let right_half = ShardMetadata::new([0, 2], [4, 2], RemoteDevice::at_rank(1, DeviceName::Cpu))?;
    /// assert_eq!(right_half.rank(), Some(1));
    /// # Ok::<(), candle_shard::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the numbers of offsets and sizes differ, or an end of the shard overflows.
    pub fn new(
        offsets: impl Into<Vec<usize>>,
        sizes: impl Into<Vec<usize>>,
        placement: impl Into<Option<RemoteDevice>>,
    ) -> Result<Self> {
        let (offsets, sizes, placement) = (offsets.into(), sizes.into(), placement.into());
        let shard = Self { offsets, sizes, placement };
        shard.check()?;
        Ok(shard)
    }

    /// Runs the checks of [`new`](Self::new); the fields are public and may have changed since.
    pub(super) fn check(&self) -> Result<()> {
        let Self { offsets, sizes, .. } = self;
        if offsets.len() != sizes.len() {
            return Error::op(
                "ShardMetadata",
                format!("offsets {offsets:?} and sizes {sizes:?}; give one of each for every dim"),
            );
        }
        if offsets.iter().zip(sizes).any(|(offset, size)| offset.checked_add(*size).is_none()) {
            return Error::op(
                "ShardMetadata",
                format!("offsets {offsets:?} and sizes {sizes:?} overflow usize; give smaller ones"),
            );
        }
        Ok(())
    }

    /// Returns the rank of the group that holds the shard, if the placement names one.
    pub fn rank(&self) -> Option<usize> {
        self.placement.as_ref().and_then(RemoteDevice::rank)
    }

    /// Returns whether the shard has no elements.
    pub fn is_empty(&self) -> bool {
        self.sizes.contains(&0)
    }

    /// Returns the shard as one range of global indices per dim.
    pub(crate) fn block(&self) -> Block {
        self.offsets.iter().zip(&self.sizes).map(|(&at, &n)| at..at.saturating_add(n)).collect()
    }

    /// Creates a shard from a block.
    pub(crate) fn of_block(block: &Block, placement: RemoteDevice) -> Self {
        let (offsets, sizes) = block.iter().map(|range| (range.start, range.len())).unzip();
        Self { offsets, sizes, placement: Some(placement) }
    }
}

impl fmt::Display for ShardMetadata {
    /// Prints placement, offsets and sizes, for example `rank:1/cpu [0, 2] + [4, 2]`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.placement {
            Some(placement) => write!(f, "{placement} ")?,
            None => f.write_str("nobody ")?,
        }
        write!(f, "{:?} + {:?}", self.offsets, self.sizes)
    }
}
