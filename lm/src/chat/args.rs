//! The command line of conversations.

use clap::Args;
use examples::cli::{Checked, require};

/// The flags of conversations.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
pub struct ChatArgs {
    /// Apply the chat template of the model to --prompt; without --prompt, hold a conversation: each line of stdin is a
    /// message
    #[arg(long, help_heading = "Text")]
    pub chat: bool,

    /// The system message of --chat
    #[arg(long, value_name = "TEXT", help_heading = "Text")]
    pub system: Option<String>,

    /// The most tokens of a conversation [default: 4096, or the longest sequence of the model]
    #[arg(long, value_name = "N", help_heading = "Text")]
    pub context: Option<usize>,
}

/// The room of a conversation, if the command line does not say.
const CONTEXT: usize = 4096;

impl ChatArgs {
    /// Checks the flags; `generates` says whether the command writes text, `has_prompt` whether there is `--prompt`.
    ///
    /// # Errors
    /// A sentence with the flag and a remedy.
    pub(crate) fn validate(&self, generates: bool, has_prompt: bool) -> Checked {
        require!(generates || !self.chat, "--chat is for generate: leave it out.");
        require!(self.chat || self.system.is_none(), "--system is for conversations: give --chat too.");
        require!(
            self.context.is_none() || (self.chat && !has_prompt),
            "--context is for conversations: give --chat and no --prompt, or leave it out."
        );
        require!(self.context != Some(0), "--context is 0: give at least 1.");
        Ok(())
    }

    /// Returns the most tokens of a conversation with a model whose sequences have up to `longest` tokens.
    pub fn room(&self, longest: usize) -> usize {
        self.context.unwrap_or(CONTEXT).min(longest)
    }
}
