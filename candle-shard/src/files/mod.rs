//! Files of tensors: each rank reads and writes only its own blocks.
pub mod checkpoint;
mod disk;
mod index;
pub(crate) mod weights;
