//! Conversion to and from distributed tensors with the same layout on a mesh.
use super::ShardedTensor;
use super::metadata::BoundMetadata;
use crate::tables::sharding_spec::{
    ChunkShardingSpec, DeviceName, RemoteDevice, ShardMetadata, infer_sharding_spec_from_shards_metadata,
};
use crate::{DTensor, Error, Placement, Result, Shard, Sizes, Spec};
use candle_dist::DeviceMesh;
use std::ops::Range;

impl ShardedTensor {
    /// Converts to a `DTensor` on a mesh with one axis, each rank of which holds one piece of a dim, in order.
    ///
    /// Nothing is communicated or copied.
    ///
    /// Piece sizes other than the default ones become explicit sizes.
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_dist::World;
    /// use candle_shard::{ChunkShardingSpec, Result, Shard, ShardedTensor};
    ///
    /// World::threads(2).run(|ctx| -> Result<()> {
    ///     let spec = ChunkShardingSpec::on_ranks(1, [0, 1])?;
    ///     let x = ShardedTensor::zeros(&spec, (2, 3), DType::F32, &Device::Cpu, ctx.group())?;
    ///     let x = x.to_dtensor(&ctx.mesh(&[("tp", 2)])?)?;
    ///     assert_eq!((x.placements(), x.dims()), (&[Shard(1)][..], &[2, 3][..]));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    ///
    /// # Errors
    /// On every rank alike, if the mesh has several axes or other ranks, or if its ranks do not hold one piece of a dim
    /// each, in order.
    pub fn to_dtensor(&self, mesh: &DeviceMesh) -> Result<DTensor> {
        let Some((dim, sizes)) = self.sizes_on(mesh) else {
            let chunks = ChunkShardingSpec::on_ranks(0, 0..self.group().size())?;
            return Error::op(
                "ShardedTensor::to_dtensor",
                format!(
                    "{} on ranks {:?} does not lie on {mesh} of ranks {:?} as pieces of one dim in order; reshard it, to \
                     {chunks} for example, and give a mesh of one axis with the ranks of the group",
                    self.layout,
                    self.group().ranks(),
                    mesh.ranks()
                ),
            );
        };
        let spec = Spec::new(mesh, &[Shard(dim)], self.dims(), self.dtype())?.with_sizes(0, Some(sizes))?;
        DTensor::from_local_with_spec(self.local_tensor()?.clone(), spec)
    }

    /// Returns the dim that is cut, and the size of each part on a mesh with one axis, each rank of which holds one, in
    /// order.
    fn sizes_on(&self, mesh: &DeviceMesh) -> Option<(usize, Sizes)> {
        let ranks = self.group().ranks();
        let holds_one = |rank: usize| self.layout.shards_of(rank).count() == 1;
        if mesh.ndim() != 1 || mesh.size() != ranks.len() || !(0..ranks.len()).all(holds_one) {
            return None;
        }
        let (dim, parts) = self.layout.parts().ok()?;
        let part = |rank: &usize| Some(&parts[ranks.iter().position(|member| member == rank)?]);
        let parts: Vec<&Range<usize>> = mesh.ranks().iter().map(part).collect::<Option<_>>()?;
        let is_in_order = parts.iter().filter(|part| !part.is_empty()).is_sorted_by_key(|part| part.start);
        is_in_order.then(|| (dim, parts.into_iter().map(Range::len).collect()))
    }

    /// Converts a `DTensor` in which every rank holds a different piece, on the group of its mesh.
    ///
    /// Nothing is communicated or copied.
    ///
    /// # Errors
    /// On every rank alike, if the tensor is replicated or partial on an axis of several ranks.
    pub fn from_dtensor(tensor: &DTensor) -> Result<Self> {
        let (spec, mesh) = (tensor.spec(), tensor.mesh());
        let shared = |&(placement, &n): &(&Placement, &usize)| {
            placement.is_partial() || (placement.shard_dim().is_none() && n > 1)
        };
        if let Some((placement, _)) = spec.placements().iter().zip(mesh.shape()).find(shared) {
            return Error::op(
                "ShardedTensor::from_dtensor",
                format!(
                    "{spec} on {mesh} is {placement} on an axis, so several ranks hold the same piece; shard it there"
                ),
            );
        }
        let device = DeviceName::kind_of(tensor.device());
        let shards = mesh.coordinates().enumerate().map(|(rank, coordinate)| {
            ShardMetadata::of_block(&spec.block_at(&coordinate), RemoteDevice::at_rank(rank, device))
        });
        let inferred = infer_sharding_spec_from_shards_metadata(&shards.collect::<Vec<_>>())?;
        let layout = BoundMetadata::new(inferred, tensor.dims(), tensor.dtype(), mesh.group()?)?;
        Self::build(layout, tensor.device(), |_| Ok(tensor.to_local().contiguous()?))
    }
}
