//! Conversion from one spec to another.
use super::metadata::Layout;
use super::{ShardedTensor, pieces};
use crate::layout::{Block, intersection};
use crate::tables::sharding_spec::ShardingSpec;
use crate::{Error, Result};
use candle_core::{Shape, Tensor};
use candle_dist::Message;
use std::ops::Range;

const OP: &str = "ShardedTensor::reshard";

impl ShardedTensor {
    /// Redistributes the tensor to another spec; the result has no gradient and its own memory.
    ///
    /// Only elements that move to another rank are sent, each once, from rank to rank.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_dist::World;
    /// use candle_shard::{ChunkShardingSpec, Result, ShardedTensor};
    ///
    /// let columns = World::local(2).run(|ctx| -> Result<Vec<Vec<f32>>> {
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
        let spec = spec.into();
        self.group().agree(&format!("{OP} of {} to {spec}", self.layout))?;
        let layout = Layout::new(spec, self.dims(), self.dtype(), self.group())?;
        layout.check_device(OP, self.device())?;
        let mut received = self.group().batch_send_recv(&self.messages(&layout)?)?.into_iter();
        Self::build(layout.clone(), self.device(), |shard| {
            let want = shard.block();
            // In the order in which `messages` requests them.
            let sources = common(&self.layout, self.group().rank(), &want);
            let blocks = sources.map(|(source, block)| match source {
                Source::Shard(nth) => Ok((self.cut(nth, &block)?, block)),
                Source::Rank(_) => match received.next() {
                    Some(tensor) => Ok((pieces::arrived(self.group(), &tensor, self.device())?, block)),
                    None => Error::op(OP, format!("too few pieces arrived for shard {shard} of {layout}")),
                },
            });
            let blocks: Vec<(Tensor, Block)> = blocks.collect::<Result<_>>()?;
            pieces::joined(&want, self.dtype(), self.device(), &blocks)
        })
    }

    /// Returns the messages that this rank sends and receives; those between two ranks are ordered by the new shards,
    /// then by the old ones.
    fn messages(&self, to: &Layout) -> Result<Vec<Message>> {
        let (me, tag, mut messages) = (self.group().rank(), 0, Vec::new());
        for shard in &to.metadata.shards {
            let Some(rank) = shard.rank() else { continue };
            for (from, block) in common(&self.layout, me, &shard.block()) {
                match from {
                    Source::Shard(nth) if rank != me => {
                        messages.push(Message::Send { tensor: self.cut(nth, &block)?, to: rank, tag });
                    }
                    Source::Rank(from) if rank == me => {
                        let shape: Vec<usize> = block.iter().map(Range::len).collect();
                        messages.push(Message::Recv { shape: Shape::from(shape), dtype: self.dtype(), from, tag });
                    }
                    _ => {}
                }
            }
        }
        Ok(messages)
    }

    /// Returns a view of a block of a local shard.
    fn cut(&self, nth: usize, block: &Block) -> Result<Tensor> {
        let shard = &self.shards[nth];
        Ok(pieces::view(&shard.tensor, &shard.metadata.offsets, block)?)
    }
}

/// The source of a block.
enum Source {
    /// This rank's shard with this index among its shards.
    Shard(usize),
    Rank(usize),
}

/// Splits a block by the shards that hold its parts, in the order of the layout.
fn common<'a>(layout: &'a Layout, me: usize, block: &'a Block) -> impl Iterator<Item = (Source, Block)> + 'a {
    let mut mine = 0;
    layout.metadata.shards.iter().filter_map(move |shard| {
        let rank = shard.rank()?;
        let from = if rank == me { Source::Shard(mine) } else { Source::Rank(rank) };
        mine += usize::from(rank == me);
        Some((from, intersection(&shard.block(), block)?))
    })
}
