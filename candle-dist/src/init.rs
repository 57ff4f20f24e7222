//! Worlds whose ranks are processes, on one host or on many.
//!
//! A launcher (torchrun, mpirun, srun) starts the same program once for each rank and tells it who it is
//! ([`LaunchInfo`]). The processes meet at an address of rank 0's, and then communicate over an engine ([`Backend`]).
//! From there on the program is the one that runs on threads: the same groups, meshes and errors.
//!
//! A rank that fails, panics, ends too early, hangs or dies becomes the same [`Error::Group`](crate::Error::Group) on every other rank, with
//! what each rank was doing. [`InitOptions::debug`] also compares the calls of all ranks before they move data.
//!
//! | variable | says |
//! |---|---|
//! | `MASTER_ADDR`, `MASTER_PORT` | where rank 0 listens; see [`LaunchInfo`] for what holds without them |
//! | `CANDLE_DIST_TOKEN` | what only the processes of this job know; otherwise the launcher's job id |
//! | `CANDLE_DIST_NO_TOKEN=1` | a job that spans hosts may go without |
//! | `CANDLE_DIST_DEBUG=1` | compare calls |
//! | `CANDLE_DIST_SHARE_GPUS=1` | more ranks than GPUs may be on a host |
pub use crate::launch::{InitOptions, LaunchInfo};
pub use crate::world::{Backend, init_process_group, init_process_group_with};
