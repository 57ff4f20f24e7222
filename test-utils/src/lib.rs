//! The multi-rank test harness and the toy models of the candle distributed stack.
mod harness;

pub use harness::{Ranks, on_ranks};
