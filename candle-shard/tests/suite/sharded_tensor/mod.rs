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
mod properties;
mod reshard;
mod sharding_plan;
mod spec;
mod state_dict;
mod transform;
