//! The tests of sharded tables: embeddings, tensors cut by ranks, gradients by rows.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
#[allow(dead_code, unused_imports)] // each binary uses some of it
mod common;
mod embedding;
mod sharded_tensor;
mod sparse;

test_utils::settle_threads!();
