//! Sharding specs and sharded tensors: every spec against the tensor of one device.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
mod base;
mod compare;
mod convert;
mod factory;
mod faults;
mod from_local;
mod gather;
mod harness;
mod init;
mod local_op;
mod plan;
mod properties;
mod reshard;
mod spec;
mod state;
mod transform;
