//! Metadata of a sharded tensor, equal on every rank, and the shards of one rank.
use crate::layout::{volume, whole};
use crate::tables::sharding_spec::{DeviceName, RemoteDevice, ShardMetadata, ShardingSpec};
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use candle_dist::ProcessGroup;
use itertools::Itertools;
use std::fmt;
use std::ops::Range;
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

/// A shard on this rank, with its place in the whole tensor.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LocalShard {
    /// The elements.
    pub tensor: Tensor,
    /// Their place in the whole tensor.
    pub metadata: ShardMetadata,
}

impl LocalShard {
    /// Creates a shard with these elements.
    ///
    /// # Errors
    /// If the tensor does not have the shard's sizes.
    pub fn new(tensor: Tensor, metadata: ShardMetadata) -> Result<Self> {
        if tensor.dims() != metadata.sizes {
            let dims = tensor.dims();
            let reason = format!("a tensor of shape {dims:?} for shard {metadata}; give that piece");
            return Error::op("LocalShard", reason);
        }
        Ok(Self { tensor, metadata })
    }

    /// Creates a shard of `rank` of the group that begins at `offsets`, with the sizes and the device of the tensor.
    ///
    /// # Errors
    /// If the number of offsets is not the number of dims.
    pub fn from_tensor_and_offsets(
        tensor: Tensor,
        offsets: impl Into<Vec<usize>>,
        rank: usize,
    ) -> Result<Self> {
        let placement = RemoteDevice::at_rank(rank, DeviceName::kind_of(tensor.device()));
        let metadata = ShardMetadata::new(offsets, tensor.dims(), placement)?;
        Ok(Self { tensor, metadata })
    }
}

/// Metadata bound to a group: the placement of every shard names a rank of the group, and the shards cover the tensor.
#[derive(Debug)]
pub(crate) struct BoundMetadata {
    pub(super) metadata: ShardedTensorMetadata,
    pub(super) spec: ShardingSpec,
    pub(super) group: ProcessGroup,
}

impl BoundMetadata {
    pub(super) fn new(
        spec: ShardingSpec,
        dims: &[usize],
        dtype: DType,
        group: &ProcessGroup,
    ) -> Result<Arc<Self>> {
        spec.check(group.size())?;
        if volume(&whole(dims)).is_none() {
            let reason = format!(
                "a tensor of shape {dims:?} has more elements than can be counted; give a smaller shape"
            );
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

    /// Returns the dim that is cut, and each rank's part of it, which may be empty; the first dim if none is cut.
    ///
    /// # Errors
    /// The reason, if a rank holds several shards with elements, several dims are cut, or there is none.
    pub(super) fn parts(&self) -> Result<(usize, Vec<Range<usize>>), String> {
        let ShardedTensorMetadata { shards, dims, .. } = &self.metadata;
        let is_cut = |dim: &usize| shards.iter().any(|shard| shard.sizes[*dim] != dims[*dim]);
        let dim = match (0..dims.len()).filter(is_cut).collect_vec()[..] {
            [] if dims.is_empty() => return Err("a scalar, which has no dim to cut".into()),
            [] => 0,
            [dim] => dim,
            _ => return Err(format!("a tensor {dims:?} cut in several dims; reshard it to cut one")),
        };
        let mut parts = vec![0..0; self.group.size()];
        for shard in shards.iter().filter(|shard| !shard.is_empty()) {
            let Some(part) = shard.rank().and_then(|rank| parts.get_mut(rank)) else { continue };
            if part.start < part.end {
                return Err("several shards on a rank; reshard it to one shard each".into());
            }
            *part = shard.offsets[dim]..shard.offsets[dim] + shard.sizes[dim];
        }
        Ok((dim, parts))
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
                Error::op(
                    op,
                    format!("shard {shard} on {at:?}; move the tensor, or name this device in the placement"),
                )
            }
            None => Ok(()),
        }
    }
}

impl fmt::Display for BoundMetadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ShardedTensorMetadata { dims, dtype, .. } = &self.metadata;
        write!(f, "{}[{}] in {}", dtype.as_str(), dims.iter().join(", "), self.spec)
    }
}
