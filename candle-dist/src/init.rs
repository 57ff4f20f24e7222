//! Worlds whose ranks are processes, on one host or on many.
//!
//! A launcher (torchrun, mpirun, srun) starts the same program once per rank and sets its identity ([`LaunchInfo`]).
//! The processes connect to rank 0, and then communicate over a [`BackendKind`]. From there on, the program is the same as
//! with threads: the same groups, meshes and errors.
//!
//! If a rank fails, panics, ends too early, hangs or dies, every other rank gets the same
//! [`Error::Group`](crate::Error::Group), with a report of each rank. [`InitOptions::debug`] also compares the calls of
//! all ranks before data moves.
//!
//! | variable | meaning |
//! |---|---|
//! | `MASTER_ADDR`, `MASTER_PORT` | where rank 0 listens; see [`LaunchInfo`] for the defaults |
//! | `CANDLE_DIST_TOKEN` | a random text that only processes of this job know; see [`LaunchInfo`] for when it is needed |
//! | `CANDLE_DIST_NO_TOKEN=1` | allow a job that has no secret to start without a token |
//! | `CANDLE_DIST_UNLIKE_ARGUMENTS=1` | allow ranks to be started with unlike arguments, if set for rank 0 |
//! | `CANDLE_DIST_DEBUG=1` | compare the calls of all ranks, and the operands of candle-shard; if set for rank 0 |
//! | `CANDLE_SHARD_STRICT=1` | refuse communication that nobody asked for in candle-shard; if set for rank 0 |
//! | `CANDLE_DIST_SHARE_GPUS=1` | allow more ranks than GPUs on a host |
//!
//! Launchers do not pass each variable on to each host. So what changes the messages of ranks comes from rank 0: it gives its
//! settings to each process that joins. The other variables are of their process alone.
#[allow(deprecated)]
pub use crate::launch::Scope;
pub use crate::launch::{InitOptions, LaunchInfo, Secret, SecretScope, host_name};
#[allow(deprecated)]
pub use crate::world::Backend;
pub use crate::world::{BackendKind, init_process_group, init_process_group_with};
