//! A tensor on a mesh: this rank's shard, its layout, and its gradient state.
mod dtensor;
mod factory;
mod given;
mod gradient;
mod lineage;
mod local;
mod named_axes;
mod registry;
mod tree;

pub use dtensor::DTensor;
pub(crate) use dtensor::{Origin, Variable};
pub(crate) use given::block_of;
pub use named_axes::TensorExt;
pub(crate) use registry::{VarEntry, VarName, VarRegistry};
