//! The program's report: a table for people, one JSON object for programs.

use comfy_table::Cell;
use serde::Serialize;

use crate::table::{number, table};

/// The JSON object.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// One row per op and mesh, in the order measured.
    pub rows: Vec<Row>,
}

/// One op on one mesh.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The name of the op.
    pub op: &'static str,
    /// The number of axes of the mesh.
    pub axes: usize,
    /// Nanoseconds of the plain op on the shard.
    pub plain_ns: f64,
    /// The overhead of the distributed op, in nanoseconds.
    pub warm_ns: f64,
    /// The overhead of its first call, in nanoseconds.
    pub first_ns: f64,
}

impl Report {
    /// Returns the table for people.
    pub fn table(&self) -> String {
        let mut table = table(&["op"], &["axes", "plain ns", "warm ns", "first ns"]);
        for row in &self.rows {
            let ns = |ns: f64| number(format_args!("{ns:.0}"));
            table.add_row([
                Cell::new(row.op),
                number(row.axes),
                ns(row.plain_ns),
                ns(row.warm_ns),
                ns(row.first_ns),
            ]);
        }
        format!("What distributed ops take on top of plain ones:\n{table}")
    }
}
