//! Pipeline parallelism for [candle](https://github.com/huggingface/candle): models cut into stages, batches into
//! microbatches, and schedules that keep the stages busy.
mod error;
pub mod microbatch;
mod nearest;
pub mod schedule;
mod value;

pub use error::{Error, Result};
pub use value::{Kwargs, Path, Value};
