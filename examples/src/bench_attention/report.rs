//! The program's report: a table for people, one JSON object for programs.

use comfy_table::Cell;
use serde::Serialize;

use crate::table::{grouped, number, table};

/// The JSON object.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The forward pass, then the backward pass.
    pub rows: Vec<Row>,
}

/// One phase.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// How keys met queries.
    pub way: &'static str,
    /// The tokens of the sequence.
    pub length: usize,
    /// `forward` or `backward`.
    pub phase: &'static str,
    /// Compute threads of each rank.
    pub threads: usize,
    /// The slowest rank's median time in milliseconds.
    pub ms: f64,
    /// The bytes that the busiest rank passes to others.
    pub bytes: usize,
}

impl Report {
    /// Returns the table for people.
    pub fn table(&self) -> String {
        let mut table = table(&["way", "phase"], &["tokens", "threads", "ms", "bytes"]);
        for row in &self.rows {
            let ms = number(format_args!("{:.2}", row.ms));
            table.add_row([
                Cell::new(row.way),
                Cell::new(row.phase),
                number(grouped(row.length)),
                number(row.threads),
                ms,
                number(grouped(row.bytes)),
            ]);
        }
        format!("Causal attention of a cut sequence:\n{table}")
    }
}
