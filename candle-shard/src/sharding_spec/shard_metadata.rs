//! One shard: where it begins, how large it is, who holds it.
use super::block::Block;
use super::remote_device::RemoteDevice;
use crate::{Error, Result};
use std::fmt;

/// A block of a tensor: the global indices where it begins, its size in each dim, and who holds it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct ShardMetadata {
    /// The global index of the first element, one a dim.
    pub offsets: Vec<usize>,
    /// The size, one a dim; zero for a shard without elements.
    pub sizes: Vec<usize>,
    /// Who holds it.
    pub placement: Option<RemoteDevice>,
}

impl ShardMetadata {
    /// A shard with as many offsets as sizes.
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
    /// If there are not as many offsets as sizes, or a shard would end beyond what can be counted.
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

    /// What [`new`](Self::new) checks; the fields may have changed since.
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
                format!("offsets {offsets:?} and sizes {sizes:?} end beyond what can be counted; give smaller ones"),
            );
        }
        Ok(())
    }

    /// The rank of the group that holds the shard, if the placement names one.
    pub fn rank(&self) -> Option<usize> {
        self.placement.as_ref().and_then(RemoteDevice::rank)
    }

    /// Whether the shard has no elements.
    pub fn is_empty(&self) -> bool {
        self.sizes.contains(&0)
    }

    /// The shard as one range of global indices per dim.
    pub(crate) fn block(&self) -> Block {
        self.offsets.iter().zip(&self.sizes).map(|(&at, &n)| at..at.saturating_add(n)).collect()
    }

    /// A shard with elements of these indices.
    pub(crate) fn of_block(block: &Block, placement: RemoteDevice) -> Self {
        let (offsets, sizes) = block.iter().map(|range| (range.start, range.len())).unzip();
        Self { offsets, sizes, placement: Some(placement) }
    }
}

impl fmt::Display for ShardMetadata {
    /// For example `rank:1/cpu [0, 2] + [4, 2]`: placement, offsets, sizes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.placement {
            Some(placement) => write!(f, "{placement} ")?,
            None => f.write_str("nobody ")?,
        }
        write!(f, "{:?} + {:?}", self.offsets, self.sizes)
    }
}
