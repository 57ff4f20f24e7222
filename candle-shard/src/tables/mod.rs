//! Large tables: tensors cut by ranks instead of mesh axes, variables with gradients by rows, and distributed lookups.
//!
#![doc = include_str!("README.md")]

mod embedding;
pub mod sharded_tensor;
pub mod sharding_spec;
pub mod sparse;
