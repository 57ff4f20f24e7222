//! The command-line arguments of batches.

use std::path::PathBuf;

use clap::Args;
use examples::cli::{Checked, require};

/// The options of batches; the comments on the fields are the program's help.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Text")]
pub struct BatchArgs {
    /// Continue each line of this file, or the prompt of each JSON object {"prompt": .., "max_tokens": ..} where the first
    /// line is one; --json then writes a line for each, and a last one with the numbers of the run
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "chat"])]
    pub prompts: Option<PathBuf>,

    /// Tokens for which the cache has room in each text, which ends there [default: the prompt and --max-tokens, as far as
    /// the model takes them]
    #[arg(long, value_name = "N")]
    pub cache_tokens: Option<usize>,
}

/// The default of `--batch` for prompts.
pub const SLOTS: usize = 8;

const MOST_SLOTS: usize = 4096;

impl BatchArgs {
    /// Checks everything that does not depend on the model and the file; `batch` is the value of `--batch`.
    ///
    /// # Errors
    /// A sentence with the flag, its value and a remedy.
    pub fn validate(&self, batch: Option<usize>) -> Checked {
        require!(
            self.cache_tokens.is_none_or(|tokens| tokens > 1),
            "--cache-tokens has room for no text: give at least 2."
        );
        if self.prompts.is_none() {
            return Ok(());
        }
        let slots = batch.unwrap_or(SLOTS);
        require!(slots > 0, "--batch is 0: give at least 1.");
        require!(slots <= MOST_SLOTS, "--batch {slots} is too large: give at most {MOST_SLOTS}.");
        Ok(())
    }
}
