//! Tensors sharded over the ranks of a group according to a [sharding spec](crate::sharding_spec).
mod compare;
mod convert;
mod factory;
mod from_local;
pub mod init;
mod local_op;
mod metadata;
mod moves;
mod sharding_plan;
mod state_dict;
mod transform;

pub use local_op::LocalOp;
pub use metadata::{LocalShard, ShardedTensorMetadata};
pub use sharding_plan::{ShardedModule, ShardingPlan, shard_module};
pub use state_dict::{load_state, save_state};

use crate::tables::sharding_spec::{ShardMetadata, ShardingSpec};
use crate::tables::sparse::RowVar;
use crate::{Error, Result};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor};
use candle_dist::{ProcessGroup, ShardedVar};
use itertools::Itertools;
use metadata::BoundMetadata;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// A tensor sharded over the ranks of a group according to a [`ShardingSpec`]; cheap to clone.
///
/// Ranks in placements are ranks of the group, not of the world. A rank may hold no shard, one or several. Every rank
/// of the group makes the same calls in the same order, as with the group itself.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_dist::World;
/// use candle_shard::{ChunkShardingSpec, Result, ShardedTensor};
///
/// let held = World::threads(2).run(|ctx| -> Result<Vec<f32>> {
///     let x = Tensor::arange(0f32, 5., &Device::Cpu)?;
///     let spec = ChunkShardingSpec::new(0, ["rank:1/cpu", "rank:0/cpu"])?;
///     // Only rank 0 needs the whole.
///     let x = ShardedTensor::shard((ctx.rank() == 0).then_some(&x), &spec, 0, ctx.group())?;
///     Ok(x.local_tensor()?.to_vec1()?)
/// })?;
/// assert_eq!(held, [vec![3., 4.], vec![0., 1., 2.]]);
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
#[derive(Clone)]
pub struct ShardedTensor {
    shards: Vec<LocalShard>,
    layout: Arc<BoundMetadata>,
    device: Device,
    /// The shards as variables whose gradients are collected by rows; empty for other tensors.
    rows: Vec<RowVar>,
    /// Says that the shards are variables and no copies, to those who see only the variables.
    declared: Vec<ShardedVar>,
}

impl ShardedTensor {
    /// Builds the shards of this rank with `make`, in the order of the spec.
    fn build(
        layout: Arc<BoundMetadata>,
        device: &Device,
        make: impl FnMut(&ShardMetadata) -> Result<Tensor>,
    ) -> Result<Self> {
        let tensors = layout.mine().map(make).collect::<Result<Vec<_>>>()?;
        Ok(Self::holding(layout, device, tensors))
    }

    /// Creates a tensor whose shards on this rank are `tensors`, in the order of the spec.
    fn holding(
        layout: Arc<BoundMetadata>,
        device: &Device,
        tensors: impl IntoIterator<Item = Tensor>,
    ) -> Self {
        let shard = |(tensor, metadata): (Tensor, &ShardMetadata)| {
            debug_assert_eq!(tensor.dims(), metadata.sizes, "{layout}");
            LocalShard { tensor, metadata: metadata.clone() }
        };
        let shards = tensors.into_iter().zip(layout.mine()).map(shard).collect();
        Self { shards, layout, device: device.clone(), rows: Vec::new(), declared: Vec::new() }
    }

    /// Returns a tensor of this layout whose shards on this rank are `tensors`.
    ///
    /// Variables stay declared as shards while the result lives, and it has the row variables of this one where it has the
    /// same shards.
    fn with_tensors(&self, tensors: impl IntoIterator<Item = Tensor>) -> Self {
        let (rows, declared) = (self.rows.clone(), self.declared.clone());
        Self { rows, declared, ..Self::holding(self.layout.clone(), self.device(), tensors) }
    }

    /// Applies `f` to each local shard and keeps the layout.
    fn map(&self, f: impl FnMut(&Tensor) -> candle_core::Result<Tensor>) -> Result<Self> {
        Ok(self.with_tensors(self.tensors().map(f).collect::<candle_core::Result<Vec<_>>>()?))
    }

    /// Returns the elements of this rank's shards, in the order of the spec.
    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.shards.iter().map(|shard| &shard.tensor)
    }

    /// Returns the group of ranks that hold the tensor.
    pub fn group(&self) -> &ProcessGroup {
        &self.layout.group
    }

    /// Returns the spec that cuts the tensor.
    pub fn sharding_spec(&self) -> &ShardingSpec {
        &self.layout.spec
    }

    /// Returns the shards of all ranks, the shape and the dtype.
    pub fn metadata(&self) -> &ShardedTensorMetadata {
        &self.layout.metadata
    }

    /// Returns the shards of this rank, in the order of the spec.
    pub fn local_shards(&self) -> &[LocalShard] {
        &self.shards
    }

    /// Returns the gradients of this rank's shards, in their order; `None` for a shard that the loss does not depend
    /// on.
    ///
    /// Works for tensors of [`to_var`](Self::to_var) and their clones; [`sparse`](crate::sparse) collects gradients by
    /// rows instead.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_dist::World;
    /// use candle_shard::{ChunkShardingSpec, Result, ShardedTensor};
    ///
    /// World::threads(2).run(|ctx| -> Result<()> {
    ///     let whole = Tensor::arange(0f32, 4., &Device::Cpu)?;
    ///     let spec = ChunkShardingSpec::new(0, ["rank:0/cpu", "rank:1/cpu"])?;
    ///     let (x, _) = ShardedTensor::distribute(&whole, spec, ctx.group())?.to_var()?;
    ///     let grads = x.local_tensor()?.sqr()?.sum_all()?.backward()?;
    ///     let mine = x.grad(&grads)[0].unwrap();
    ///     assert_eq!(mine.to_vec1::<f32>()?, [[0., 2.], [4., 6.]][ctx.rank()]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    pub fn grad<'g>(&self, grads: &'g GradStore) -> Vec<Option<&'g Tensor>> {
        self.tensors().map(|tensor| grads.get(tensor)).collect()
    }

    /// Returns the elements of this rank's only shard, connected to the graph.
    ///
    /// # Errors
    /// If this rank holds no shard or several; use [`local_shards`](Self::local_shards) then.
    pub fn local_tensor(&self) -> Result<&Tensor> {
        match &self.shards[..] {
            [shard] => Ok(&shard.tensor),
            shards => {
                let (n, rank, layout) = (shards.len(), self.group().rank(), &self.layout);
                let reason =
                    format!("rank {rank} of the group holds {n} shards of {layout}; use local_shards");
                Error::op("ShardedTensor::local_tensor", reason)
            }
        }
    }

    /// Returns the dim that is cut, and each rank's part of it; or the reason why there is no such dim.
    pub(in crate::tables) fn parts(&self) -> Result<(usize, Vec<Range<usize>>), String> {
        self.layout.parts()
    }

    /// Returns the global shape.
    pub fn dims(&self) -> &[usize] {
        &self.layout.metadata.dims
    }

    /// Returns the dtype.
    pub fn dtype(&self) -> DType {
        self.layout.metadata.dtype
    }

    /// Returns the device of this rank's shards.
    pub fn device(&self) -> &Device {
        &self.device
    }
}

impl fmt::Display for ShardedTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let here = self.shards.iter().map(|shard| &shard.metadata).join(", ");
        write!(f, "ShardedTensor {}, here [{here}]", self.layout)
    }
}

impl fmt::Debug for ShardedTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}
