//! Scoring a text: how likely a model finds it.

pub mod windows;

use std::time::Instant;

use anyhow::{Result, ensure};
use candle_dist::RankContext;
use serde::{Deserialize, Serialize};

use crate::engine::{Engine, ModelOptions, Purpose};
use crate::files::Files;
use windows::Window;

/// What a rank measured.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct ScoreOutput {
    /// The sum of the negative logarithms of the probabilities of the scored tokens.
    pub nll: f64,
    /// The seconds in which this rank's part of the model was read.
    pub load: f64,
    /// The seconds of all windows.
    pub seconds: f64,
    /// The bytes of all weights that this rank holds.
    pub bytes: usize,
}

/// Scores windows of tokens, on all ranks in `stages` stages; `is_read` is called when the model is read. Every rank calls
/// it.
///
/// # Errors
/// Those of [`Engine::new`] and of the model, and one if the text has a probability of zero or none.
pub fn score(
    ctx: &RankContext,
    stages: usize,
    files: &Files,
    options: &ModelOptions,
    (tokens, windows): (&[u32], &[Window]),
    is_read: impl FnOnce(),
) -> Result<ScoreOutput> {
    let longest = windows.iter().map(|window| window.tokens.len()).max().unwrap_or(0);
    let engine = Engine::new(ctx, stages, files, options, Purpose::Score { window: longest })?;
    is_read();
    let began = Instant::now();
    let nll = nll(&engine, tokens, windows)?;
    let seconds = began.elapsed().as_secs_f64();
    Ok(ScoreOutput { nll, load: engine.load, seconds, bytes: engine.bytes })
}

/// Returns the sum of the negative logarithms of the probabilities of the scored tokens.
///
/// # Errors
/// Those of the model, and one if the text has a probability of zero or none.
pub(crate) fn nll(engine: &Engine, tokens: &[u32], windows: &[Window]) -> Result<f64> {
    let mut nll = 0.0;
    for Window { tokens: part, scored } in windows {
        let loss = engine.loss(&tokens[part.start..part.end - 1], &tokens[part.end - scored..part.end])?;
        let (start, end) = (part.start, part.end);
        ensure!(
            loss.is_finite(),
            "the loss of tokens {start} to {end} is {loss}; check the weights, or compute in a wider --dtype"
        );
        nll += loss;
    }
    Ok(nll)
}
