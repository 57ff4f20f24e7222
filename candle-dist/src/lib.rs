//! Process groups, collectives, device meshes and differentiable communication for [candle](https://github.com/huggingface/candle).
//!
//! A *rank* is one participant of a *world*; a [`ProcessGroup`] is a set of ranks that communicate; a [`DeviceMesh`]
//! arranges the ranks in an n-dimensional grid with named axes. Ranks are threads of this process ([`World::local`]).
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use candle_dist::{ReduceOp, World};
//!
//! let sums = World::local(3).run(|ctx| -> candle_dist::Result<f32> {
//!     let mine = Tensor::new(&[ctx.rank() as f32 + 1.0], &Device::Cpu)?;
//!     let sum = ctx.group().all_reduce(&mine, ReduceOp::Sum)?;
//!     Ok(sum.to_vec1::<f32>()?[0])
//! })?;
//! assert_eq!(sums, [6.0, 6.0, 6.0]);
//! # Ok::<(), candle_dist::WorldError>(())
//! ```
//!
//! Failure is a value: a mismatched call, a rank that returned early, panicked or stalled becomes the same typed
//! [`Error::Group`] on every rank, never a hang.
mod accumulate;
pub mod backend;
mod clip;
pub mod comm;
mod data_parallel;
mod error;
pub mod functional;
mod group;
mod mesh;
mod pack;
mod state;
mod storage;
mod sync;
pub mod threads;
mod tree;
mod verify;
mod world;

pub use candle_core;

pub use accumulate::GradAccumulator;
pub use backend::{Op, ReduceOp};
pub use clip::ClipGradNorm;
pub use data_parallel::{DataParallel, DataParallelOptions, Start};
pub use error::{Cause, Doing, Error, GroupFailure, RankReport, Result};
pub use group::{Message, Pending, ProcessGroup};
pub use mesh::{Axis, DeviceMesh};
pub use pack::{Packed, PackedKeys};
pub use state::replace_by_prefix;
pub use storage::FreeableTensor;
pub use sync::{SyncOptions, named_vars, sync_module_states, sync_params};
pub use tree::TensorTree;
pub use verify::verify_parameter_shapes;
pub use world::{RankContext, World, WorldError};
