//! Measures how a rank loads its shard of a weight, against candle's own sharded loading.

pub mod args;
pub mod measure;
pub mod report;
