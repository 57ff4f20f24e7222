//! Movement of elements between ranks: from a whole tensor, to a whole tensor, and from one spec to another.
use super::ShardedTensor;
use super::metadata::BoundMetadata;
use crate::layout::{Block, intersection, volume, whole};
use crate::tables::sharding_spec::{ShardMetadata, ShardingSpec};
use crate::tensor::block_of;
use crate::{Error, Result, agreement};
use candle_core::{DType, Device, Tensor};
use candle_dist::{Collective, Cut, P2pOp, ProcessGroup};
use std::ops::Range;
use std::sync::Arc;

impl ShardedTensor {
    /// Shards the tensor of rank `src_rank` of the group; other ranks may pass `None`, and their tensors are not read.
    ///
    /// The ranks first compare their arguments; then each shard is sent only to its rank. The result is a leaf without
    /// gradient, which shares no memory with the tensor.
    ///
    /// # Errors
    /// On every rank alike: if ranks pass different specs or sources, if the source is outside the group or passes no
    /// tensor, or if the spec does not fit the tensor or the group.
    pub fn shard<'a>(
        tensor: impl Into<Option<&'a Tensor>>,
        spec: impl Into<ShardingSpec>,
        src_rank: usize,
        group: &ProcessGroup,
    ) -> Result<Self> {
        const OP: &str = "ShardedTensor::shard";
        let (tensor, spec) = (tensor.into(), spec.into());
        let source = tensor.filter(|_| group.rank() == src_rank);
        let given = source.map(|source| (source.dims().to_vec(), source.dtype().as_str().to_owned()));
        let all = agreement::told(OP, group, &(spec.to_string(), src_rank, given))?;
        let (first, src, _) = &all[0];
        if let Some(rank) = all.iter().position(|(spec, at, _)| (spec, at) != (first, src)) {
            let (spec, at, _) = &all[rank];
            let reason =
                format!("rank {rank} of the group shards in {spec} from rank {at}, and rank 0 in {first}");
            return Error::op(OP, format!("{reason} from rank {src}; name the same"));
        }
        let Some((.., given)) = all.get(*src) else {
            let last = group.size() - 1;
            return Error::op(OP, format!("src_rank {src} is outside the group; its ranks are 0 to {last}"));
        };
        let Some((dims, dtype)) =
            given.as_ref().and_then(|(dims, name)| Some((dims, name.parse::<DType>().ok()?)))
        else {
            return Error::op(OP, format!("rank {src} of the group, the source, passes no tensor; pass one"));
        };
        let layout = BoundMetadata::new(spec, dims, dtype, group)?;
        let device = tensor.map_or(&Device::Cpu, Tensor::device);
        layout.check_device(OP, device)?;
        moved(layout, device, &[(src_rank, whole(dims), source)])
    }

    /// Shards a tensor that is equal on every rank; nothing is communicated.
    ///
    /// The result is a leaf without gradient, which shares no memory with the tensor.
    ///
    /// # Errors
    /// If the spec does not fit the tensor or the group.
    pub fn distribute(tensor: &Tensor, spec: impl Into<ShardingSpec>, group: &ProcessGroup) -> Result<Self> {
        let layout = BoundMetadata::new(spec.into(), tensor.dims(), tensor.dtype(), group)?;
        layout.check_device("ShardedTensor::distribute", tensor.device())?;
        Self::build(layout, tensor.device(), |shard| {
            Ok(block_of(&tensor.detach(), &shard.block())?.force_contiguous()?)
        })
    }

    /// Redistributes the tensor to another spec; the result has no gradient and its own memory.
    ///
    /// Only elements that move to another rank are sent, each once, from rank to rank.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_dist::World;
    /// use candle_shard::{ChunkShardingSpec, Result, ShardedTensor};
    ///
    /// let columns = World::threads(2).run(|ctx| -> Result<Vec<Vec<f32>>> {
    ///     let x = Tensor::arange(0f32, 4., &Device::Cpu)?.reshape((2, 2))?;
    ///     let x = ShardedTensor::distribute(&x, ChunkShardingSpec::on_ranks(0, [0, 1])?, ctx.group())?;
    ///     Ok(x.reshard(ChunkShardingSpec::on_ranks(1, [1, 0])?)?.local_tensor()?.to_vec2()?)
    /// })?;
    /// assert_eq!(columns, [[[1.], [3.]], [[0.], [2.]]]);
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    ///
    /// # Errors
    /// On every rank alike: if ranks pass different specs, or the spec does not fit the tensor or the group.
    pub fn reshard(&self, spec: impl Into<ShardingSpec>) -> Result<Self> {
        const OP: &str = "ShardedTensor::reshard";
        let (spec, group) = (spec.into(), self.group());
        group.agree(&format!("{OP} of {} to {spec}", self.layout))?;
        let layout = BoundMetadata::new(spec, self.dims(), self.dtype(), group)?;
        layout.check_device(OP, self.device())?;
        let mut mine = self.tensors();
        let held = self.layout.metadata.shards.iter().filter_map(|shard| {
            let rank = shard.rank()?;
            Some((rank, shard.block(), if rank == group.rank() { mine.next() } else { None }))
        });
        moved(layout, self.device(), &held.collect::<Vec<_>>())
    }

    /// Returns the whole tensor on rank `dst` of the group, and `None` elsewhere.
    ///
    /// The result has no gradient and its own memory. Runs one collective.
    ///
    /// # Errors
    /// On every rank alike, if the group has no rank `dst`.
    pub fn gather(&self, dst: usize) -> Result<Option<Tensor>> {
        if dst >= self.group().size() {
            let last = self.group().size() - 1;
            let reason =
                format!("rank {dst} is outside the group of {}; its ranks are 0 to {last}", self.layout);
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
            &self
                .group()
                .call(Collective::all_gather(Cut::new(0, &self.packed_sizes())))
                .run(&self.packed()?)?,
        )
    }

    /// Concatenates the elements of this rank's shards.
    fn packed(&self) -> Result<Tensor> {
        let with_elements = self.shards.iter().filter(|shard| !shard.metadata.is_empty());
        let flat = with_elements.map(|shard| shard.tensor.detach().flatten_all());
        Ok(match &flat.collect::<candle_core::Result<Vec<_>>>()?[..] {
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
        let (all, mut blocks, mut start) = (whole(self.dims()), Vec::new(), 0);
        for shard in shards.filter(|shard| !shard.is_empty()) {
            let (block, len) = (shard.block(), shard.sizes.iter().product());
            let part = packed.narrow(0, start, len)?.reshape(&shard.sizes[..])?;
            blocks.push((if block == all { part.force_contiguous()? } else { part }, block));
            start += len;
        }
        joined(&all, self.dtype(), packed.device(), &blocks)
    }
}

/// Builds the shards of `to` from blocks that ranks of its group hold, with the elements of those that this rank holds.
///
/// Only elements that move to another rank are sent, each once, from rank to rank.
fn moved(
    to: Arc<BoundMetadata>,
    device: &Device,
    held: &[(usize, Block, Option<&Tensor>)],
) -> Result<ShardedTensor> {
    let (group, dtype, me, tag) = (&to.group, to.metadata.dtype, to.group.rank(), 0);
    // Messages between two ranks are ordered by the new shards, then by the old ones, on both sides.
    let (mut messages, mut parts) = (Vec::new(), Vec::new());
    for shard in &to.metadata.shards {
        let (Some(rank), want, mut mine) = (shard.rank(), shard.block(), Vec::new()) else { continue };
        for (from, block, tensor) in held {
            let Some(common) = intersection(block, &want) else { continue };
            match tensor.map(|tensor| view(tensor, block, &common)).transpose()? {
                Some(tensor) if rank == me && common == want => {
                    mine.push((common, Some(tensor.force_contiguous()?)));
                }
                Some(tensor) if rank == me => mine.push((common, Some(tensor))),
                Some(tensor) => messages.push(P2pOp::Send { tensor, to: rank, tag }),
                None if rank == me => {
                    let shape: Vec<usize> = common.iter().map(Range::len).collect();
                    messages.push(P2pOp::Recv { shape: shape.into(), dtype, from: *from, tag });
                    mine.push((common, None));
                }
                None => {}
            }
        }
        parts.extend((rank == me).then_some(mine));
    }
    let mut received =
        group.batch_send_recv(&messages)?.into_iter().map(|tensor| arrived(group, &tensor, device));
    let mut parts = parts.into_iter();
    ShardedTensor::build(to.clone(), device, |shard| {
        let blocks = parts.next().unwrap_or_default().into_iter().filter_map(|(block, tensor)| {
            let tensor = tensor.map(Ok).or_else(|| received.next())?;
            Some(tensor.map(|tensor| (tensor, block)))
        });
        joined(&shard.block(), dtype, device, &blocks.collect::<Result<Vec<_>>>()?)
    })
}

/// Returns a view of the part `block` of a tensor that is the block `of`.
fn view(tensor: &Tensor, of: &Block, block: &Block) -> candle_core::Result<Tensor> {
    let within = of.iter().zip(block).map(|(of, range)| range.start - of.start..range.end - of.start);
    block_of(&tensor.detach(), &within.collect::<Block>())
}

/// Joins blocks that together cover `want` in new memory, or returns the only one.
fn joined(want: &Block, dtype: DType, device: &Device, blocks: &[(Tensor, Block)]) -> Result<Tensor> {
    if let [(only, block)] = blocks
        && block == want
    {
        return Ok(only.clone());
    }
    let shape: Vec<usize> = want.iter().map(Range::len).collect();
    let whole = Tensor::zeros(shape, dtype, device)?;
    for (tensor, block) in blocks {
        let starts: Vec<usize> =
            block.iter().zip(want).map(|(range, want)| range.start - want.start).collect();
        write(&whole, &tensor.detach().contiguous()?, &starts)?;
    }
    Ok(whole)
}

/// Returns a tensor that was received, on this device: over NCCL it arrives on the rank's GPU.
fn arrived(group: &ProcessGroup, tensor: &Tensor, device: &Device) -> Result<Tensor> {
    if device.is_cpu() { Ok(group.to_host(tensor)?) } else { Ok(tensor.to_device(device)?) }
}

/// Writes `part` over the elements of `whole` that begin at `starts`; both are contiguous.
pub(super) fn write(whole: &Tensor, part: &Tensor, starts: &[usize]) -> candle_core::Result<()> {
    if part.elem_count() == 0 {
        return Ok(());
    }
    let cut: Vec<usize> = (0..starts.len()).filter(|&dim| whole.dims()[dim] != part.dims()[dim]).collect();
    match cut[..] {
        // candle writes a range of one dim in one call.
        [] => whole.flatten_all()?.slice_set(&part.flatten_all()?, 0, 0),
        [dim] => whole.slice_set(part, dim, starts[dim]),
        // With several dims cut, write row by row of the first dim.
        _ => (0..part.dims()[0])
            .try_for_each(|row| write(&whole.get(starts[0] + row)?, &part.get(row)?, &starts[1..])),
    }
}
