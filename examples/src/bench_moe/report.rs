//! The program's report: a table for people, one JSON object for programs.

use comfy_table::Cell;
use serde::Serialize;

use crate::table::{grouped, number, table};

/// The JSON object.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// One row for each routing.
    pub rows: Vec<Row>,
}

/// One routing.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The number of ranks.
    pub ranks: usize,
    /// `uniform` or `zipf`.
    pub routing: &'static str,
    /// The slowest rank's median time of a forward and a backward pass, in milliseconds.
    pub ms: f64,
    /// The tokens that travel from one rank to another, and back.
    pub rows_sent: usize,
}

impl Report {
    /// Returns the table for people.
    pub fn table(&self) -> String {
        let mut table = table(&["routing"], &["ranks", "ms", "rows sent"]);
        for row in &self.rows {
            let ms = number(format_args!("{:.2}", row.ms));
            table.add_row([Cell::new(row.routing), number(row.ranks), ms, number(grouped(row.rows_sent))]);
        }
        format!("A mixture of experts, forward and backward:\n{table}")
    }
}
