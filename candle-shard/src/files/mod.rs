//! Files of tensors: each rank reads and writes only its own blocks.
pub mod checkpoint;
mod disk;
mod index;
pub mod regular;
pub(crate) mod weights;
