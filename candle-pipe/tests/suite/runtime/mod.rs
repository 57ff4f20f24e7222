//! Pipelines on ranks: every schedule computes what one device computes.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
mod batches;
mod buffers;
mod chain;
mod declared;
mod evaluation;
mod failure;
mod half;
mod handover;
mod losses;
mod memory;
mod mistakes;
mod model;
mod odd;
mod options;
mod parameters;
mod parity;
mod random;
mod replicas;
mod saved;
mod sharded;
mod shards;
mod sums;
mod tables;
mod times;
mod unfreeze;
mod variables;
