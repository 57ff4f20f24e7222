//! One text that is being written.

use std::collections::BTreeSet;

use anyhow::{Context, Result};

use crate::generate::Stop;
use crate::pass::{RowBasis, TokenBasis};
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

    /// Takes the next token by what was read of its logits, and returns why the text ends, if it does. `show` gets the token, and returns
    /// false if a text ends there.
    ///
    /// # Errors
    /// If the logits are no numbers; those of `show`.
    pub(crate) fn next(
        &mut self,
        read: RowBasis<'_>,
        ends: &BTreeSet<u32>,
        show: impl FnOnce(u32) -> Result<bool>,
    ) -> Result<Option<Stop>> {
        let token = self.choose(read)?;
        if let RowBasis::All(logits) = read
            && self.tokens.is_empty()
        {
            self.logits_top = top(logits, TOP);
        }
        self.take(token, ends, show)
    }

    /// What the next token is chosen by.
    pub(crate) fn basis(&self) -> TokenBasis {
        self.sampler.basis()
    }

    /// Whether what was read of the logits decides the next token.
    pub(crate) fn is_decided_by(&self, read: RowBasis<'_>) -> bool {
        self.sampler.is_decided_by(read)
    }

    /// Chooses the next token by what was read of its logits.
    ///
    /// # Errors
    /// If the logits are no numbers.
    pub(crate) fn choose(&mut self, read: RowBasis<'_>) -> Result<u32> {
        let at = self.prompt + self.tokens.len();
        self.sampler.choose_by(read).with_context(|| format!("the token at position {at}"))
    }

    /// Takes the next token, and returns why the text ends, if it does.
    ///
    /// # Errors
    /// Those of `show`.
    pub(crate) fn take(
        &mut self,
        token: u32,
        ends: &BTreeSet<u32>,
        show: impl FnOnce(u32) -> Result<bool>,
    ) -> Result<Option<Stop>> {
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

/// The tokens with the largest logits, as many as `count`, the largest first.
pub(crate) fn top(logits: &[f32], count: usize) -> Vec<(u32, f32)> {
    if count == 0 {
        return Vec::new();
    }
    let mut all: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
    let order = |(a, x): &(u32, f32), (b, y): &(u32, f32)| y.total_cmp(x).then(a.cmp(b));
    if let Some(last) = count.checked_sub(1).filter(|&last| last < all.len()) {
        all.select_nth_unstable_by(last, order);
    }
    all.truncate(count);
    all.sort_by(order);
    all
}
