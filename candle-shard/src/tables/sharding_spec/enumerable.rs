//! Specs that list their blocks.
use super::remote_device::check_ranks;
use super::shard_metadata::ShardMetadata;
use crate::layout::{first_overlap, volume, whole};
use crate::{Error, Result};
use itertools::Itertools;
use std::fmt;

const OP: &str = "EnumerableShardingSpec";

/// A spec that lists the blocks of a tensor one by one; a rank may hold several, or none.
///
/// ```
/// use candle_shard::sharding_spec::{DeviceName, EnumerableShardingSpec, RemoteDevice, ShardMetadata};
///
/// let top = ShardMetadata::new([0, 0], [1, 4], RemoteDevice::at_rank(0, DeviceName::Cpu))?;
/// let rest = ShardMetadata::new([1, 0], [2, 4], RemoteDevice::at_rank(1, DeviceName::Cpu))?;
/// let spec = EnumerableShardingSpec::new(vec![top, rest])?;
/// spec.check_tensor(&[3, 4])?;
/// assert!(spec.check_tensor(&[4, 4]).is_err());
/// # Ok::<(), candle_shard::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct EnumerableShardingSpec {
    shards: Vec<ShardMetadata>,
}

impl EnumerableShardingSpec {
    /// Creates a spec from these shards, which must not overlap.
    ///
    /// # Errors
    /// If there are no shards, if they have different numbers of dims, or if two overlap.
    pub fn new(shards: Vec<ShardMetadata>) -> Result<Self> {
        let Some(first) = shards.first() else {
            return Error::op(OP, "no shards; give at least one");
        };
        shards.iter().try_for_each(ShardMetadata::check)?;
        if let Some(other) = shards.iter().find(|shard| shard.sizes.len() != first.sizes.len()) {
            return Error::op(
                OP,
                format!(
                    "shards with different numbers of dims: {first} and {other}; give blocks of one tensor"
                ),
            );
        }
        if let Some((a, b)) = first_overlap(&shards.iter().map(ShardMetadata::block).collect_vec()) {
            return Error::op(
                OP,
                format!(
                    "shards {a} and {b} overlap: {} and {}; give blocks without common elements",
                    shards[a], shards[b]
                ),
            );
        }
        Ok(Self { shards })
    }

    /// Returns the shards.
    pub fn shards(&self) -> &[ShardMetadata] {
        &self.shards
    }

    /// Checks that the shards cover exactly the elements of a tensor of this shape.
    ///
    /// # Errors
    /// If the shards have another number of dims, if one ends beyond the tensor, or if they do not cover it.
    pub fn check_tensor(&self, dims: &[usize]) -> Result<()> {
        let n = self.shards[0].sizes.len();
        if n != dims.len() {
            return Error::op(
                OP,
                format!("shards with {n} dims for a tensor of shape {dims:?}; give {} dims", dims.len()),
            );
        }
        let beyond = |shard: &&ShardMetadata| shard.block().iter().zip(dims).any(|(range, &n)| range.end > n);
        if let Some(shard) = self.shards.iter().find(beyond) {
            return Error::op(
                OP,
                format!("shard {shard} ends beyond a tensor of shape {dims:?}; give blocks inside"),
            );
        }
        let held =
            self.shards.iter().try_fold(0, |sum: usize, shard| sum.checked_add(volume(&shard.block())?));
        let want = volume(&whole(dims));
        if held != want || want.is_none() {
            let count = |n: Option<usize>| n.map_or("uncountably many".into(), |n| n.to_string());
            let (held, want) = (count(held), count(want));
            return Error::op(
                OP,
                format!(
                    "shards of {held} elements for a tensor of shape {dims:?}, which has {want}; cover all of it"
                ),
            );
        }
        // For a tensor without elements the volume check is not enough.
        let reached =
            |(dim, &n): (usize, &usize)| self.shards.iter().any(|shard| shard.block()[dim].end == n);
        if !dims.iter().enumerate().all(reached) {
            return Error::op(
                OP,
                format!("{self} end before a tensor of shape {dims:?} does; cover its last elements, too"),
            );
        }
        Ok(())
    }

    /// Checks that every placement names a rank of a group of `group_size` ranks.
    ///
    /// # Errors
    /// If a placement is missing, names no rank, or a rank outside the group.
    pub fn check(&self, group_size: usize) -> Result<()> {
        check_ranks(OP, self.shards.iter().map(|shard| shard.placement.as_ref()), group_size)
    }
}

impl fmt::Display for EnumerableShardingSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "shards [{}]", self.shards.iter().join(", "))
    }
}
