//! Data-parallel training: equal parameters, and gradients that are averaged, summed and clipped.
//!
#![doc = include_str!("README.md")]

mod accumulate;
mod clip;
mod data_parallel;
mod grads;
mod host;
mod local_sgd;
mod sharded;
mod sync;
mod verify;

pub use accumulate::GradAccumulator;
pub use clip::ClipGradNorm;
pub use data_parallel::{DataParallel, DataParallelOptions, InitialSync, PendingGrads};
pub use grads::{GradMark, add_grad, round_grads};
pub use local_sgd::{LocalSgd, LocalSgdOptions};
pub use sharded::ShardedVar;
pub use sync::{SyncOptions, named_vars, sync_module_states, sync_params};
pub use verify::verify_parameter_shapes;
