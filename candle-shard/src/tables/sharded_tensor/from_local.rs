//! Conversion of local tensors to sharded ones.
use super::ShardedTensor;
use super::metadata::{BoundMetadata, LocalShard, ShardedTensorMetadata};
use crate::agreement;
use crate::tables::sharding_spec::{
    EnumerableShardingSpec, ShardMetadata, ShardingSpec, infer_sharding_spec_from_shards_metadata,
};
use crate::{Error, Result};
use candle_core::{DType, Device, Shape, Tensor};
use candle_dist::ProcessGroup;
use itertools::Itertools;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

const OP: &str = "ShardedTensor::from_local_shards";

/// A rank's description of its shards.
#[derive(Serialize, Deserialize)]
struct ShardReport {
    dims: Vec<usize>,
    /// Its shards, each with its dtype.
    shards: Vec<(ShardMetadata, String)>,
    /// An error that this rank found in one of its shards.
    complaint: Option<String>,
}

impl ShardedTensor {
    /// Assembles a tensor of this shape from the shards of all ranks, which exchange their metadata.
    ///
    /// Shards stay connected to the graph and keep their memory if it is contiguous. The spec is inferred. Every rank
    /// must call it, even with no shards.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_dist::World;
    /// use candle_shard::sharded_tensor::{LocalShard, ShardedTensor};
    /// use candle_shard::Result;
    ///
    /// World::threads(2).run(|ctx| -> Result<()> {
    ///     let rank = ctx.rank(); // 1 row and 3 rows
    ///     let rows = Tensor::zeros((1 + 2 * rank, 4), DType::F32, &Device::Cpu)?;
    ///     let shard = LocalShard::from_tensor_and_offsets(rows, [rank, 0], rank)?;
    ///     let x = ShardedTensor::from_local_shards(vec![shard], (4, 4), ctx.group())?;
    ///     assert_eq!(x.metadata().shards[1].sizes, [3, 4]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    ///
    /// # Errors
    /// On every rank alike: if a tensor does not match its shard's sizes or device, if a placement does not name this
    /// rank, if shapes or dtypes differ, or if shards overlap or do not cover the whole tensor.
    pub fn from_local_shards(
        shards: Vec<LocalShard>,
        shape: impl Into<Shape>,
        group: &ProcessGroup,
    ) -> Result<Self> {
        let shape = shape.into();
        let complaint = shards.iter().find_map(|shard| fault(shard, group.rank()));
        let described =
            shards.iter().map(|shard| (shard.metadata.clone(), shard.tensor.dtype().as_str().into()));
        let told = ShardReport { dims: shape.dims().to_vec(), shards: described.collect(), complaint };
        let layout = agreed_layout(&told, group)?;
        Self::of_shards(layout, shards)
    }

    /// Uses a local tensor as this rank's only shard of a tensor of the global shape; nothing is communicated.
    ///
    /// The local tensor stays connected to the graph and keeps its memory if it is contiguous.
    ///
    /// # Errors
    /// On every rank alike, if the spec does not fit the shape or the group; on this rank alone, if the local tensor is
    /// not its only shard.
    pub fn from_local_tensor(
        local: Tensor,
        spec: impl Into<ShardingSpec>,
        shape: impl Into<Shape>,
        group: &ProcessGroup,
    ) -> Result<Self> {
        const OP: &str = "ShardedTensor::from_local_tensor";
        let layout = BoundMetadata::new(spec.into(), shape.into().dims(), local.dtype(), group)?;
        layout.check_device(OP, local.device())?;
        let (got, device) = (local.dims().to_vec(), local.device().clone());
        match &layout.mine().collect_vec()[..] {
            [shard] if shard.sizes == got => {
                Self::build(layout.clone(), &device, |_| Ok(local.contiguous()?))
            }
            held => Error::op(
                OP,
                format!(
                    "a local tensor of shape {got:?} on rank {} of the group, which holds [{}] of {layout}; give the one \
                     shard, or use from_local_shards",
                    group.rank(),
                    held.iter().join(", ")
                ),
            ),
        }
    }

    /// Assembles a tensor from this rank's shards and metadata that every rank knows; nothing is communicated.
    ///
    /// # Errors
    /// On every rank alike, if the metadata does not describe a tensor on the group; on this rank alone, if the shards
    /// are not those that the metadata assigns to it, in their order.
    pub fn from_local_shards_and_global_metadata(
        shards: Vec<LocalShard>,
        metadata: &ShardedTensorMetadata,
        group: &ProcessGroup,
    ) -> Result<Self> {
        const OP: &str = "ShardedTensor::from_local_shards_and_global_metadata";
        let spec = listed(&metadata.shards, &metadata.dims, group)?;
        let layout = BoundMetadata::new(spec, &metadata.dims, metadata.dtype, group)?;
        if let Some(complaint) = shards.iter().find_map(|shard| fault(shard, group.rank())) {
            return Error::op(OP, complaint);
        }
        if !shards.iter().map(|shard| &shard.metadata).eq(layout.mine()) {
            let (given, held) =
                (shards.iter().map(|shard| &shard.metadata).join(", "), layout.mine().join(", "));
            return Error::op(
                OP,
                format!("shards [{given}] on a rank that holds [{held}] of {layout}; give these"),
            );
        }
        if let Some(shard) = shards.iter().find(|shard| shard.tensor.dtype() != metadata.dtype) {
            let (has, at) = (shard.tensor.dtype().as_str(), &shard.metadata);
            return Error::op(OP, format!("{has} in shard {at} of {layout}; convert it with to_dtype"));
        }
        Self::of_shards(layout, shards)
    }

    /// Creates a tensor from these local shards, which match the layout in its order.
    fn of_shards(layout: Arc<BoundMetadata>, shards: Vec<LocalShard>) -> Result<Self> {
        let device = shards.first().map_or(Device::Cpu, |shard| shard.tensor.device().clone());
        let tensors =
            shards.iter().map(|shard| shard.tensor.contiguous()).collect::<candle_core::Result<Vec<_>>>()?;
        Ok(Self::holding(layout, &device, tensors))
    }
}

/// Describes the error in a shard of this rank of the group, if there is one.
fn fault(shard: &LocalShard, rank: usize) -> Option<String> {
    let LocalShard { tensor, metadata } = shard;
    if tensor.dims() != metadata.sizes {
        return Some(format!("a tensor of shape {:?} for shard {metadata}; give that piece", tensor.dims()));
    }
    let Some(placement) = &metadata.placement else {
        return Some(format!("shard {metadata} has no placement; give rank:{rank} with its device"));
    };
    if placement.rank() != Some(rank) {
        return Some(format!(
            "shard {metadata} is not placed on rank:{rank}, which holds it; name that rank"
        ));
    }
    let at = tensor.device();
    (!placement.device().names(at)).then(|| {
        format!(
            "shard {metadata} on {:?}; move the tensor, or name this device in the placement",
            at.location()
        )
    })
}

/// Builds the layout from the shards of all ranks; all ranks check it alike.
fn agreed_layout(told: &ShardReport, group: &ProcessGroup) -> Result<Arc<BoundMetadata>> {
    let all = agreement::told(OP, group, told)?;
    let complaints = all.iter().enumerate().find_map(|(rank, told)| Some((rank, told.complaint.as_ref()?)));
    if let Some((rank, complaint)) = complaints {
        return Error::op(OP, format!("rank {rank} of the group: {complaint}"));
    }
    let dims = &all[0].dims;
    if let Some(rank) = all.iter().position(|told| told.dims != *dims) {
        let other = &all[rank].dims;
        let reason =
            format!("rank {rank} of the group names the shape {other:?}, and rank 0 {dims:?}; name the same");
        return Error::op(OP, reason);
    }
    let shards =
        || all.iter().enumerate().flat_map(|(rank, told)| told.shards.iter().map(move |shard| (rank, shard)));
    let dtype = shards().next().map_or("f32", |(_, (_, dtype))| dtype);
    if let Some((rank, (_, other))) = shards().find(|(_, (_, other))| other != dtype) {
        let reason = format!("rank {rank} of the group gives {other}, and the first shard is {dtype}");
        return Error::op(OP, format!("{reason}; convert one with to_dtype"));
    }
    let parsed: DType =
        dtype.parse().map_err(|_| Error::Op { op: OP, reason: format!("{dtype} is not known") })?;
    let shards: Vec<_> = shards().map(|(_, (metadata, _))| metadata.clone()).collect();
    BoundMetadata::new(listed(&shards, dims, group)?, dims, parsed, group)
}

/// Returns the spec of shards that form a tensor of this shape.
fn listed(shards: &[ShardMetadata], dims: &[usize], group: &ProcessGroup) -> Result<ShardingSpec> {
    let listed = EnumerableShardingSpec::new(shards.to_vec())?;
    listed.check(group.size())?;
    listed.check_tensor(dims)?;
    infer_sharding_spec_from_shards_metadata(shards)
}
