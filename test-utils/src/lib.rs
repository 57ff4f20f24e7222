//! The multi-rank test harness and the toy models of the candle distributed stack.
mod attacks;
mod backend;
mod converter;
mod dice;
mod harness;
mod job;
mod leaf;
mod memory;
pub mod mistakes;
pub mod model_args;
#[cfg(feature = "mpi")]
mod processes;
pub mod programs;
pub mod reference;
pub mod reference_mlp;
pub mod reference_moe;
mod reference_ops;
mod reference_params;
mod scratch;
mod settle;
mod skip;
mod subtests;
mod sweep;
pub mod toy;

pub use attacks::Attacks;
pub use backend::{backend_name, has_ranks, over_mpi, over_nccl, skip_among_processes, worlds};
pub use converter::DTensorConverter;
pub use dice::Dice;
pub use harness::{Ranks, TestWorld, device, on_ranks, world};
pub use job::{Job, Outcome};
pub use leaf::{
    Lay, Leaf, block, device_of, distance, distribute, lays, mesh, on_axes, on_device, strided, tolerance,
    value_error, values,
};
pub use memory::stays_flat;
pub use scratch::Scratch;
#[doc(hidden)]
pub use settle::{ctor, settle};
pub use skip::{skip, skip_unless_gpus, skipped};
pub use subtests::{Settings, on_mesh, run_subtests};
pub use sweep::{Arguments, Case, Input, Kind, OpCheck, sweep, sweep_in};
