//! What is told of a text that was scored.

use std::fmt;

use examples::table::grouped;
use serde::Serialize;

/// The numbers of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The tokens of the text.
    pub tokens: usize,
    /// Those that were scored, which have others before them.
    pub scored: usize,
    /// The mean negative log-likelihood of a scored token, in nats.
    pub mean_nll: f64,
    /// Its exponential.
    pub perplexity: f64,
    /// The most tokens that the model saw at once.
    pub window: usize,
    /// From the start of a window to the start of the next.
    pub stride: usize,
    /// The windows.
    pub windows: usize,
    /// Scored tokens a second.
    pub tokens_per_s: f64,
    /// The seconds in which the slowest rank read its part of the model.
    pub load_seconds: f64,
    /// What parameters are held and computed in.
    pub dtype: &'static str,
    /// The ranks.
    pub ranks: usize,
    /// The bytes of all weights that each rank holds.
    pub bytes_per_rank: Vec<usize>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tokens, scored, mean_nll, perplexity, window, stride, windows, tokens_per_s, .. } = self;
        write!(
            f,
            "{} tokens, {} of them scored in {windows} windows of up to {window}, one every {stride}: {mean_nll:.5} nats each, \
             perplexity {perplexity:.4}; {tokens_per_s:.1} tokens a second on {} ranks",
            grouped(*tokens),
            grouped(*scored),
            self.ranks
        )
    }
}
