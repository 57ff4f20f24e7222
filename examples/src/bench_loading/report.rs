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
    /// Median milliseconds of candle's.
    pub candle_ms: f64,
    /// candle's time divided by ours.
    pub ratio: f64,
}

impl Report {
    /// Returns the table for people.
    pub fn table(&self) -> String {
        let mut table = table(&["weight"], &["dim", "shard bytes", "bytes read", "ours ms", "candle ms", "ratio"]);
        for row in &self.rows {
            table.add_row([
                Cell::new(format!("{} x {}", row.rows, row.columns)),
                number(row.dim),
                number(grouped(row.shard_bytes)),
                number(grouped(row.bytes_read as usize)),
                number(format_args!("{:.2}", row.ours_ms)),
                number(format_args!("{:.2}", row.candle_ms)),
                number(format_args!("{:.1}", row.ratio)),
            ]);
        }
        format!("Loading one of {} shards:\n{table}", self.world)
    }
}
