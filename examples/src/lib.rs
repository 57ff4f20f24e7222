//! The parts that the programs of this workspace are made of.

pub mod allocator;
pub mod batch;
pub mod cli;
pub mod clicks;
pub mod collectives;
pub mod comm;
pub mod context;
pub mod dispatch;
pub mod embedding;
#[cfg(feature = "nccl")]
pub mod gpu;
pub mod launch;
pub mod lm;
pub mod loading;
pub mod memory;
pub mod pipeline;
pub mod progress;
pub mod schedules;
pub mod table;
pub mod timing;
pub mod toy;

/// The code of the README, which is compiled and run as a test.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
pub struct Readme;
