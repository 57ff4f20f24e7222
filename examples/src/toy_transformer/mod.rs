//! The toy Transformer program trains a byte-level language model on one device and in parallel, and compares the runs.

pub mod args;
pub mod corpus;
pub mod outcome;
pub mod parity;
pub mod report;
pub mod runs;
pub mod sharded;
pub mod single;
pub mod staged;
pub mod stories;
pub mod training;
pub mod validate;
