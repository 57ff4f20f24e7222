//! Specs that say which ranks hold which blocks of a tensor: chunks of a dim, or a list of blocks.
//!
//! These are PyTorch's sharding specs. They name ranks instead of mesh axes. So chunks may lie in any order, on only
//! some ranks of a group, or several on one rank. A [`ShardedTensor`](crate::ShardedTensor) has such a spec.
mod chunk;
mod enumerable;
mod infer;
mod remote_device;
mod shard_metadata;

pub use chunk::{ChunkShardingSpec, get_chunk_sharding_params, get_chunked_dim_size, get_split_size};
pub use enumerable::EnumerableShardingSpec;
pub use infer::infer_sharding_spec_from_shards_metadata;
pub use remote_device::{DeviceName, RemoteDevice};
pub use shard_metadata::ShardMetadata;

use crate::Result;
use std::fmt;

/// How a tensor is cut, and which ranks hold the pieces.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum ShardingSpec {
    /// One dim in chunks of `ceil(n / k)`.
    Chunk(ChunkShardingSpec),
    /// Any blocks.
    Enumerable(EnumerableShardingSpec),
}

impl ShardingSpec {
    /// Returns the shards of a tensor of this shape.
    ///
    /// # Errors
    /// If the spec cannot cut a tensor of this shape.
    pub fn build_metadata(&self, dims: &[usize]) -> Result<Vec<ShardMetadata>> {
        match self {
            Self::Chunk(spec) => spec.build_metadata(dims),
            Self::Enumerable(spec) => {
                spec.check_tensor(dims)?;
                Ok(spec.shards().to_vec())
            }
        }
    }

    /// Checks that all placements name ranks of a group of `group_size` ranks, and that chunks lie on different ranks.
    ///
    /// # Errors
    /// If a placement names no rank or one outside the group, or a rank holds two chunks.
    pub fn check(&self, group_size: usize) -> Result<()> {
        match self {
            Self::Chunk(spec) => spec.check(group_size),
            Self::Enumerable(spec) => spec.check(group_size),
        }
    }

    /// Returns the same shards on other devices of the same ranks.
    pub(crate) fn on(&self, device: DeviceName) -> Result<Self> {
        Ok(match self {
            Self::Chunk(spec) => {
                let placements = spec.placements().iter().map(|placement| placement.clone().on(device)).collect();
                ChunkShardingSpec::with_placements(spec.dim(), placements)?.into()
            }
            Self::Enumerable(spec) => {
                let mut shards = spec.shards().to_vec();
                for shard in &mut shards {
                    shard.placement = shard.placement.take().map(|placement| placement.on(device));
                }
                EnumerableShardingSpec::new(shards)?.into()
            }
        })
    }
}

impl fmt::Display for ShardingSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Chunk(spec) => spec.fmt(f),
            Self::Enumerable(spec) => spec.fmt(f),
        }
    }
}

/// Conversions from owned and borrowed specs of either kind.
macro_rules! from {
    ($($kind:ident($spec:ty)),+) => {$(
        impl From<$spec> for ShardingSpec {
            fn from(spec: $spec) -> Self {
                Self::$kind(spec)
            }
        }

        impl From<&$spec> for ShardingSpec {
            fn from(spec: &$spec) -> Self {
                Self::$kind(spec.clone())
            }
        }
    )+};
}

from!(Chunk(ChunkShardingSpec), Enumerable(EnumerableShardingSpec));

impl From<&ShardingSpec> for ShardingSpec {
    fn from(spec: &ShardingSpec) -> Self {
        spec.clone()
    }
}
