//! The toy Transformer program: one byte-level language model, trained on one device and in parallel, and compared.

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
