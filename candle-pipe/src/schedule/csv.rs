//! Schedules as CSV in PyTorch's format: one line per rank, one action per cell, an empty cell for an idle step, no
//! header.
use super::{Action, Edges, Program, Schedule};
use crate::{Error, Result};
use itertools::Itertools;

/// Returns the actions of each rank as in the text, without further checks.
///
/// Blank lines at the end are ignored, since every rank has actions; so is a byte order mark at the start.
///
/// # Errors
/// If a cell is not an action; the error names its rank and position.
pub fn parse_csv(text: &str) -> Result<Vec<Vec<Option<Action>>>> {
    let cell = |rank: usize, position: usize, cell: &str| match cell.trim() {
        "" => Ok(None),
        action => action.parse().map(Some).map_err(|error| {
            let Error::Schedule(said) = error else { return error };
            Error::Schedule(format!("rank {rank}, position {position}: {said}"))
        }),
    };
    let line = |(rank, line): (usize, &str)| {
        line.split(',').enumerate().map(|(i, text)| cell(rank, i, text)).collect()
    };
    text.trim_start_matches('\u{feff}').trim_end().lines().enumerate().map(line).collect()
}

fn write_csv<'a, L: IntoIterator<Item = Option<&'a Action>>>(ranks: impl Iterator<Item = L>) -> String {
    let cell = |action: Option<&Action>| action.map(Action::to_string).unwrap_or_default();
    ranks.map(|actions| actions.into_iter().map(cell).join(",") + "\n").collect()
}

impl Schedule {
    /// Parses a schedule in PyTorch's `compute_only` format.
    ///
    /// ```
    /// use candle_pipe::schedule::Schedule;
    ///
    /// let schedule = Schedule::from_csv("0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n")?;
    /// assert_eq!((schedule.stages(), schedule.microbatches()), (2, 2));
    /// # Ok::<(), candle_pipe::Error>(())
    /// ```
    ///
    /// # Errors
    /// If a cell is not an action, and the errors of [`Schedule::new`].
    pub fn from_csv(text: &str) -> Result<Self> {
        Self::new(parse_csv(text)?)
    }

    /// Returns the text for [`from_csv`](Self::from_csv).
    pub fn to_csv(&self) -> String {
        write_csv(self.ranks().iter().map(|actions| actions.iter().map(Option::as_ref)))
    }
}

impl Program {
    /// Parses a program in PyTorch's `compute_comms` format, where each stage sends to the next.
    ///
    /// # Errors
    /// If a cell is not an action, and the errors of [`Program::new`].
    pub fn from_csv(text: &str) -> Result<Self> {
        let ranks = parse_csv(text)?;
        let computes = || ranks.iter().flatten().flatten().flat_map(Action::computes);
        let stages = computes().map(|compute| compute.stage).unique().count();
        let ranks = ranks.iter().map(|actions| actions.iter().flatten().copied().collect()).collect();
        Self::new(ranks, Edges::chain(stages))
    }

    /// Returns the text for [`from_csv`](Self::from_csv).
    pub fn to_csv(&self) -> String {
        write_csv(self.ranks().iter().map(|actions| actions.iter().map(Some)))
    }
}
