//! Sharding specs and sharded tensors: every spec against the tensor of one device.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
mod base;
mod harness;
mod spec;
