//! A shard that this rank holds.
use crate::sharding_spec::{DeviceName, RemoteDevice, ShardMetadata};
use crate::{Error, Result};
use candle_core::Tensor;

/// A shard that this rank holds, with its place in the whole.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LocalShard {
    /// The elements.
    pub tensor: Tensor,
    /// Where they belong.
    pub metadata: ShardMetadata,
}

impl LocalShard {
    /// A shard of these elements.
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

    /// The shard of `rank` of the group that begins at `offsets`; sizes and device are the tensor's.
    ///
    /// # Errors
    /// If there are not as many offsets as the tensor has dims.
    pub fn from_tensor_and_offsets(tensor: Tensor, offsets: impl Into<Vec<usize>>, rank: usize) -> Result<Self> {
        let placement = RemoteDevice::at_rank(rank, DeviceName::kind_of(tensor.device()));
        let metadata = ShardMetadata::new(offsets, tensor.dims(), placement)?;
        Ok(Self { tensor, metadata })
    }
}
