//! Measures how fast a rank loads its shard of a weight, compared with candle's own sharded loading.

pub mod args;
pub mod measure;
pub mod report;
