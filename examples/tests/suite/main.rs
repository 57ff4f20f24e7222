//! The integration tests of the programs, in one binary: each file or folder is a subject.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
mod bench_attention;
mod bench_collectives;
mod bench_embedding;
mod bench_loading;
mod bench_moe;
mod schedules;
mod sharded_embedding;
mod sharded_embedding_parts;
mod toy_parts;
mod toy_pipeline;
mod toy_transformer;

test_utils::settle_threads!();
