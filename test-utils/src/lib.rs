//! The multi-rank test harness and the toy models of the candle distributed stack.
mod harness;
pub mod model_args;
pub mod reference;
pub mod reference_mlp;
mod reference_ops;
mod reference_params;
mod scratch;
pub mod toy;

pub use harness::{Ranks, on_ranks};
pub use scratch::Scratch;
