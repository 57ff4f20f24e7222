//! The integration tests of the program and of candle-lm, in one binary: each file or folder is a subject.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
mod hostile;
mod lm;
mod lm_train;
mod sentence_embedding;
mod serve;

test_utils::settle_threads!();
