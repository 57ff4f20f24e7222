//! Pipeline parallelism for [candle](https://github.com/huggingface/candle): models cut into stages, batches into
//! microbatches, and schedules that keep the stages busy.
//!
//! Nothing is here yet: the crate holds its place in the workspace. What it will be is told in ARCHITECTURE.md.
