//! The integration tests of graphs, schedules and the runtime, in one binary: each file or folder is a subject.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
mod graph;
mod microbatches;
mod random_model;
mod runtime;
mod schedules;
mod values;

test_utils::settle_threads!();
