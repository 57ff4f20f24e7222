//! candle-nn's functions that make layers, for models that come from there.
use super::{Embedding, LayerNorm, Linear, MeshVarBuilder, RmsNorm};
use crate::Result;
use std::borrow::Borrow;

/// Creates a linear layer with a bias: [`Linear::new`] by the name and with the arguments of candle-nn. The builder
/// may be given by value.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_dist::World;
/// use candle_shard::nn::{MeshVarBuilder, embedding, layer_norm, linear, linear_no_bias, rms_norm};
/// use candle_shard::parallel::{ColwiseParallel, Plan};
///
/// World::threads(2).run(|ctx| -> candle_shard::Result<()> {
///     let mesh = ctx.mesh(&[("tp", 2)])?;
///     let plan = Plan::new("tp").with("up", ColwiseParallel::default());
///     let vb = MeshVarBuilder::fresh(42, &mesh, plan, DType::F32, &Device::Cpu)?;
///     embedding(10, 4, vb.pp("tokens"))?;
///     layer_norm(4, 1e-5, vb.pp("norm"))?;
///     linear(4, 8, vb.pp("up"))?;
///     linear_no_bias(8, 4, vb.pp("down"))?;
///     rms_norm(4, 1e-5, vb.pp("last"))?;
///     assert_eq!(vb.finish()?.len(), 7);
///     Ok(())
/// })?;
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
///
/// # Errors
/// Those of [`Linear::new`].
pub fn linear(in_dim: usize, out_dim: usize, vb: impl Borrow<MeshVarBuilder>) -> Result<Linear> {
    Linear::new(in_dim, out_dim, true, vb.borrow())
}

/// Creates a linear layer without a bias; see [`linear`].
///
/// # Errors
/// Those of [`Linear::new`].
pub fn linear_no_bias(in_dim: usize, out_dim: usize, vb: impl Borrow<MeshVarBuilder>) -> Result<Linear> {
    Linear::new(in_dim, out_dim, false, vb.borrow())
}

/// Creates a layer norm with a weight and a bias; see [`linear`].
///
/// # Errors
/// Those of [`LayerNorm::new`].
pub fn layer_norm(size: usize, eps: f64, vb: impl Borrow<MeshVarBuilder>) -> Result<LayerNorm> {
    LayerNorm::new(size, eps, vb.borrow())
}

/// Creates an RMS norm; see [`linear`].
///
/// # Errors
/// Those of [`RmsNorm::new`].
pub fn rms_norm(size: usize, eps: f64, vb: impl Borrow<MeshVarBuilder>) -> Result<RmsNorm> {
    RmsNorm::new(size, eps, vb.borrow())
}

/// Creates a table `[rows, width]` of standard normal numbers, as candle-nn does; see [`linear`].
///
/// # Errors
/// Those of [`Embedding::new`].
pub fn embedding(rows: usize, width: usize, vb: impl Borrow<MeshVarBuilder>) -> Result<Embedding> {
    Embedding::new(rows, width, 1.0, vb.borrow())
}
