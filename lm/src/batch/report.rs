//! What is told of a batch.

use std::fmt;

use candle_lm::batch::{BatchOutput, PromptBatch};
use candle_lm::generate::Stop;
use examples::table::grouped;
use serde::Serialize;

/// A line of the JSON output.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum JsonLine<'a> {
    /// One for each text.
    Text(Line<'a>),
    /// The last line.
    Summary(&'a Summary),
}

/// One text: a line of the JSON output.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Line<'a> {
    /// The line of the prompt in its file.
    pub line: usize,
    /// The prompt.
    pub prompt: &'a str,
    /// The prompt and what was written.
    pub text: String,
    /// The tokens of the prompt.
    pub prompt_tokens: usize,
    /// The tokens that were written.
    pub tokens: &'a [u32],
    /// Why there are no more.
    pub stop: Stop,
}

/// The numbers of a run: the last line of the JSON output.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// The texts.
    pub texts: usize,
    /// The texts that are written at once, at most.
    pub slots: usize,
    /// The passes of the model.
    pub passes: usize,
    /// The tokens of all prompts.
    pub prompt_tokens: usize,
    /// The tokens that were written.
    pub new_tokens: usize,
    /// The seconds of all passes.
    pub seconds: f64,
    /// The tokens that were written in a second.
    pub tokens_per_s: f64,
    /// The ranks.
    pub ranks: usize,
    /// The bytes of all weights that each rank holds.
    pub bytes_per_rank: Vec<usize>,
}

impl Summary {
    /// Returns the numbers of what the ranks did.
    pub fn new(batch: &PromptBatch, ranks: &[BatchOutput]) -> Self {
        let first = &ranks[0];
        let new_tokens = first.texts.iter().map(|(tokens, _)| tokens.len()).sum();
        Self {
            texts: batch.requests.len(),
            slots: batch.slots(),
            passes: first.passes,
            prompt_tokens: batch.requests.iter().map(|request| request.prompt.len()).sum(),
            new_tokens,
            seconds: first.seconds,
            tokens_per_s: if first.seconds > 0.0 { new_tokens as f64 / first.seconds } else { 0.0 },
            ranks: ranks.len(),
            bytes_per_rank: ranks.iter().map(|rank| rank.bytes).collect(),
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { texts, slots, passes, prompt_tokens, new_tokens, seconds, tokens_per_s, ranks, .. } = self;
        write!(
            f,
            "{texts} texts, up to {slots} at once on {ranks} ranks: {} tokens of prompts and {} new ones in {passes} passes and \
             {seconds:.1} s, {tokens_per_s:.1} new tokens a second",
            grouped(*prompt_tokens),
            grouped(*new_tokens)
        )
    }
}
