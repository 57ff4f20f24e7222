//! Specs that say which ranks hold which blocks of a tensor: chunks of a dim, or a list of blocks.
//!
//! These are PyTorch's sharding specs. They name ranks instead of mesh axes. So chunks may lie in any order, on only
//! some ranks of a group, or several on one rank. A [`ShardedTensor`](crate::ShardedTensor) has such a spec.
mod chunk;
mod enumerable;
mod remote_device;
mod shard_metadata;

pub use chunk::{ChunkShardingSpec, get_chunk_sharding_params, get_chunked_dim_size, get_split_size};
pub use enumerable::EnumerableShardingSpec;
pub use remote_device::{DeviceName, RemoteDevice};
pub use shard_metadata::ShardMetadata;

use crate::Result;
use itertools::Itertools;
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
                let placements =
                    spec.placements().iter().map(|placement| placement.clone().on(device)).collect();
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

/// Returns the spec that produces these shards: chunks if they are the chunks of a dim on different ranks, else the
/// list.
///
/// If several dims fit, the first one is used. Empty chunks keep the order of the list.
///
/// # Errors
/// The errors of [`EnumerableShardingSpec::new`].
///
/// ```
/// use candle_shard::sharding_spec::{ChunkShardingSpec, ShardingSpec, infer_sharding_spec_from_shards_metadata};
///
/// let spec = ChunkShardingSpec::on_ranks(0, [1, 0])?;
/// let inferred = infer_sharding_spec_from_shards_metadata(&spec.build_metadata(&[5, 2])?)?;
/// assert_eq!(inferred, ShardingSpec::Chunk(spec));
/// # Ok::<(), candle_shard::Error>(())
/// ```
pub fn infer_sharding_spec_from_shards_metadata(shards: &[ShardMetadata]) -> Result<ShardingSpec> {
    let listed = EnumerableShardingSpec::new(shards.to_vec())?;
    let ndim = shards[0].sizes.len();
    let end =
        |dim: usize| shards.iter().map(|shard| shard.offsets[dim] + shard.sizes[dim]).max().unwrap_or(0);
    let dims: Vec<usize> = (0..ndim).map(end).collect();
    let chunked = (0..ndim).find_map(|dim| chunks_of(dim, &dims, shards));
    Ok(chunked.map_or(ShardingSpec::Enumerable(listed), ShardingSpec::Chunk))
}

/// Returns the chunks of `dim` that produce these shards, if there are such.
fn chunks_of(dim: usize, dims: &[usize], shards: &[ShardMetadata]) -> Option<ChunkShardingSpec> {
    if !shards.iter().map(ShardMetadata::rank).all_unique() {
        return None;
    }
    let in_order = || shards.iter().sorted_by_key(|shard| shard.offsets[dim]);
    let placements =
        in_order().map(|shard| shard.rank().and(shard.placement.clone())).collect::<Option<_>>()?;
    let spec = ChunkShardingSpec::with_placements(dim as isize, placements).ok()?;
    let made = spec.build_metadata(dims).ok()?;
    made.iter().eq(in_order()).then_some(spec)
}
