//! Sharded embeddings: the numbers, tables and gradients of one device.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
mod cases;
mod check;
mod errors;
mod facts;
mod faults;
mod layers;
mod lists;
mod oracle;
mod random;
