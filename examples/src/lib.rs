//! The parts that the programs of this workspace are made of.

pub mod allocator;
pub mod toy;
