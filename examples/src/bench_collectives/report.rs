//! The program's report: a table for people, one JSON object for programs.

use comfy_table::Cell;
use serde::Serialize;

use super::args::ByteSize;
use crate::launch::BackendName;
use crate::table::{grouped, number, table};

/// The JSON object.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Number of ranks.
    pub world: usize,
    /// Microseconds until a flag that one thread sets is seen by another.
    pub flag_us: f64,
    /// An all_reduce of threads without all that a process group adds, at the smallest size, if it is small.
    pub bare_round: Option<BareRound>,
    /// The backend.
    pub backend: BackendName,
    /// One row per op and size, in the order measured.
    pub rows: Vec<Row>,
}

/// An all_reduce of threads that only meet, add up, and meet again.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct BareRound {
    /// Bytes of each thread's input.
    pub bytes: usize,
    /// Median over the rounds of the slowest thread's microseconds.
    pub median_us: f64,
}

/// One op at one size.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The name of the op.
    pub op: &'static str,
    /// Bytes of each rank's input.
    pub bytes: usize,
    /// Median over the rounds of the slowest rank's microseconds; half a ping-pong for messages.
    pub median_us: f64,
    /// Microseconds of plain memory copies that move as many bytes.
    pub floor_us: f64,
    /// Number of rounds.
    pub rounds: usize,
}

impl Report {
    /// Returns the table for people.
    pub fn table(&self) -> String {
        let mut table = table(&["op", "input"], &["median µs", "floor µs", "of floor", "rounds"]);
        for row in &self.rows {
            let ratio = if row.floor_us > 0.0 {
                format!("{:.1}", row.median_us / row.floor_us)
            } else {
                "–".to_owned()
            };
            table.add_row([
                Cell::new(row.op),
                number(ByteSize(row.bytes)),
                number(format_args!("{:.1}", row.median_us)),
                number(format_args!("{:.1}", row.floor_us)),
                number(ratio),
                number(grouped(row.rounds)),
            ]);
        }
        let each = if self.backend == BackendName::Threads { "a thread" } else { "a process" };
        let flag = format!("A flag passes from one core to another in {:.2} µs.", self.flag_us);
        let bare = self.bare_round.map_or_else(String::new, |BareRound { bytes, median_us }| {
            let size = ByteSize(bytes);
            format!("\nThreads that only meet, add {size} up, and meet again take {median_us:.1} µs.")
        });
        format!("{} ranks, each {each}:\n{table}\n{flag}{bare}", self.world)
    }
}
