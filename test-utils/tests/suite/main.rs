//! The integration tests of the test utilities, in one binary: each file or folder is a subject.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
mod converter;
mod data_parallel;
mod dependencies;
mod floors;
mod functions;
mod mix;
mod mlp;
mod processes;
mod prove;
mod reference;
mod set_ups;
mod surface;
mod thread_locals;
mod transformer;

test_utils::settle_threads!();
