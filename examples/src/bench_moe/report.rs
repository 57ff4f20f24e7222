//! The program's report: a table for people, one JSON object for programs.

use comfy_table::Cell;
use serde::Serialize;

use crate::table::{grouped, number, table};

/// The JSON object.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// One row for each routing, and another one for each routing that a bias balances.
    pub rows: Vec<Row>,
}

/// One routing.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The number of ranks.
    pub ranks: usize,
    /// `uniform` or `zipf`.
    pub routing: &'static str,
    /// Whether a bias balances the choice.
    pub balanced: bool,
    /// The slowest rank's median time of a forward and a backward pass, in milliseconds.
    pub ms: f64,
    /// The tokens that travel from one rank to another, and back.
    pub rows_sent: usize,
    /// The rows that the busiest rank computes, as a multiple of the mean.
    pub busiest: f64,
}

impl Report {
    /// Returns the table for people.
    pub fn table(&self) -> String {
        let mut table = table(&["routing", "bias"], &["ranks", "ms", "rows sent", "busiest rank / mean"]);
        for row in &self.rows {
            let ms = number(format_args!("{:.2}", row.ms));
            let bias = Cell::new(if row.balanced { "balances" } else { "none" });
            let busiest = number(format_args!("{:.3}", row.busiest));
            let sent = number(grouped(row.rows_sent));
            table.add_row([Cell::new(row.routing), bias, number(row.ranks), ms, sent, busiest]);
        }
        format!("A mixture of experts, forward and backward:\n{table}")
    }
}
