//! Files of tensors: each rank reads and writes only its own blocks.
pub mod checkpoint;
mod disk;
pub(crate) mod weights;
