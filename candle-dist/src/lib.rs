//! Process groups, collectives, device meshes and differentiable communication for [candle](https://github.com/huggingface/candle).
//!
//! A *rank* is one participant of a *world*; a [`ProcessGroup`] is a set of ranks that communicate; a [`DeviceMesh`]
//! arranges the ranks in an n-dimensional grid with named axes. Ranks are threads of this process ([`World::local`]), or
//! processes on one or many hosts ([`World::from_env`], [`init_process_group`]).
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
//! The [`guide`] goes from here to training on many hosts, step by step.
//!
//! # What is here
//!
//! | to | there is |
//! |---|---|
//! | start ranks, and end them with one error | [`World`], [`RankContext`], [`WorldError`] |
//! | be one of many processes that torchrun, mpirun or srun started | [`init`], [`init_process_group`] |
//! | send and reduce tensors: collectives, coalesced, in place, into given memory, started and [`Pending`], tagged messages | [`ProcessGroup`] |
//! | send any value that serde knows: [`broadcast_object`](ProcessGroup::broadcast_object) and its kin | [`ProcessGroup`] |
//! | try shapes and counts of a world that is not there | [`ProcessGroup::simulated`] |
//! | arrange ranks on named axes: sub-meshes, flatten, unflatten, explicit ranks, meshes from groups | [`DeviceMesh`] |
//! | differentiate through communication | [`functional`] |
//! | train one model on different data: buckets, averages, uneven batches | [`DataParallel`] |
//! | add up several backward passes before communicating (PyTorch's `no_sync`) | [`GradAccumulator`] |
//! | sum gradients of 16-bit parameters in f32 | [`add_grad`], [`sum_dtype`], [`round_grads`] |
//! | clip gradients of a model that is cut along any axes by one norm | [`ClipGradNorm`] |
//! | bring parameters in step, and see that they are | [`sync_params`], [`sync_module_states`], [`verify_parameter_shapes`], [`replace_by_prefix`] |
//! | treat all tensors of a structure alike: cast, move, flatten, pack named arguments | [`TensorTree`], [`Packed`] |
//! | compare tensors bit by bit, and have a number stand for one | [`bits`] |
//! | free a tensor's memory and have it back | [`FreeableTensor`] |
//! | count, log and draw communication | [`comm`] |
//! | settle how many threads candle's CPU kernels use | [`threads`] |
//! | count, delay or break communication, or write another engine | [`World::wrap_backend`], [`backend`], and for processes [`control`] |
//!
//! # Failure is a value
//!
//! A mismatched call, a rank that returned early, panicked or stalled becomes the same typed [`Error::Group`] on every
//! rank, never a hang; also where it passed through candle, as in a backward pass:
//!
//! ```
//! use candle_core::{Device, Var};
//! use candle_dist::{Cause, Error, World, functional::Exchange};
//!
//! let causes = World::local(2).run(|ctx| -> candle_dist::Result<Option<Cause>> {
//!     let weight = Var::new(&[1f32], &Device::Cpu)?;
//!     let loss = Exchange::to_varying().apply(&weight, ctx.group())?.sum_all()?;
//!     if ctx.rank() == 1 {
//!         return Ok(None); // and leaves rank 0 alone with its backward pass
//!     }
//!     let error = loss.backward().map(drop).unwrap_err();
//!     let Error::Group(failure) = error.into() else { unreachable!() };
//!     Ok(Some(failure.cause.clone()))
//! })?;
//! assert_eq!(causes[0], Some(Cause::Returned { rank: 1 }));
//! # Ok::<(), candle_dist::WorldError>(())
//! ```
pub mod backend;
pub mod bits;
mod call;
pub mod comm;
pub mod control;
mod error;
mod freeable;
pub mod functional;
mod group;
#[doc = include_str!("guide.md")]
pub mod guide {}
mod hash;
pub mod init;
mod launch;
mod link;
mod mesh;
mod store;
pub mod threads;
mod train;
mod tree;
mod values;
mod world;

pub use candle_core;

pub use call::{Op, ReduceOp};
pub use error::{Cause, Doing, Error, GroupFailure, RankReport, Result, without_trace};
pub use freeable::FreeableTensor;
pub use group::{MAX_OBJECT_BYTES, Message, Pending, PendingTensors, ProcessGroup};
pub use mesh::{Axis, DeviceMesh};
pub use store::Store;
pub use train::{
    ClipGradNorm, DataParallel, DataParallelOptions, GradAccumulator, PendingGrads, Start, SyncOptions, add_grad,
    named_vars, round_grads, sum_dtype, sync_module_states, sync_params, verify_parameter_shapes,
};
pub use tree::{Packed, PackedKeys, TensorTree, replace_by_prefix};
pub use world::{RankContext, World, WorldError, init_process_group, panic_message};
