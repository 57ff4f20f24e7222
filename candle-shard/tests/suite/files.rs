//! The tests of checkpoints and weight files.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
mod checkpoint;
#[allow(dead_code, unused_imports)] // each binary uses some of it
mod common;
mod hostile;
mod weights;

test_utils::settle_threads!();
