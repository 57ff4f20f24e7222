//! The program's report: a table for people, one JSON object for programs.

use comfy_table::Cell;
use serde::Serialize;

use crate::table::{grouped, number, table};

/// The JSON object.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Number of ranks.
    pub world: usize,
    /// Rows of the table.
    pub vocab: usize,
    /// Columns of the table.
    pub dim: usize,
    /// Ids that each rank looks up.
    pub ids: usize,
    /// One row per sharding, limit and phase, in the order measured.
    pub rows: Vec<Row>,
}

/// One phase of one table.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// `row` or `column`.
    pub sharding: &'static str,
    /// Whether rows that are too long are shortened.
    pub max_norm: bool,
    /// `forward` or `step`.
    pub phase: &'static str,
    /// Median over the rounds of the slowest rank's milliseconds.
    pub ms: f64,
    /// Number of rounds.
    pub rounds: usize,
}

impl Report {
    /// Returns the table for people.
    pub fn table(&self) -> String {
        let mut table = table(&["table cut by", "max_norm", "phase"], &["ms", "ids/s", "rounds"]);
        for row in &self.rows {
            let ids_per_second = (self.world * self.ids) as f64 * 1e3 / row.ms;
            table.add_row([
                Cell::new(row.sharding),
                Cell::new(if row.max_norm { "yes" } else { "no" }),
                Cell::new(row.phase),
                number(format_args!("{:.3}", row.ms)),
                number(grouped(ids_per_second as usize)),
                number(grouped(row.rounds)),
            ]);
        }
        let [vocab, dim, ids] = [self.vocab, self.dim, self.ids].map(grouped);
        format!(
            "A table of {vocab} × {dim}, {ids} ids on each of {} ranks, which are threads:\n{table}",
            self.world
        )
    }
}
