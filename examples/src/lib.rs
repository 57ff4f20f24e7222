//! The parts that the programs of this workspace are made of.

pub mod allocator;
pub mod cli;
pub mod clicks;
pub mod collectives;
pub mod comm;
pub mod dispatch;
pub mod embedding;
#[cfg(feature = "nccl")]
pub mod gpu;
