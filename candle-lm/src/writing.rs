//! One text that is being written.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use candle_core::{DType, Tensor};

use crate::generate::Stop;
use crate::sample::Sampler;

/// A text that is being written, token by token.
#[derive(Debug)]
pub(crate) struct TextWriter {
    sampler: Sampler,
    prompt: usize,
    most: usize,
    room: usize,
    /// The tokens that were written.
    pub(crate) tokens: Vec<u32>,
    /// The tokens with the largest logits at the end of the prompt, and these.
    pub(crate) logits_top: Vec<(u32, f32)>,
}

impl TextWriter {
    /// A text that begins with a prompt. It gets up to `most` tokens more, and a sequence has room for `room`.
    pub(crate) fn new(prompt: &[u32], most: usize, room: usize, mut sampler: Sampler) -> Self {
        sampler.see(prompt);
        Self { sampler, prompt: prompt.len(), most, room, tokens: Vec::new(), logits_top: Vec::new() }
    }

    /// Why there is no next token, if there is none.
    pub(crate) fn stop(&self) -> Option<Stop> {
        if self.tokens.len() >= self.most {
            Some(Stop::Length)
        } else if self.prompt + self.tokens.len() > self.room {
            Some(Stop::Context)
        } else {
            None
        }
    }

    /// Takes the next token by its logits `[vocabulary]`, and returns why the text ends, if it does. `show` gets the token,
    /// and returns false if a text ends there.
    ///
    /// # Errors
    /// If the logits are no numbers; those of `show`.
    pub(crate) fn next(
        &mut self,
        logits: &Tensor,
        ends: &BTreeSet<u32>,
        show: impl FnOnce(u32) -> Result<bool>,
    ) -> Result<Option<Stop>> {
        let at = self.prompt + self.tokens.len();
        let token = self.sampler.next(logits).with_context(|| format!("the token at position {at}"))?;
        if self.tokens.is_empty() {
            self.logits_top = top(logits)?;
        }
        if ends.contains(&token) {
            return Ok(Some(Stop::End));
        }
        self.tokens.push(token);
        self.sampler.wrote(token);
        if !show(token)? {
            return Ok(Some(Stop::Text));
        }
        Ok(self.stop())
    }
}

/// How many logits are told.
const TOP: usize = 20;

/// The tokens with the largest logits.
fn top(logits: &Tensor) -> Result<Vec<(u32, f32)>> {
    let mut all: Vec<(u32, f32)> = (0..).zip(logits.to_dtype(DType::F32)?.to_vec1::<f32>()?).collect();
    all.sort_by(|(a, x), (b, y)| y.total_cmp(x).then(a.cmp(b)));
    all.truncate(TOP);
    Ok(all)
}
