//! What a conversation leaves behind: its turns, also if it ends with an error.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Error, Result};
use examples::cli::{self, Output};
use parking_lot::Mutex;
use serde::Serialize;

use super::converse::Turn;

/// The turns of a conversation, for `--json`.
#[derive(Debug)]
pub struct Transcript<'a> {
    output: Output<'a>,
    turns: Mutex<Vec<Turn>>,
    has_warned: AtomicBool,
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
        Self { output, turns: Mutex::default(), has_warned: AtomicBool::new(false) }
    }

    /// Adds a turn. A file has all turns from then on, however the program ends; if it cannot be written, it keeps those
    /// that it has, and the user is told once.
    pub fn add(&self, turn: &Turn) {
        let mut turns = self.turns.lock();
        turns.push(turn.clone());
        if self.output.is_file()
            && let Err(error) = self.output.write_json(&*turns)
            && !self.has_warned.swap(true, Ordering::Relaxed)
        {
            // The end of the conversation tries again.
            cli::tell("warning", format_args!("--json has not got the last turn: {error:#}."));
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
