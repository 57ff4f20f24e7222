//! Writing on from a prompt.

use anyhow::{Result, ensure};
use candle_dist::RankContext;
use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::engine::ModelOptions;
use crate::files::Files;
use crate::sample::Sampling;
use crate::session::Session;
use crate::tokens;

/// What to write, and how.
#[derive(Clone, Debug)]
pub struct Task {
    /// The tokens to go on from.
    pub prompt: Vec<u32>,
    /// The most tokens to write.
    pub most: usize,
    /// The most tokens for which the cache has room, if that is bounded; the text ends there.
    pub cache_tokens: Option<usize>,
    /// How they are chosen.
    pub sampling: Sampling,
    /// How the model is held and cut.
    pub held: ModelOptions,
}

impl Task {
    /// Checks that a model of this config can do it.
    ///
    /// # Errors
    /// If the prompt is empty, longer than the model's longest sequence, or has tokens that the model does not know.
    pub fn check(&self, config: &Config) -> Result<()> {
        let (tokens, longest) = (self.prompt.len(), config.longest());
        ensure!(tokens > 0, "the prompt has no tokens; give some text to go on from");
        ensure!(
            tokens < longest,
            "the prompt has {tokens} tokens, and the model takes {longest}; shorten it"
        );
        let room = self.cache_tokens.unwrap_or(usize::MAX);
        ensure!(tokens < room, "the prompt has {tokens} tokens, and --cache-tokens is {room}; give more");
        tokens::check(&self.prompt, config.vocab_size)
    }

    /// The most tokens of the sequence, for which the cache has room.
    pub fn room(&self, config: &Config) -> usize {
        let asked = self.prompt.len().saturating_add(self.most).min(self.cache_tokens.unwrap_or(usize::MAX));
        asked.min(config.longest())
    }
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stop {
    /// The model gave a token that ends texts.
    End,
    /// There are as many tokens as were asked for.
    Length,
    /// The model takes no longer sequences.
    Context,
    /// A text came that ends what is written.
    Text,
}

/// What a rank did.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Completion {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// Why there are no more.
    pub stop: Stop,
    /// The seconds in which this rank's part of the model was read.
    pub load: f64,
    /// The seconds from there to the first token.
    pub first: f64,
    /// The seconds from there to the last.
    pub rest: f64,
    /// The parameters that this rank holds as floats.
    pub parameters: usize,
    /// The bytes of all weights that this rank holds.
    pub bytes: usize,
    /// The tokens with the largest logits at the end of the prompt, and these.
    pub logits_top: Vec<(u32, f32)>,
}

/// Writes on from the prompt, on all ranks in `stages` stages, and shows to `show` that the model is read, and then each
/// token, until it returns false.
///
/// Every rank calls it.
///
/// # Errors
/// If the stages do not divide the ranks, or there are more than the model can be cut into; if the model's logits are no
/// numbers; those of the model and of `show`.
pub fn generate(
    ctx: &RankContext,
    stages: usize,
    files: &Files,
    task: &Task,
    mut show: impl FnMut(Option<u32>) -> Result<bool>,
) -> Result<Completion> {
    let mut session = Session::open(ctx, stages, files, task, task.room(&files.config))?;
    show(None)?;
    session.write(task, |token| show(Some(token)))
}
