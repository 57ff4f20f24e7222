//! The command line of conversations.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use candle_lm::chat::ChatTemplate;
use candle_lm::files::Files;
use candle_shard::regular;
use clap::Args;
use serde_json::Value;

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

    /// Variable of the chat template, for example enable_thinking=false; may be given several times. The value is JSON, or else a text
    #[arg(long, value_name = "NAME=VALUE", help_heading = "Text")]
    pub chat_arg: Vec<String>,

    /// Functions that the model may call, for the chat template: a file with a list of them in JSON. Calls are printed, not made
    #[arg(long, value_name = "FILE", help_heading = "Text")]
    pub tools: Option<PathBuf>,

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
        require!(self.chat || self.chat_arg.is_empty(), "--chat-arg is for conversations: give --chat too.");
        require!(self.chat || self.tools.is_none(), "--tools is for conversations: give --chat too.");
        for given in &self.chat_arg {
            let is_pair = given.split_once('=').is_some_and(|(name, _)| !name.is_empty());
            let python = [("True", "true"), ("False", "false"), ("None", "null")];
            let spelled = python.iter().find(|(python, _)| given.ends_with(&format!("={python}")));
            require!(
                spelled.is_none(),
                "--chat-arg {given} would be a text: give {}.",
                spelled.map_or("", |(_, json)| json)
            );
            require!(is_pair, "--chat-arg {given} is no NAME=VALUE: give for example enable_thinking=false.");
        }
        require!(
            self.context.is_none() || (self.chat && !has_prompt),
            "--context is for conversations: give --chat and no --prompt, or leave it out."
        );
        require!(self.context != Some(0), "--context is 0: give at least 1.");
        Ok(())
    }

    /// Returns the chat template of the model with the variables of the command line; `None` without `--chat`.
    ///
    /// # Errors
    /// If the model has none, it does not read one of the variables, or the file of tools cannot be read.
    pub fn template(&self, files: &Files) -> Result<Option<ChatTemplate>> {
        if !self.chat {
            return Ok(None);
        }
        let mut template = files.chat_template()?;
        // Some models have another template for tools.
        if let Some(path) = &self.tools {
            let read = || -> Result<String> {
                let json = regular::read_text(path, regular::CONFIG)?;
                let tools: Value = serde_json::from_str(&json)?;
                ensure!(tools.is_array(), "it is no list of functions");
                Ok(json)
            };
            let json = read().with_context(|| format!("--tools {}", path.display()))?;
            template = template.with_variable("tools", &json).context("--tools")?;
        }
        for (name, value) in self.chat_arg.iter().filter_map(|given| given.split_once('=')) {
            let json = match serde_json::from_str::<Value>(value) {
                Ok(_) => value.to_owned(),
                Err(_) => Value::from(value).to_string(),
            };
            template = template.with_variable(name, &json).with_context(|| format!("--chat-arg {name}"))?;
        }
        Ok(Some(template))
    }

    /// Returns the most tokens of a conversation with a model whose sequences have up to `longest` tokens.
    pub fn room(&self, longest: usize) -> usize {
        self.context.unwrap_or(CONTEXT).min(longest)
    }
}
