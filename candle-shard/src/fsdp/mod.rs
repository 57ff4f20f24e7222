//! Fully sharded data parallelism: parameters are whole only while they are in use.
//!
//! Each rank of a mesh axis, or of several, holds a piece of every parameter, of its gradient and of its optimizer state, and computes
//! on its own rows. A model consists of units, [`FullyShard`]. A unit gathers its parameters when it runs and drops
//! them afterwards. It gathers them again for its backward pass, which leaves each rank its piece of the summed
//! gradients (Rajbhandari et al. 2020, "ZeRO", stage 3; Zhao et al. 2023, PyTorch FSDP). Each of these steps is one
//! collective per unit. A prefetch in the forward pass costs one more, of one number, in which the ranks agree that no
//! parameter has changed since; [`FullyShardOptions::foreign_writes`] says when it does not.
//!
//! This is the gradient rule with another lifetime: an all_gather whose backward is a reduce_scatter. So the numbers
//! equal those of one device on the whole batch, and tensor parallelism works on another axis of the same mesh.
//!
//! Axes that are neither the plan's nor fully sharding replicate the units (hybrid sharding): one all_reduce a pass sums
//! the gradients of the pieces over them.
//!
//! All ranks run the same units in the same order. If they do not, the calls of the units differ in their description, which
//! names parameters, and all ranks get an error.
//!
//! In each backward pass either every rank has the gradients of all parameters of a unit, or every rank lacks one. Ranks
//! that each lack one may use different parameters. Otherwise all ranks get an error.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_dist::World;
//! use candle_shard::fsdp::{FullyShard, FullyShardOptions};
//! use candle_shard::nn::{AdamW, Linear, Module, MeshVarBuilder};
//! use candle_shard::parallel::Plan;
//! use candle_shard::{DTensor, Replicate, Result, Shard};
//!
//! World::threads(4).run(|ctx| -> Result<()> {
//!     let mesh = ctx.mesh(&[("dp", 2), ("tp", 2)])?;
//!     let vb = MeshVarBuilder::fresh(42, &mesh, Plan::new("tp"), DType::F32, &Device::Cpu)?;
//!     let vb = vb.fully_shard("dp", FullyShardOptions::default())?;
//!     let layer = |i: usize| FullyShard::new(&vb.pp(i), |vb| Linear::new(8, 8, true, vb));
//!     let layers = (0..3).map(layer).collect::<Result<Vec<_>>>()?;
//!     let parameters = vb.finish()?; // half of each, by rows
//!     let mut optimizer = AdamW::new(&parameters, candle_nn::ParamsAdamW::default())?;
//!
//!     let batch = Tensor::ones((6, 8), DType::F32, &Device::Cpu)?;
//!     let mut x = DTensor::distribute(&batch, &mesh, &[Shard(0), Replicate])?; // 3 rows each
//!     for layer in &layers {
//!         x = layer.forward(&x)?.gelu()?; // a unit of a `Module` is one; others have `run`
//!     }
//!     optimizer.backward_step(&x.mean_all()?)?;
//!     Ok(())
//! })?;
//! # Ok::<(), candle_dist::WorldError>(())
//! ```
//!
#![doc = include_str!("README.md")]

mod no_sync;
mod nodes;
mod options;
mod pass;
mod run;
mod sharder;
mod shared;
mod unit;

pub use no_sync::no_sync;
pub use options::FullyShardOptions;
pub use pass::{discard_grads, keeps_grads};
pub(crate) use sharder::Sharder;
pub(crate) use unit::Unit;

use crate::Result;
use candle_dist::TensorTree;
use std::fmt;
use std::sync::Arc;

/// A part of a model whose parameters are gathered and freed together; see the [module](self).
///
/// With a builder that does not [shard fully](crate::nn::MeshVarBuilder::fully_shard) it only wraps the part.
pub struct FullyShard<M> {
    module: M,
    unit: Option<Arc<Unit>>,
}

impl<M> FullyShard<M> {
    /// Wraps a part whose parameters belong to `unit`, if there is one.
    pub(crate) fn of(module: M, unit: Option<Arc<Unit>>) -> Self {
        Self { module, unit }
    }

    /// Runs `f` on the part while its parameters are whole. Every rank of the axis must call it.
    ///
    /// Everything that depends on the parameters must be part of the result of `f`, which is a tensor or any
    /// [tree](candle_dist::TensorTree) of tensors, such as an output with an auxiliary loss: the backward pass uses it
    /// to find out when the parameters are needed again. Gradients come from [`DTensor::backward`](crate::DTensor::backward) or
    /// [`nn::backward`](crate::nn::backward); candle's own backward pass does not return them.
    ///
    /// # Errors
    /// Those of `f` and of the communication.
    pub fn run<T: TensorTree>(&self, f: impl FnOnce(&M) -> Result<T>) -> Result<T> {
        match &self.unit {
            Some(unit) => unit.run(|| f(&self.module)),
            None => f(&self.module),
        }
    }

    /// Like [`run`](Self::run), for a part whose forward pass changes it, such as its cache of keys and values.
    ///
    /// # Errors
    /// Those of `f` and of the communication.
    pub fn run_mut<T: TensorTree>(&mut self, f: impl FnOnce(&mut M) -> Result<T>) -> Result<T> {
        match &self.unit {
            Some(unit) => unit.run(|| f(&mut self.module)),
            None => f(&mut self.module),
        }
    }
}

impl<M: fmt::Debug> fmt::Debug for FullyShard<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FullyShard").field(&self.module).finish()
    }
}
