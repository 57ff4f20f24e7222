//! Inference of the spec that produces given shards.
use super::ShardingSpec;
use super::chunk::ChunkShardingSpec;
use super::enumerable::EnumerableShardingSpec;
use super::shard_metadata::ShardMetadata;
use crate::Result;
use itertools::Itertools;

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
    let end = |dim: usize| shards.iter().map(|shard| shard.offsets[dim] + shard.sizes[dim]).max().unwrap_or(0);
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
    let placements = in_order().map(|shard| shard.rank().and(shard.placement.clone())).collect::<Option<_>>()?;
    let spec = ChunkShardingSpec::with_placements(dim as isize, placements).ok()?;
    let made = spec.build_metadata(dims).ok()?;
    made.iter().eq(in_order()).then_some(spec)
}
