//! Schedules as tables of text, as PyTorch writes them: a line a rank, an action a cell, nothing in a cell for an idle
//! step, no header.
use super::{Action, Edges, Program, Schedule};
use crate::{Error, Result};
use itertools::Itertools;

/// The actions of each rank, as they are in the text and not checked any further.
///
/// Blank lines at the end are none, since every rank has actions.
///
/// # Errors
/// If a cell holds no action; it is named by rank and position.
pub fn parse_csv(text: &str) -> Result<Vec<Vec<Option<Action>>>> {
    let cell = |rank: usize, position: usize, cell: &str| match cell.trim() {
        "" => Ok(None),
        action => action.parse().map(Some).map_err(|error| {
            let Error::Schedule(said) = error else { return error };
            Error::Schedule(format!("rank {rank}, position {position}: {said}"))
        }),
    };
    let line = |(rank, line): (usize, &str)| line.split(',').enumerate().map(|(i, text)| cell(rank, i, text)).collect();
    text.trim_end().lines().enumerate().map(line).collect()
}

fn write_csv<'a, L: IntoIterator<Item = Option<&'a Action>>>(ranks: impl Iterator<Item = L>) -> String {
    let cell = |action: Option<&Action>| action.map(Action::to_string).unwrap_or_default();
    ranks.map(|actions| actions.into_iter().map(cell).join(",") + "\n").collect()
}

impl Schedule {
    /// A schedule out of what PyTorch calls the `compute_only` format.
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
    /// If a cell is no action, and as [`Schedule::new`].
    pub fn from_csv(text: &str) -> Result<Self> {
        Self::new(parse_csv(text)?)
    }

    /// The text for [`from_csv`](Self::from_csv).
    pub fn to_csv(&self) -> String {
        write_csv(self.ranks().iter().map(|actions| actions.iter().map(Option::as_ref)))
    }
}

impl Program {
    /// A program out of what PyTorch calls the `compute_comms` format, where each stage gives to the next.
    ///
    /// # Errors
    /// If a cell is no action, and as [`Program::new`].
    pub fn from_csv(text: &str) -> Result<Self> {
        let ranks = parse_csv(text)?;
        let computes = || ranks.iter().flatten().flatten().flat_map(Action::computes);
        let stages = computes().map(|compute| compute.stage).unique().count();
        let ranks = ranks.iter().map(|actions| actions.iter().flatten().copied().collect()).collect();
        Self::new(ranks, Edges::chain(stages))
    }

    /// The text for [`from_csv`](Self::from_csv).
    pub fn to_csv(&self) -> String {
        write_csv(self.ranks().iter().map(|actions| actions.iter().map(Some)))
    }
}
