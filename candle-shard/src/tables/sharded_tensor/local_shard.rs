//! A shard on this rank.
use crate::tables::sharding_spec::{DeviceName, RemoteDevice, ShardMetadata};
use crate::{Error, Result};
use candle_core::Tensor;

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
            return Error::op(
                "LocalShard",
                format!("a tensor of shape {dims:?} for shard {metadata}; give that piece"),
            );
        }
        Ok(Self { tensor, metadata })
    }

    /// Creates a shard of `rank` of the group that begins at `offsets`, with the sizes and the device of the tensor.
    ///
    /// # Errors
    /// If the number of offsets is not the number of dims.
    pub fn from_tensor_and_offsets(tensor: Tensor, offsets: impl Into<Vec<usize>>, rank: usize) -> Result<Self> {
        let placement = RemoteDevice::at_rank(rank, DeviceName::kind_of(tensor.device()));
        let metadata = ShardMetadata::new(offsets, tensor.dims(), placement)?;
        Ok(Self { tensor, metadata })
    }
}
