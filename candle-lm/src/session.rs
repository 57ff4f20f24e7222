//! A model that writes, and remembers what it has read.

use std::time::Instant;

use anyhow::Result;
use candle_core::Tensor;
use candle_dist::RankContext;

use super::config::Config;
use super::engine::{Engine, Purpose};
use super::files::Files;
use super::generate::{Completion, Stop, Task};
use super::sample::Sampler;
use super::step::Step;
use super::writing::Writing;

/// A loaded model, with the keys and values of the tokens that it has read.
pub struct Session<'a> {
    engine: Engine,
    files: &'a Files,
    config: Config,
    /// The most tokens of a sequence.
    room: usize,
    /// The tokens whose keys and values are cached.
    read: Vec<u32>,
}

impl<'a> Session<'a> {
    /// Loads this rank's part of the model, in `stages` stages, for sequences of up to `room` tokens. Every rank calls it.
    ///
    /// # Errors
    /// Those of [`Engine::new`].
    pub fn open(ctx: &RankContext, stages: usize, files: &'a Files, task: &Task, room: usize) -> Result<Self> {
        let room = room.min(files.config.longest()).min(task.cache_tokens.unwrap_or(usize::MAX));
        let engine = Engine::new(ctx, stages, files, &task.held, Purpose::Write { slots: 1, room })?;
        Ok(Self { engine, files, config: files.config.clone(), room, read: Vec::new() })
    }

    /// Returns the number of tokens of `prompt` that [`write`](Self::write) does not compute again.
    pub fn cached_of(&self, prompt: &[u32]) -> usize {
        if self.continues_prompt(prompt) { self.read.len() } else { 0 }
    }

    /// Returns whether a sequence continues the cached tokens, whose keys are the same in it.
    fn continues(&self, sequence: &[u32]) -> bool {
        let (read, length) = (self.read.len(), sequence.len());
        length > read && sequence.starts_with(&self.read) && !self.config.turns_anew(read, length)
    }

    /// Returns whether a prompt continues the cached tokens, whose keys a run with the whole prompt would have too.
    fn continues_prompt(&self, prompt: &[u32]) -> bool {
        self.continues(prompt) && !self.config.turns_by_length(prompt.len())
    }

    /// Continues the prompt of `task`, and calls `show` with each token until it returns false. Tokens at the start of the
    /// prompt that are cached are not computed again. Every rank calls it.
    ///
    /// # Errors
    /// If the logits are no numbers; those of the model and of `show`.
    pub fn write(&mut self, task: &Task, mut show: impl FnMut(u32) -> Result<bool>) -> Result<Completion> {
        if !self.continues_prompt(&task.prompt) {
            self.read.clear();
        }
        let mut writing = Writing::new(&task.prompt, task.most, self.room, Sampler::new(task.sampling));
        let began = Instant::now();
        let mut first = None;
        let mut sequence = task.prompt.clone();
        let mut stop = writing.stop();
        while stop.is_none() {
            let logits = self.next(&sequence)?;
            stop = writing.next(&logits, &self.files.ends, |token| {
                sequence.push(token);
                show(token)
            })?;
            first.get_or_insert_with(|| began.elapsed().as_secs_f64());
        }
        let first = first.unwrap_or(0.0);
        Ok(Completion {
            tokens: writing.tokens,
            stop: stop.unwrap_or(Stop::Length),
            load: self.engine.load,
            first,
            rest: began.elapsed().as_secs_f64() - first,
            parameters: self.engine.parameters,
            bytes: self.engine.bytes,
            logits_top: writing.logits_top,
        })
    }

    /// Returns the logits `[vocabulary]` of the token after a sequence.
    fn next(&mut self, sequence: &[u32]) -> Result<Tensor> {
        if !self.continues(sequence) {
            self.read.clear();
        }
        let mut step = Step::default();
        step.push(0, &sequence[self.read.len()..], self.read.is_empty());
        let logits = self.engine.step(&step)?.squeeze(0)?;
        self.read.extend_from_slice(&sequence[self.read.len()..]);
        Ok(logits)
    }
}
