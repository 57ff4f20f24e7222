//! The integration tests of process groups, meshes and data parallelism in one binary, by subject.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
mod chaos;
mod clip_grad_norm;
mod collectives;
mod conformance;
mod control;
mod data_parallel;
mod device_mesh;
mod edges;
mod failure;
mod functional;
mod hostile;
mod in_place;
mod launch;
mod local_sgd;
mod mesh;
#[cfg(feature = "nccl")]
mod nccl;
mod sync;
mod tree;
mod watching;

test_utils::settle_threads!();
