//! A model that writes, and remembers what it has read.

use std::collections::BTreeSet;
use std::time::Instant;

use anyhow::Result;
use candle_dist::RankContext;

use crate::config::Config;
use crate::engine::{Engine, Purpose};
use crate::files::Files;
use crate::generate::{Completion, Stop, Task};
use crate::pass::{RowNumbers, TokenBasis};
use crate::sample::Sampler;
use crate::step::DecodeStep;
use crate::writing::TextWriter;

/// A loaded model, with the keys and values of the tokens that it has read.
pub struct Session {
    engine: Engine,
    config: Config,
    /// The tokens that end a text.
    ends: BTreeSet<u32>,
    /// The most tokens of a sequence.
    room: usize,
    /// The tokens whose keys and values are cached.
    read: Vec<u32>,
}

/// A text that is being written in a session.
#[derive(Debug)]
pub(crate) struct Draft {
    writing: TextWriter,
    /// The prompt, and what was written.
    sequence: Vec<u32>,
    began: Instant,
    /// The seconds to the first token.
    first: Option<f64>,
    /// Why there are no more tokens, if there are none.
    stop: Option<Stop>,
}

impl Draft {
    /// The tokens that were written.
    pub(crate) fn tokens(&self) -> &[u32] {
        &self.writing.tokens
    }

    /// Why there are no more tokens, if there are none.
    pub(crate) fn stop(&self) -> Option<Stop> {
        self.stop
    }
}

impl Session {
    /// Loads this rank's part of the model, in `stages` stages, for sequences of up to `room` tokens. Every rank calls it.
    ///
    /// # Errors
    /// Those of [`Engine::new`].
    pub fn open(ctx: &RankContext, stages: usize, files: &Files, task: &Task, room: usize) -> Result<Self> {
        let room = room.min(files.config.longest()).min(task.cache_tokens.unwrap_or(usize::MAX));
        let engine =
            Engine::new(ctx, stages, files, &task.held, Purpose::Write { slots: 1, room, block: room })?;
        Ok(Self::of(engine, files.config.clone(), files.ends.clone(), room))
    }

    /// A model that was loaded before, for sequences of up to `room` tokens, which some tokens end.
    pub(crate) fn of(engine: Engine, config: Config, ends: BTreeSet<u32>, room: usize) -> Self {
        Self { engine, config, ends, room, read: Vec::new() }
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
        let mut draft = self.begin(task);
        while draft.stop.is_none() {
            self.advance(&mut draft, &mut show)?;
        }
        let first = draft.first.unwrap_or(0.0);
        Ok(Completion {
            tokens: draft.writing.tokens,
            stop: draft.stop.unwrap_or(Stop::Length),
            load: self.engine.load,
            first,
            rest: draft.began.elapsed().as_secs_f64() - first,
            parameters: self.engine.parameters,
            bytes: self.engine.bytes,
            logits_top: draft.writing.logits_top,
        })
    }

    /// Begins to continue the prompt of `task`.
    pub(crate) fn begin(&mut self, task: &Task) -> Draft {
        if !self.continues_prompt(&task.prompt) {
            self.read.clear();
        }
        let writing = TextWriter::new(&task.prompt, task.most, self.room, Sampler::new(task.sampling));
        let (sequence, stop) = (task.prompt.clone(), writing.stop());
        Draft { writing, sequence, began: Instant::now(), first: None, stop }
    }

    /// Takes the next token, and calls `show` with it unless it ends the text. Every rank calls it.
    ///
    /// # Errors
    /// Those of [`write`](Self::write).
    pub(crate) fn advance(
        &mut self,
        draft: &mut Draft,
        show: impl FnOnce(u32) -> Result<bool>,
    ) -> Result<()> {
        let (step, new) = self.step_after(&draft.sequence);
        let Draft { writing, sequence, .. } = draft;
        let show = |token| {
            sequence.push(token);
            show(token)
        };
        // Of the first token, other logits are told, too.
        let basis = if writing.tokens.is_empty() { TokenBasis::All } else { writing.basis() };
        let logits = self.engine.pass(&step)?;
        let is_decided = |read: &RowNumbers| read.row(0).is_ok_and(|row| writing.is_decided_by(row));
        let read = logits.read(&[basis], is_decided)?;
        self.read.extend(new);
        let stop = writing.next(read.row(0)?, &self.ends, show)?;
        draft.stop = stop;
        draft.first.get_or_insert_with(|| draft.began.elapsed().as_secs_f64());
        Ok(())
    }

    /// Returns the step that tells what follows a sequence, and its tokens.
    fn step_after(&mut self, sequence: &[u32]) -> (DecodeStep, Vec<u32>) {
        if !self.continues(sequence) {
            self.read.clear();
        }
        let (mut step, new) = (DecodeStep::default(), sequence[self.read.len()..].to_vec());
        step.push(0, &new, self.read.is_empty());
        (step, new)
    }
}
