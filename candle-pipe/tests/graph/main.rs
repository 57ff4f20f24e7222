//! Declared models, cut anywhere, against the same models written down plainly.
mod common;
mod errors;
mod models;
mod parity;
mod policies;
mod random;
mod sharded;
mod splits;
mod tapes;
