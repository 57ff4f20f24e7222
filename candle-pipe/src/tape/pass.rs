//! The backward pass.
//!
//! With the feature `shard` it is candle-shard's: its layers recompute segments and gather parameters in the backward
//! pass. Without it no layer does either, and candle's own pass is all.
#[cfg(feature = "shard")]
pub(crate) use candle_shard::nn::backward;

/// Runs the backward pass of a scalar.
#[cfg(not(feature = "shard"))]
pub(crate) fn backward(loss: &candle_core::Tensor) -> crate::Result<candle_core::backprop::GradStore> {
    Ok(candle_dist::edges::backward(loss)?)
}
