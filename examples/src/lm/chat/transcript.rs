//! What a conversation leaves behind: its turns, also if it ends with an error.

use anyhow::{Error, Result};
use parking_lot::Mutex;
use serde::Serialize;

use super::converse::Turn;
use crate::cli::Output;

/// The turns of a conversation, for `--json`.
#[derive(Debug)]
pub struct Transcript<'a> {
    output: Output<'a>,
    turns: Mutex<Vec<Turn>>,
}

/// One object of the list that is written.
#[derive(Serialize)]
#[serde(untagged)]
enum Entry<'a> {
    Turn(&'a Turn),
    /// Why the conversation ended, behind all turns.
    Error {
        error: String,
    },
}

impl<'a> Transcript<'a> {
    /// Begins without turns.
    pub fn new(output: Output<'a>) -> Self {
        Self { output, turns: Mutex::default() }
    }

    /// Adds a turn. A file has all turns from then on, however the program ends.
    pub fn add(&self, turn: &Turn) {
        let mut turns = self.turns.lock();
        turns.push(turn.clone());
        if self.output.is_file() {
            // If that fails, the end of the conversation fails too, and says so.
            self.output.write_json(&*turns).ok();
        }
    }

    /// Writes all turns, and behind them the error that ended the conversation, if one did.
    ///
    /// # Errors
    /// If they cannot be written.
    pub fn finish(&self, error: Option<&Error>) -> Result<()> {
        let turns = self.turns.lock();
        let error = error.map(|error| Entry::Error { error: format!("{error:#}") });
        self.output.write_json(&turns.iter().map(Entry::Turn).chain(error).collect::<Vec<_>>())
    }
}
