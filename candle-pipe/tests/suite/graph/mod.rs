//! Declared models, cut anywhere, against the same models written down plainly.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
mod captured;
mod common;
mod declared;
mod errors;
mod inputs;
mod masks;
mod models;
mod parity;
mod policies;
mod random;
mod sharded;
mod splits;
mod state;
mod tapes;
