//! Files of tensors: each rank reads and writes only its own blocks.
//!
#![doc = include_str!("README.md")]

pub mod checkpoint;
mod digests;
mod disk;
mod index;
mod lock;
pub mod regular;
pub(crate) mod weights;
