//! The command-line arguments of scoring.

use std::io::{self, IsTerminal};
use std::path::PathBuf;

use candle_lm::score::windows::WINDOW;
use candle_shard::regular;
use clap::Args;
use examples::cli::{Checked, UsageError, require};

/// The scoring options; the comments on the fields are the program's help.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Scoring")]
pub struct ScoreArgs {
    /// The text to score [default: stdin]
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,

    /// The most tokens that the model sees at once [default: what the model takes, at most 2048]
    #[arg(long, value_name = "N")]
    pub window: Option<usize>,

    /// Tokens from the start of a window to the start of the next. With fewer than --window, tokens are scored with
    /// context from the window before [default: half of the window]
    #[arg(long, value_name = "N")]
    pub stride: Option<usize>,
}

impl ScoreArgs {
    /// Checks everything that does not depend on the model.
    ///
    /// # Errors
    /// A sentence with the flag, its value and a remedy.
    pub fn validate(&self) -> Checked {
        if let Some(window) = self.window {
            require!(
                window >= 2,
                "--window {window} has no token with another one before it: give at least 2."
            );
        }
        require!(self.stride != Some(0), "--stride is 0: give at least 1.");
        Ok(())
    }

    /// Returns the window and the stride for a model that takes `longest` tokens.
    ///
    /// # Errors
    /// If the window is longer than that, or the stride longer than the window.
    pub fn sizes(&self, longest: usize) -> Checked<(usize, usize)> {
        let window = self.window.unwrap_or_else(|| WINDOW.min(longest).max(2));
        require!(window <= longest, "--window {window} is too long: the model takes {longest} tokens.");
        let stride = self.stride.unwrap_or(window / 2);
        require!(
            stride <= window,
            "--stride {stride} is longer than the window of {window}, and tokens between them would not count: give at most {window}."
        );
        Ok((window, stride))
    }

    /// Returns the text to score.
    ///
    /// # Errors
    /// If it cannot be read, or is empty.
    pub fn read(&self) -> Checked<String> {
        let text = match &self.text {
            Some(path) => regular::read_named(path)
                .map_err(|error| UsageError(format!("--text {} cannot be read: {error}.", path.display())))?,
            None => {
                require!(
                    !io::stdin().is_terminal(),
                    "score has no text: give --text FILE, or a text on stdin."
                );
                let read = regular::read_stream(io::stdin().lock(), regular::STREAM);
                read.map_err(|error| UsageError(format!("the text on stdin cannot be read: {error}.")))?
            }
        };
        require!(!text.is_empty(), "the text to score is empty: give some.");
        Ok(text)
    }
}
