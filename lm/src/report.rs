//! What the Llama program tells when the text is written.

use candle_lm::generate::{Completion, Stop, Task};
use examples::table::grouped;
use itertools::Itertools;
use serde::Serialize;

/// The numbers of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The prompt and what was written.
    pub text: String,
    /// The tokens of the prompt.
    pub prompt_tokens: usize,
    /// The tokens that were written.
    pub new_tokens: usize,
    /// Why there are no more.
    pub stop: Stop,
    /// The seconds in which the slowest rank read its part of the model.
    pub load_seconds: f64,
    /// What parameters are held and computed in.
    pub dtype: &'static str,
    /// The parameters that each rank holds as floats.
    pub parameters: Vec<usize>,
    /// The tokens that were written.
    pub tokens: Vec<u32>,
    /// The tokens with the largest logits at the end of the prompt, and these.
    pub logits_top: Vec<(u32, f32)>,
    /// Tokens of the prompt a second, until the first new token.
    pub prompt_tokens_per_s: f64,
    /// New tokens a second, after the first.
    pub tokens_per_s: f64,
    /// The ranks.
    pub ranks: usize,
    /// The compute threads of each rank.
    pub threads: usize,
    /// The bytes of all weights that each rank holds.
    pub bytes_per_rank: Vec<usize>,
}

impl Report {
    /// The numbers of what the ranks did.
    pub fn new(text: String, task: &Task, ranks: &[Completion]) -> Self {
        let per_second =
            |count: usize, seconds: f64| if seconds > 0.0 { count as f64 / seconds } else { 0.0 };
        let first = &ranks[0];
        Self {
            text,
            prompt_tokens: task.prompt.len(),
            new_tokens: first.tokens.len(),
            stop: first.stop,
            load_seconds: ranks.iter().map(|rank| rank.load).fold(0.0, f64::max),
            dtype: task.held.dtype.as_str(),
            parameters: ranks.iter().map(|rank| rank.parameters).collect(),
            tokens: first.tokens.clone(),
            logits_top: first.logits_top.clone(),
            prompt_tokens_per_s: per_second(task.prompt.len(), first.first),
            tokens_per_s: per_second(first.tokens.len().saturating_sub(1), first.rest),
            ranks: ranks.len(),
            threads: candle_core::utils::get_num_threads(),
            bytes_per_rank: ranks.iter().map(|rank| rank.bytes).collect(),
        }
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let parameters = self.parameters.iter().map(|&count| grouped(count)).dedup().join(", ");
        let stop = match self.stop {
            Stop::End => "the model ended the text",
            Stop::Length => "--max-tokens are written",
            Stop::Text => "a text of --stop came",
            Stop::Context => "the model takes no longer texts",
        };
        write!(
            f,
            "{} ranks, {} threads and {parameters} parameters each in {}, read in {:.1} s: {} tokens of prompt at {:.1} a second, {} new ones at {:.1} a second; {stop}",
            self.parameters.len(),
            self.threads,
            self.dtype,
            self.load_seconds,
            self.prompt_tokens,
            self.prompt_tokens_per_s,
            self.new_tokens,
            self.tokens_per_s
        )
    }
}
