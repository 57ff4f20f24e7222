//! Specs that cut one dim into pieces of `ceil(n / k)`, on any ranks in any order.
use super::remote_device::{DeviceName, RemoteDevice, check_ranks};
use super::shard_metadata::ShardMetadata;
use crate::{Error, Result};
use itertools::Itertools;
use std::fmt;

/// Returns the size of all chunks except the last ones: `ceil(n / chunks)`.
///
/// ```
/// assert_eq!(candle_shard::sharding_spec::get_split_size(13, 4), 4);
/// ```
pub fn get_split_size(n: usize, chunks: usize) -> usize {
    n.div_ceil(chunks.max(1))
}

/// Returns the size of chunk `idx` of a dim of size `n` that is cut every `split` elements; zero beyond the end of the
/// dim.
///
/// ```
/// assert_eq!(candle_shard::sharding_spec::get_chunked_dim_size(13, 4, 3), 1);
/// ```
pub fn get_chunked_dim_size(n: usize, split: usize, idx: usize) -> usize {
    split.min(n.saturating_sub(split.saturating_mul(idx)))
}

/// Returns the start and the size of the chunk of `rank` in a dim of size `n`; `world` is the number of chunks.
///
/// # Errors
/// If `world` is not the number of the spec's placements, or no placement names this rank.
///
/// ```
/// use candle_shard::sharding_spec::{ChunkShardingSpec, get_chunk_sharding_params};
///
/// let spec = ChunkShardingSpec::on_ranks(0, [3, 2, 1, 0])?;
/// assert_eq!(get_chunk_sharding_params(21, 4, &spec, 1)?, (12, 6));
/// # Ok::<(), candle_shard::Error>(())
/// ```
pub fn get_chunk_sharding_params(
    n: usize,
    world: usize,
    spec: &ChunkShardingSpec,
    rank: usize,
) -> Result<(usize, usize)> {
    const OP: &str = "get_chunk_sharding_params";
    let chunks = spec.placements.len();
    if world != chunks {
        return Error::op(OP, format!("{world} chunks of {spec}, which has {chunks}; give that number"));
    }
    match spec.placements.iter().position(|placement| placement.rank() == Some(rank)) {
        Some(idx) => Ok(piece(n, chunks, idx)),
        None => Error::op(OP, format!("rank {rank} holds no chunk of {spec}; give one of its ranks")),
    }
}

/// Returns start and size of a chunk. Empty chunks begin at the end of the dim.
fn piece(n: usize, chunks: usize, idx: usize) -> (usize, usize) {
    let split = get_split_size(n, chunks);
    (split.saturating_mul(idx).min(n), get_chunked_dim_size(n, split, idx))
}

/// A spec that cuts one dim into chunks of `ceil(n / k)`, the last ones smaller or empty; chunk `i` lies at the `i`-th
/// placement.
///
/// Placements may name the ranks of a group in any order. Ranks that no placement names hold nothing. Empty chunks
/// begin at the end of the dim, not beyond it.
///
/// ```
/// use candle_shard::sharding_spec::ChunkShardingSpec;
///
/// let spec = ChunkShardingSpec::new(-1, ["rank:1/cpu", "rank:0/cpu"])?;
/// let shards = spec.build_metadata(&[4, 5])?;
/// assert_eq!((shards[0].rank(), &shards[0].sizes[..]), (Some(1), &[4, 3][..]));
/// # Ok::<(), candle_shard::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ChunkShardingSpec {
    dim: isize,
    placements: Vec<RemoteDevice>,
}

impl ChunkShardingSpec {
    /// Creates chunks of `dim` at placements such as `rank:0/cpu`; a negative dim counts from the last one.
    ///
    /// # Errors
    /// If a text is not a placement (see [`RemoteDevice`]), or there are no placements.
    pub fn new<P: AsRef<str>>(dim: isize, placements: impl IntoIterator<Item = P>) -> Result<Self> {
        let placements = placements.into_iter().map(|text| text.as_ref().parse()).collect::<Result<_>>()?;
        Self::with_placements(dim, placements)
    }

    /// Creates chunks of `dim` on the CPUs of these ranks, in this order.
    ///
    /// # Errors
    /// If there are no ranks.
    pub fn on_ranks(dim: isize, ranks: impl IntoIterator<Item = usize>) -> Result<Self> {
        let placements = ranks.into_iter().map(|rank| RemoteDevice::at_rank(rank, DeviceName::Cpu));
        Self::with_placements(dim, placements.collect())
    }

    /// Creates chunks of `dim` at these placements.
    ///
    /// # Errors
    /// If there are no placements.
    pub fn with_placements(dim: isize, placements: Vec<RemoteDevice>) -> Result<Self> {
        if placements.is_empty() {
            return Error::op("ChunkShardingSpec", "no placements; give one for each chunk");
        }
        Ok(Self { dim, placements })
    }

    /// Returns the dim as it was passed, possibly negative.
    pub fn dim(&self) -> isize {
        self.dim
    }

    /// Returns the placement of each chunk.
    pub fn placements(&self) -> &[RemoteDevice] {
        &self.placements
    }

    /// Returns the dim counted from the first one.
    ///
    /// # Errors
    /// If a tensor of this shape has no such dim.
    pub fn dim_of(&self, dims: &[usize]) -> Result<usize> {
        let dim = if self.dim < 0 { self.dim.checked_add_unsigned(dims.len()) } else { Some(self.dim) };
        match dim.and_then(|dim| usize::try_from(dim).ok()).filter(|&dim| dim < dims.len()) {
            Some(dim) => Ok(dim),
            None => {
                let (dim, n) = (self.dim, dims.len());
                let mend =
                    if n == 0 { "it has none".into() } else { format!("give one from -{n} to {}", n - 1) };
                Error::op("ChunkShardingSpec", format!("dim {dim} of a tensor of shape {dims:?}; {mend}"))
            }
        }
    }

    /// Returns the shards of a tensor of this shape, in the order of the placements.
    ///
    /// # Errors
    /// If a tensor of this shape does not have the dim.
    pub fn build_metadata(&self, dims: &[usize]) -> Result<Vec<ShardMetadata>> {
        let dim = self.dim_of(dims)?;
        let shard = |(idx, placement): (usize, &RemoteDevice)| {
            let (mut offsets, mut sizes) = (vec![0; dims.len()], dims.to_vec());
            (offsets[dim], sizes[dim]) = piece(dims[dim], self.placements.len(), idx);
            ShardMetadata { offsets, sizes, placement: Some(placement.clone()) }
        };
        Ok(self.placements.iter().enumerate().map(shard).collect())
    }

    /// Checks that every placement names a different rank of a group of `group_size` ranks.
    ///
    /// # Errors
    /// If a placement names no rank, a rank outside the group, or the rank of another chunk.
    pub fn check(&self, group_size: usize) -> Result<()> {
        check_ranks("ChunkShardingSpec", self.placements.iter().map(Some), group_size)?;
        match self.placements.iter().filter_map(RemoteDevice::rank).duplicates().next() {
            Some(rank) => Error::op(
                "ChunkShardingSpec",
                format!("rank {rank} occurs twice in {self}; give each rank one chunk"),
            ),
            None => Ok(()),
        }
    }
}

impl fmt::Display for ChunkShardingSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "chunks of dim {} at [{}]", self.dim, self.placements.iter().join(", "))
    }
}
