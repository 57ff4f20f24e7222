//! Initialization of a sharded tensor in place, so that variables stay the same.
//!
//! Each rank computes the values of its own shards; nothing is communicated. Random values are bit-equal under every
//! spec. Clones of the tensor share its memory and change with it.
use super::ShardedTensor;
use super::factory::sampled;
use crate::Result;
use crate::random::{Distribution, Stream};
use candle_core::Shape;
use candle_nn::init::{FanInOut, NonLinearity};

/// Fills the tensor with random numbers of `stream`, uniform over `[lo, up)`.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_dist::World;
/// use candle_shard::random::Stream;
/// use candle_shard::sharded_tensor::init;
/// use candle_shard::{ChunkShardingSpec, Result, ShardedTensor};
///
/// World::threads(2).run(|ctx| -> Result<()> {
///     let spec = ChunkShardingSpec::on_ranks(0, [0, 1])?;
///     let zeros = ShardedTensor::zeros(&spec, (6, 3), DType::F32, &Device::Cpu, ctx.group())?;
///     let (table, vars) = zeros.to_var()?;
///     init::uniform(&table, 1., 2., Stream::new(42, "table"))?;
///     assert!(vars[0].min_all()?.to_scalar::<f32>()? >= 1.);
///     Ok(())
/// })?;
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
///
/// # Errors
/// On every rank alike, if the dtype is not a float, or the bounds are not finite and in order.
pub fn uniform(tensor: &ShardedTensor, lo: f64, up: f64, stream: Stream) -> Result<()> {
    fill(tensor, Distribution::Uniform { lo, up }, stream)
}

/// Fills the tensor with random numbers of `stream`, normally distributed.
///
/// # Errors
/// On every rank alike, if the dtype is not a float, the numbers are not finite, or `stdev` is negative.
pub fn normal(tensor: &ShardedTensor, mean: f64, stdev: f64, stream: Stream) -> Result<()> {
    fill(tensor, Distribution::Normal { mean, stdev }, stream)
}

/// Fills the tensor with random numbers of `stream`, uniform over `±gain·sqrt(3 / fan)`, with the fan of the whole
/// tensor.
///
/// He et al., *Delving Deep into Rectifiers*, 2015.
///
/// # Errors
/// On every rank alike, if the dtype is not a float, or the fan is zero.
pub fn kaiming_uniform(
    tensor: &ShardedTensor,
    fan: FanInOut,
    non_linearity: NonLinearity,
    stream: Stream,
) -> Result<()> {
    let fan = fan.for_shape(&Shape::from(tensor.dims())) as f64;
    let bound = non_linearity.gain() * (3.0 / fan).sqrt();
    uniform(tensor, -bound, bound, stream)
}

/// Fills the tensor with one value, rounded to the dtype.
pub fn constant(tensor: &ShardedTensor, value: f64) -> Result<()> {
    tensor.overwrite(&tensor.full_like(value, None, None)?)
}

fn fill(tensor: &ShardedTensor, dist: Distribution, stream: Stream) -> Result<()> {
    tensor.overwrite(&sampled(tensor.layout.clone(), dist, tensor.device(), stream)?)
}
