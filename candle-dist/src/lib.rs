//! Process groups, collectives, device meshes and differentiable communication for
//! [candle](https://github.com/huggingface/candle).
//!
//! Use this crate to run one program on many ranks, and to move tensors between them. A *rank* is one participant of a
//! *world*: a thread of this process ([`World::threads`]), or a process on one of many hosts ([`World::from_env`]). If
//! one rank fails, all ranks return the same error, and none hangs.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use candle_dist::{ReduceOp, World};
//!
//! let sums = World::threads(3).run(|ctx| -> candle_dist::Result<f32> {
//!     let mine = Tensor::new(&[ctx.rank() as f32 + 1.0], &Device::Cpu)?;
//!     let sum = ctx.group().all_reduce(&mine, ReduceOp::Sum)?;
//!     Ok(sum.to_vec1::<f32>()?[0])
//! })?;
//! assert_eq!(sums, [6.0, 6.0, 6.0]);
//! # Ok::<(), candle_dist::WorldError>(())
//! ```
//!
//! The [`guide`] leads from here to training on many hosts, step by step.
//!
//! # What is here
//!
//! | task | items |
//! |---|---|
//! | start ranks, and end them with one error | [`World`], [`RankContext`], [`WorldError`] |
//! | join the processes that torchrun, mpirun or srun started | [`init`], [`init_process_group`] |
//! | send and reduce tensors: collectives, coalesced, in place, into given memory, started ([`Pending`]); tagged messages | [`ProcessGroup`] |
//! | send any serde value | [`ProcessGroup::objects`] |
//! | arrange ranks on named axes | [`DeviceMesh`] |
//! | differentiate through communication | [`functional`] |
//! | train one model on different data: buckets, averages, uneven batches | [`DataParallel`] |
//! | train replicas apart that meet every few hundred steps (DiLoCo) | [`LocalSgd`] |
//! | accumulate gradients of several backward passes (PyTorch's `no_sync`) | [`GradAccumulator`] |
//! | sum gradients of 16-bit parameters in f32 | [`add_grad`], [`sum_dtype`], [`round_grads`] |
//! | clip the gradients of a sharded model by one norm | [`ClipGradNorm`] |
//! | synchronize parameters, and check that they are equal | [`sync_params`], [`sync_module_states`], [`verify_parameter_shapes`], [`replace_by_prefix`] |
//! | process all tensors of a structure: cast, move, flatten, pack named arguments | [`TensorTree`], [`PackedArgs`] |
//! | compare and hash tensors bit by bit | [`bits`] |
//! | copy the next batch to a GPU beside the computation | [`CopyStream`] |
//! | free the memory of a tensor and restore it | [`FreeableTensor`] |
//! | count, log and draw communication | [`comm`] |
//! | set how many threads candle's CPU kernels use | [`threads`] |
//! | test shapes and counts of a world that does not exist | [`ProcessGroup::simulated`] |
//! | count, delay or break communication, or write a backend | [`World::wrap_backend`], [`backend`], [`control`] |
//!
//! # Failures are values
//!
//! If ranks make different calls, or a rank returns early, panics or stalls, each rank gets the same [`Error::Group`]
//! and none hangs. The error keeps its type when it passes through candle, as in a backward pass:
//!
//! ```
//! use candle_core::{Device, Var};
//! use candle_dist::{Cause, Error, World, functional::Step};
//!
//! let causes = World::threads(2).run(|ctx| -> candle_dist::Result<Option<Cause>> {
//!     let weight = Var::new(&[1f32], &Device::Cpu)?;
//!     let loss = Step::ToVarying.apply(&weight, ctx.group())?.sum_all()?;
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
mod call;
pub mod comm;
pub mod control;
mod copies;
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
#[doc(hidden)]
pub mod row_changes;
#[doc(hidden)]
pub mod rows;
mod store;
#[doc(hidden)]
pub mod switch;
#[cfg(feature = "testing")]
pub mod testing;
pub mod threads;
mod train;
mod tree;
mod values;
mod warning;
mod world;

pub use candle_core;
pub use candle_dist_base::{bits, empty, sum_dtype};
#[doc(hidden)]
pub use candle_dist_base::{edges, square_sum};
pub use candle_dist_derive::TensorTree;

pub use call::{Collective, Cut, Op, ReduceOp};
pub use copies::{CopyStream, PendingCopy};
#[allow(deprecated)]
pub use error::Doing;
pub use error::{Cause, Error, GroupFailure, RankReport, RankStatus, Result, printable, without_trace};
pub use freeable::FreeableTensor;
#[allow(deprecated)]
pub use group::Message;
pub use group::{
    CollectiveCall, MAX_OBJECT_BYTES, Objects, P2pOp, Pending, PendingTensors, ProcessGroup,
    ProcessGroupAliases,
};
pub use mesh::{Axis, DeviceMesh};
pub use store::Store;
pub use train::{
    ClipGradNorm, DataParallel, DataParallelOptions, GradAccumulator, GradMark, InitialSync, LocalSgd,
    LocalSgdOptions, PendingGrads, ShardedVar, SyncOptions, add_grad, named_vars, round_grads,
    sync_module_states, sync_params, verify_parameter_shapes,
};
#[allow(deprecated)]
pub use tree::Packed;
pub use tree::{Packable, PackedArgs, PackedKeys, TensorTree, replace_by_prefix};
pub use warning::warn;
pub use world::{RankContext, World, WorldError, init_process_group, panic_message};

/// What most programs import: `use candle_dist::prelude::*`.
pub mod prelude {
    pub use crate::{DeviceMesh, ProcessGroup, ProcessGroupAliases as _, RankContext, ReduceOp, World};
}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
