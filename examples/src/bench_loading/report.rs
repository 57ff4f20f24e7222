//! The program's report: a table for people, one JSON object for programs.

use comfy_table::Cell;
use serde::Serialize;

use crate::table::{grouped, number, table};

/// The JSON object.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Number of ranks over which weights are sharded.
    pub world: usize,
    /// One row per shape and dim, in the order measured.
    pub rows: Vec<Row>,
}

/// One shape cut on one dim.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Rows of the weight.
    pub rows: usize,
    /// Columns of the weight.
    pub columns: usize,
    /// The sharded dim.
    pub dim: usize,
    /// Bytes of the shard.
    pub shard_bytes: usize,
    /// Bytes that our loading reads.
    pub bytes_read: u64,
    /// Median milliseconds of our loading.
    pub ours_ms: f64,
    /// Bytes that are read and compared with digests, if the weight is in a checkpoint.
    pub bytes_compared: u64,
    /// Median milliseconds of that.
    pub compared_ms: f64,
    /// These bytes, in 10⁹, by this time in seconds.
    pub compared_gb_per_s: f64,
    /// Median milliseconds of candle's.
    pub candle_ms: f64,
    /// candle's time divided by ours.
    pub ratio: f64,
}

impl Report {
    /// Returns the table for people.
    pub fn table(&self) -> String {
        let numbers = [
            "dim",
            "shard bytes",
            "bytes read",
            "ours ms",
            "bytes compared",
            "compared ms",
            "GB/s",
            "candle ms",
            "ratio",
        ];
        let mut table = table(&["weight"], &numbers);
        for row in &self.rows {
            table.add_row([
                Cell::new(format!("{} x {}", row.rows, row.columns)),
                number(row.dim),
                number(grouped(row.shard_bytes)),
                number(grouped(row.bytes_read as usize)),
                number(format_args!("{:.2}", row.ours_ms)),
                number(grouped(row.bytes_compared as usize)),
                number(format_args!("{:.2}", row.compared_ms)),
                number(format_args!("{:.1}", row.compared_gb_per_s)),
                number(format_args!("{:.2}", row.candle_ms)),
                number(format_args!("{:.1}", row.ratio)),
            ]);
        }
        format!("Loading one of {} shards:\n{table}", self.world)
    }
}
