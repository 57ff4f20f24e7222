//! Pipeline parallelism for [candle](https://github.com/huggingface/candle): models cut into stages, batches into
//! microbatches, and schedules that keep the stages busy.
mod error;
mod nearest;
pub mod schedule;

pub use error::{Error, Result};
