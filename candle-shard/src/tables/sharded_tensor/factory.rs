//! Tensors built in place: each rank builds its own shards, and nothing is communicated.
use super::ShardedTensor;
use super::metadata::BoundMetadata;
use crate::Result;
use crate::random::{Distribution, Stream, sample};
use crate::tables::sharding_spec::{ShardMetadata, ShardingSpec};
use candle_core::{DType, Device, FloatDType, Shape, Tensor, WithDType};
use candle_dist::{ProcessGroup, empty};
use std::sync::Arc;

const OP: &str = "ShardedTensor::new";

impl ShardedTensor {
    /// Creates a tensor of zeros.
    ///
    /// Like the other factories, it builds this rank's shards on `device`, which must be the device that the placements
    /// name.
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_dist::World;
    /// use candle_shard::random::Stream;
    /// use candle_shard::{ChunkShardingSpec, Result, ShardedTensor};
    ///
    /// let rows = World::threads(2).run(|ctx| -> Result<usize> {
    ///     let (spec, cpu) = (ChunkShardingSpec::on_ranks(0, [1, 0])?, Device::Cpu);
    ///     let bias = ShardedTensor::zeros(&spec, (5, 2), DType::F32, &cpu, ctx.group())?;
    ///     let noise = ShardedTensor::randn(0f32, 1., &spec, (5, 2), &cpu, ctx.group(), Stream::new(42, "noise"))?;
    ///     assert_eq!(noise.metadata(), bias.metadata());
    ///     Ok(bias.local_tensor()?.dim(0)?)
    /// })?;
    /// assert_eq!(rows, [2, 3]);
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    ///
    /// # Errors
    /// On every rank alike, if the spec does not fit the shape or the group; on this rank alone, if the device is not
    /// the one that its placement names.
    pub fn zeros(
        spec: impl Into<ShardingSpec>,
        shape: impl Into<Shape>,
        dtype: DType,
        device: &Device,
        group: &ProcessGroup,
    ) -> Result<Self> {
        made(layout(spec, shape, dtype, group)?, device, |shard| {
            Tensor::zeros(&shard.sizes[..], dtype, device)
        })
    }

    /// Creates a tensor of ones.
    pub fn ones(
        spec: impl Into<ShardingSpec>,
        shape: impl Into<Shape>,
        dtype: DType,
        device: &Device,
        group: &ProcessGroup,
    ) -> Result<Self> {
        made(layout(spec, shape, dtype, group)?, device, |shard| empty::ones(&shard.sizes[..], dtype, device))
    }

    /// Creates a tensor with the same value everywhere.
    pub fn full<T: WithDType>(
        value: T,
        spec: impl Into<ShardingSpec>,
        shape: impl Into<Shape>,
        device: &Device,
        group: &ProcessGroup,
    ) -> Result<Self> {
        made(layout(spec, shape, T::DTYPE, group)?, device, |shard| {
            empty::full(value, &shard.sizes[..], T::DTYPE, device)
        })
    }

    /// Creates random numbers of `stream`, uniform over `[lo, up)` and bit-equal under every spec.
    pub fn rand<T: FloatDType>(
        lo: T,
        up: T,
        spec: impl Into<ShardingSpec>,
        shape: impl Into<Shape>,
        device: &Device,
        group: &ProcessGroup,
        stream: Stream,
    ) -> Result<Self> {
        let even = Distribution::Uniform { lo: lo.to_f64(), up: up.to_f64() };
        sampled(layout(spec, shape, T::DTYPE, group)?, even, device, stream)
    }

    /// Creates random numbers of `stream`, normally distributed and bit-equal under every spec.
    pub fn randn<T: FloatDType>(
        mean: T,
        stdev: T,
        spec: impl Into<ShardingSpec>,
        shape: impl Into<Shape>,
        device: &Device,
        group: &ProcessGroup,
        stream: Stream,
    ) -> Result<Self> {
        let normal = Distribution::Normal { mean: mean.to_f64(), stdev: stdev.to_f64() };
        sampled(layout(spec, shape, T::DTYPE, group)?, normal, device, stream)
    }

    /// Creates zeros with the layout of this tensor; `dtype` and `group`, if given, replace its own.
    ///
    /// ```
    /// # use candle_core::{DType, Device};
    /// # use candle_dist::World;
    /// # use candle_shard::{ChunkShardingSpec, Result, ShardedTensor};
    /// World::threads(2).run(|ctx| -> Result<()> {
    ///     let spec = ChunkShardingSpec::on_ranks(0, [0, 1])?;
    ///     let x = ShardedTensor::ones(&spec, 4, DType::F32, &Device::Cpu, ctx.group())?;
    ///     assert_eq!(x.zeros_like(None, None)?.dtype(), DType::F32);
    ///     assert_eq!(x.zeros_like(DType::I64, ctx.group())?.dtype(), DType::I64);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    pub fn zeros_like<'a>(
        &self,
        dtype: impl Into<Option<DType>>,
        group: impl Into<Option<&'a ProcessGroup>>,
    ) -> Result<Self> {
        self.full_like(0.0, dtype, group)
    }

    /// Creates ones with the layout of this tensor; `dtype` and `group`, if given, replace its own.
    pub fn ones_like<'a>(
        &self,
        dtype: impl Into<Option<DType>>,
        group: impl Into<Option<&'a ProcessGroup>>,
    ) -> Result<Self> {
        self.full_like(1.0, dtype, group)
    }

    /// Creates a tensor with one value everywhere, rounded to the dtype, and the layout of this tensor; `dtype` and
    /// `group`, if given, replace its own.
    pub fn full_like<'a>(
        &self,
        value: f64,
        dtype: impl Into<Option<DType>>,
        group: impl Into<Option<&'a ProcessGroup>>,
    ) -> Result<Self> {
        let layout = self.layout_like(dtype, group)?;
        let dtype = layout.metadata.dtype;
        made(layout, self.device(), |shard| empty::full(value, &shard.sizes[..], dtype, self.device()))
    }

    /// Creates random numbers as [`rand`](Self::rand) does, with the layout of this tensor; `dtype` and `group`, if
    /// given, replace its own.
    pub fn rand_like<'a>(
        &self,
        (lo, up): (f64, f64),
        dtype: impl Into<Option<DType>>,
        group: impl Into<Option<&'a ProcessGroup>>,
        stream: Stream,
    ) -> Result<Self> {
        let layout = self.layout_like(dtype, group)?;
        sampled(layout, Distribution::Uniform { lo, up }, self.device(), stream)
    }

    /// Creates random numbers as [`randn`](Self::randn) does, with the layout of this tensor; `dtype` and `group`, if
    /// given, replace its own.
    pub fn randn_like<'a>(
        &self,
        (mean, stdev): (f64, f64),
        dtype: impl Into<Option<DType>>,
        group: impl Into<Option<&'a ProcessGroup>>,
        stream: Stream,
    ) -> Result<Self> {
        let layout = self.layout_like(dtype, group)?;
        sampled(layout, Distribution::Normal { mean, stdev }, self.device(), stream)
    }

    fn layout_like<'a>(
        &self,
        dtype: impl Into<Option<DType>>,
        group: impl Into<Option<&'a ProcessGroup>>,
    ) -> Result<Arc<BoundMetadata>> {
        let (dtype, group) = (dtype.into().unwrap_or(self.dtype()), group.into().unwrap_or(self.group()));
        BoundMetadata::new(self.sharding_spec().clone(), self.dims(), dtype, group)
    }
}

fn layout(
    spec: impl Into<ShardingSpec>,
    shape: impl Into<Shape>,
    dtype: DType,
    group: &ProcessGroup,
) -> Result<Arc<BoundMetadata>> {
    BoundMetadata::new(spec.into(), shape.into().dims(), dtype, group)
}

fn made(
    layout: Arc<BoundMetadata>,
    device: &Device,
    make: impl Fn(&ShardMetadata) -> candle_core::Result<Tensor>,
) -> Result<ShardedTensor> {
    layout.check_device(OP, device)?;
    ShardedTensor::build(layout, device, |shard| Ok(make(shard)?))
}

/// Creates random numbers in this layout. A wrong distribution is an error on every rank, also on one without shards.
pub(super) fn sampled(
    layout: Arc<BoundMetadata>,
    dist: Distribution,
    device: &Device,
    stream: Stream,
) -> Result<ShardedTensor> {
    let (dims, dtype) = (layout.metadata.dims.clone(), layout.metadata.dtype);
    sample(stream, dist, &[0, 0], &[0..0, 0..0], dtype, device)?;
    made(layout, device, |shard| sample(stream, dist, &dims, &shard.block(), dtype, device))
}
