//! The parts that the programs of this workspace are made of: a folder for each program, and what they share in [`support`].
//!
#![doc = include_str!("../README.md")]

pub mod bench_attention;
pub mod bench_collectives;
pub mod bench_dispatch;
pub mod bench_embedding;
pub mod bench_loading;
pub mod bench_moe;
#[cfg(feature = "nccl")]
pub mod gpu_check;
pub mod schedules;
pub mod sharded_embedding;
pub mod support;
pub mod toy_transformer;

pub use support::{allocator, arguments, cli, comm, launch, memory, pipeline, progress, table, timing};

/// The code of the README, which is compiled and run as a test.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
pub struct Readme;

/// The code of the page about launching, as well.
#[cfg(doctest)]
#[doc = include_str!("../../docs/launch.md")]
pub struct Launch;
