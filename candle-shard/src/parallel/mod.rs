//! Tensor parallelism: a plan says, as data, how each module is sharded.
//!
//! [`MeshVarBuilder::parallelize`](crate::nn::MeshVarBuilder::parallelize) applies a plan to an existing model:
//! it shards and moves the weights; the model's code stays the same. A linear layer, an embedding or a norm accepts a
//! plain tensor by candle's `Module`, as `x.apply(&layer)`, and returns one: this rank's shard if the style shards the
//! output, otherwise the whole tensor. So a module between two sharded layers may be plain candle code, and so may the
//! whole model. [`forward`](crate::nn::Linear::forward) of a `DTensor` returns a `DTensor`.
//!
//! PyTorch's `use_local_output` says whether code after a layer sees the rank's part or a DTensor with global sizes. Here
//! the type of the input decides that. For plain tensors a style also has the field `use_local_output`, true by default:
//! if it is false, the plain output is the whole tensor, gathered, so that the code after it sees global sizes.
//!
//! ```
//! use candle_core::{DType, Device::Cpu, Module, Tensor};
//! use candle_dist::World;
//! use candle_nn::{VarBuilder, VarMap};
//! use candle_shard::Result;
//! use candle_shard::nn::{Linear, MeshVarBuilder};
//! use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel, tensors_of};
//!
//! struct Mlp<L> {
//!     up: L,
//!     down: L,
//! }
//!
//! impl<L: Module> Module for Mlp<L> {
//!     fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
//!         x.apply(&self.up)?.gelu()?.apply(&self.down) // gelu of a piece
//!     }
//! }
//!
//! World::threads(2).run(|ctx| -> Result<()> {
//!     let map = VarMap::new(); // every rank has the same one, from a file as a rule
//!     let vb = VarBuilder::from_varmap(&map, DType::F32, &Cpu);
//!     let up = candle_nn::linear(4, 6, vb.pp("up"))?;
//!     let whole = Mlp { up, down: candle_nn::linear(6, 4, vb.pp("down"))? };
//!     # for var in map.all_vars() { var.set(&(var.ones_like()? * (0.1 * var.dims()[0] as f64))?)?; }
//!
//!     let plan = Plan::new("tp").with("up", ColwiseParallel::default()).with("down", RowwiseParallel::default());
//!     let mesh = ctx.mesh(&[("tp", 2)])?;
//!     let vb = MeshVarBuilder::parallelize(tensors_of(&map), 0, &mesh, plan, DType::F32, &Cpu)?;
//!     let up = Linear::new(4, 6, true, &vb.pp("up"))?;
//!     let cut = Mlp { up, down: Linear::new(6, 4, true, &vb.pp("down"))? };
//!     let parameters = vb.finish()?; // an error if a weight was left over
//!     assert!(parameters.local_elem_count() < parameters.elem_count());
//!     let x = Tensor::ones((3, 4), DType::F32, &Cpu)?;
//!     let error = (whole.forward(&x)? - cut.forward(&x)?)?.abs()?.max_all()?.to_scalar::<f32>()?;
//!     assert!(error < 1e-4);
//!     Ok(())
//! })?;
//! # Ok::<(), candle_dist::WorldError>(())
//! ```
//!
#![doc = include_str!("README.md")]

mod module;
pub(crate) mod pattern;
pub(crate) mod plain;
mod plan;
mod shares;
mod style;

#[allow(deprecated)]
pub use module::Layout;
pub use module::{LayerKind, ModuleStyle, ParamPlacements};
pub use plan::Plan;
pub use shares::Shares;
pub use style::{
    ColwiseParallel, PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput, RowwiseParallel,
    SequenceParallel, Style,
};

use candle_core::Tensor;
use candle_nn::VarMap;
use std::sync::PoisonError;

/// The tensors of a `VarMap` by name, for [`MeshVarBuilder::parallelize`](crate::nn::MeshVarBuilder::parallelize).
///
/// They share memory with its variables; drop the map to free it.
pub fn tensors_of(map: &VarMap) -> Vec<(String, Tensor)> {
    let vars = map.data().lock().unwrap_or_else(PoisonError::into_inner);
    vars.iter().map(|(name, var)| (name.clone(), var.as_detached_tensor())).collect()
}
