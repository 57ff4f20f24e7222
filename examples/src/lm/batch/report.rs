//! What is told of a batch.

use std::fmt;

use serde::Serialize;

use super::run::{Batch, Ran};
use crate::lm::generate::Stop;
use crate::table::grouped;

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

/// The numbers of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    texts: usize,
    slots: usize,
    passes: usize,
    prompt_tokens: usize,
    new_tokens: usize,
    seconds: f64,
    bytes_per_rank: Vec<usize>,
}

impl Summary {
    /// Returns the numbers of what the ranks did.
    pub fn new(batch: &Batch, ranks: &[Ran]) -> Self {
        let first = &ranks[0];
        Self {
            texts: batch.requests.len(),
            slots: batch.slots(),
            passes: first.passes,
            prompt_tokens: batch.requests.iter().map(|request| request.prompt.len()).sum(),
            new_tokens: first.texts.iter().map(|(tokens, _)| tokens.len()).sum(),
            seconds: first.seconds,
            bytes_per_rank: ranks.iter().map(|rank| rank.bytes).collect(),
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { texts, slots, passes, prompt_tokens, new_tokens, seconds, bytes_per_rank } = self;
        let rate = if *seconds > 0.0 { *new_tokens as f64 / seconds } else { 0.0 };
        write!(
            f,
            "{texts} texts, up to {slots} at once on {} ranks: {} tokens of prompts and {} new ones in {passes} passes and \
             {seconds:.1} s, {rate:.1} new tokens a second",
            bytes_per_rank.len(),
            grouped(*prompt_tokens),
            grouped(*new_tokens)
        )
    }
}
