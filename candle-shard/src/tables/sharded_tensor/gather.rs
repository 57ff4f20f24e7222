//! Conversion of sharded tensors to whole ones.
use super::{ShardedTensor, pieces};
use crate::layout::{volume, whole};
use crate::tables::sharding_spec::ShardMetadata;
use crate::{Error, Result};
use candle_core::Tensor;
use candle_dist::{Collective, Cut};

impl ShardedTensor {
    /// Returns the whole tensor on rank `dst` of the group, and `None` elsewhere.
    ///
    /// The result has no gradient and its own memory. Runs one collective.
    ///
    /// # Errors
    /// On every rank alike, if the group has no rank `dst`.
    pub fn gather(&self, dst: usize) -> Result<Option<Tensor>> {
        if dst >= self.group().size() {
            let last = self.group().size() - 1;
            let reason = format!("rank {dst} is outside the group of {}; its ranks are 0 to {last}", self.layout);
            return Error::op("ShardedTensor::gather", reason);
        }
        let gathered = self.group().gather(&self.packed()?, 0, &self.packed_sizes(), dst)?;
        gathered.map(|packed| self.unpacked(&packed)).transpose()
    }

    /// Returns the whole tensor on every rank, without gradient and in its own memory.
    ///
    /// Runs one collective.
    pub fn gather_all(&self) -> Result<Tensor> {
        self.unpacked(
            &self.group().call(Collective::all_gather(Cut::new(0, &self.packed_sizes()))).run(&self.packed()?)?,
        )
    }

    /// Concatenates the elements of this rank's shards.
    fn packed(&self) -> Result<Tensor> {
        let with_elements = self.shards.iter().filter(|shard| !shard.metadata.is_empty());
        let flat = with_elements.map(|shard| shard.tensor.detach().flatten_all());
        let flat = flat.collect::<candle_core::Result<Vec<_>>>()?;
        Ok(match &flat[..] {
            [] => Tensor::zeros(0, self.dtype(), self.device())?,
            [only] => only.clone(),
            several => Tensor::cat(several, 0)?,
        })
    }

    /// Returns the number of elements of each rank.
    fn packed_sizes(&self) -> Vec<usize> {
        let elements = |shard: &ShardMetadata| volume(&shard.block()).unwrap_or(0);
        (0..self.group().size()).map(|rank| self.layout.shards_of(rank).map(elements).sum()).collect()
    }

    /// Assembles the tensor from the concatenated elements of all ranks.
    fn unpacked(&self, packed: &Tensor) -> Result<Tensor> {
        let shards = (0..self.group().size()).flat_map(|rank| self.layout.shards_of(rank));
        let (mut blocks, mut start) = (Vec::new(), 0);
        for shard in shards.filter(|shard| !shard.is_empty()) {
            let (block, len) = (shard.block(), shard.sizes.iter().product());
            blocks.push((packed.narrow(0, start, len)?.reshape(&shard.sizes[..])?, block));
            start += len;
        }
        pieces::joined(&whole(self.dims()), self.dtype(), packed.device(), &blocks)
    }
}
