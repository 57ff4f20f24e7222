//! Metadata of a sharded tensor, equal on every rank.
use crate::layout::{volume, whole};
use crate::tables::sharding_spec::{DeviceName, RemoteDevice, ShardMetadata, ShardingSpec};
use crate::{Error, Result};
use candle_core::{DType, Device};
use candle_dist::ProcessGroup;
use itertools::Itertools;
use std::fmt;
use std::sync::Arc;

/// A tensor's shards on all ranks, its global shape and its dtype; equal on every rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardedTensorMetadata {
    /// The shards of all ranks, in the order of the spec.
    pub shards: Vec<ShardMetadata>,
    /// The global shape.
    pub dims: Vec<usize>,
    /// The dtype.
    pub dtype: DType,
}

/// Metadata bound to a group: the placement of every shard names a rank of the group, and the shards cover the tensor.
#[derive(Debug)]
pub(crate) struct Layout {
    pub(super) metadata: ShardedTensorMetadata,
    pub(super) spec: ShardingSpec,
    pub(super) group: ProcessGroup,
}

impl Layout {
    pub(super) fn new(spec: ShardingSpec, dims: &[usize], dtype: DType, group: &ProcessGroup) -> Result<Arc<Self>> {
        spec.check(group.size())?;
        if volume(&whole(dims)).is_none() {
            let reason =
                format!("a tensor of shape {dims:?} has more elements than can be counted; give a smaller shape");
            return Error::op("ShardedTensor", reason);
        }
        let shards = spec.build_metadata(dims)?;
        let metadata = ShardedTensorMetadata { shards, dims: dims.to_vec(), dtype };
        Ok(Arc::new(Self { metadata, spec, group: group.clone() }))
    }

    /// Returns the same layout with another dtype.
    pub(super) fn with_dtype(&self, dtype: DType) -> Arc<Self> {
        let metadata = ShardedTensorMetadata { dtype, ..self.metadata.clone() };
        Arc::new(Self { metadata, spec: self.spec.clone(), group: self.group.clone() })
    }

    /// Returns the shards of a rank of the group, in the order of the spec.
    pub(super) fn shards_of(&self, rank: usize) -> impl Iterator<Item = &ShardMetadata> {
        self.metadata.shards.iter().filter(move |shard| shard.rank() == Some(rank))
    }

    /// Returns the shards of this rank.
    pub(super) fn mine(&self) -> impl Iterator<Item = &ShardMetadata> {
        self.shards_of(self.group.rank())
    }

    /// Checks that all placements name devices of this kind, and that those of this rank name this device.
    pub(super) fn check_device(&self, op: &'static str, device: &Device) -> Result<()> {
        let elsewhere = |shard: &&ShardMetadata| {
            let named = shard.placement.as_ref().map(RemoteDevice::device).unwrap_or_default();
            let mine = shard.rank() == Some(self.group.rank());
            named.kind() != DeviceName::kind_of(device) || (mine && !named.names(device))
        };
        match self.metadata.shards.iter().find(elsewhere) {
            Some(shard) => {
                let at = device.location();
                Error::op(op, format!("shard {shard} on {at:?}; move the tensor, or name this device in the placement"))
            }
            None => Ok(()),
        }
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ShardedTensorMetadata { dims, dtype, .. } = &self.metadata;
        write!(f, "{}[{}] in {}", dtype.as_str(), dims.iter().join(", "), self.spec)
    }
}
