//! Fully sharded units against one device: values, gradients, steps, collectives.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
mod axes;
mod dtypes;
mod errors;
mod frozen;
pub(crate) mod harness;
mod no_sync;
mod overlap;
mod passes;
mod results;
mod training;
mod unlike;
