//! Texts that are written together.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use candle_dist::RankContext;
use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::engine::{Engine, ModelOptions, Purpose};
use crate::files::Files;
use crate::generate::Stop;
use crate::pass::{RowNumbers, TokenBasis};
use crate::sample::{Sampler, Sampling};
use crate::scheduler::{Scheduler, SlotText};
use crate::tokens;
use crate::writing::TextWriter;

/// A prompt, and how far to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The tokens to go on from.
    pub prompt: Vec<u32>,
    /// The most tokens to write.
    pub most: usize,
}

/// Prompts that are continued together.
#[derive(Clone, Debug)]
pub struct PromptBatch {
    /// The prompts. Each has a random stream of its own, by its place.
    pub requests: Vec<Request>,
    /// How many texts are written at once.
    pub slots: usize,
    /// The most tokens of a text for which the cache has room, if that is bounded.
    pub cache_tokens: Option<usize>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// How the model is held and cut.
    pub held: ModelOptions,
}

/// The former name of [`PromptBatch`].
#[deprecated(since = "0.1.0", note = "renamed to PromptBatch")]
pub type Batch = PromptBatch;

/// The most tokens of prompts in one pass: a bound of the memory.
const MOST_NEW: usize = 2048;

impl PromptBatch {
    /// The slots that are used.
    pub fn slots(&self) -> usize {
        self.slots.min(self.requests.len())
    }

    /// The room of a text in the cache.
    pub fn room(&self, config: &Config) -> usize {
        let longest = self
            .requests
            .iter()
            .map(|request| request.prompt.len().saturating_add(request.most))
            .max()
            .unwrap_or(0);
        longest.min(config.longest()).min(self.cache_tokens.unwrap_or(usize::MAX))
    }

    /// Checks that a model of this config can continue all prompts; `name` names one by its place.
    ///
    /// # Errors
    /// If a prompt is empty, longer than the model's longest sequence or the room in the cache, or has tokens that the
    /// model does not know.
    pub fn check(&self, config: &Config, name: impl Fn(usize) -> String) -> Result<()> {
        let room = self.cache_tokens.unwrap_or(usize::MAX);
        for (place, Request { prompt, .. }) in self.requests.iter().enumerate() {
            let (tokens, longest) = (prompt.len(), config.longest());
            let name = || name(place);
            ensure!(tokens > 0, "{}: the prompt has no tokens; give some text to go on from", name());
            ensure!(
                tokens < longest,
                "{}: the prompt has {tokens} tokens, and the model takes {longest}; shorten it",
                name()
            );
            ensure!(
                tokens < room,
                "{}: the prompt has {tokens} tokens, and --cache-tokens is {room}; give more",
                name()
            );
            tokens::check(prompt, config.vocab_size).with_context(name)?;
        }
        Ok(())
    }
}

/// What happens to a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchEvent {
    /// The model is read.
    Read,
    /// The text of a place has one token more.
    Token(usize, u32),
    /// The text of a place has ended.
    Ended(usize, Stop),
}

/// The former name of [`BatchEvent`].
#[deprecated(since = "0.1.0", note = "renamed to BatchEvent")]
pub type Event = BatchEvent;

/// What a rank did.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BatchOutput {
    /// The tokens of each text, and why there are no more.
    pub texts: Vec<(Vec<u32>, Stop)>,
    /// The passes of the model.
    pub passes: usize,
    /// The seconds in which this rank's part of the model was read.
    pub load: f64,
    /// The seconds of all passes.
    pub seconds: f64,
    /// The bytes of all weights that this rank holds.
    pub bytes: usize,
}

/// Continues all prompts of a batch, on all ranks in `stages` stages. Every rank calls it.
///
/// A pass of the model computes the new tokens of all slots: prompts of texts that begin, and one token of each other
/// text. When a text ends, the next prompt takes its slot; what prompts have in common is computed once. `show` gets what happens, and returns false for a token if the
/// text ends there.
///
/// # Errors
/// Those of [`Engine::new`], of the model and of `show`.
pub fn run(
    ctx: &RankContext,
    stages: usize,
    files: &Files,
    batch: &PromptBatch,
    mut show: impl FnMut(BatchEvent) -> Result<bool>,
) -> Result<BatchOutput> {
    let (room, mut waiting) = (batch.room(&files.config), batch.requests.iter().enumerate());
    let purpose = Purpose::Write { slots: batch.slots(), room, block: room };
    let mut engine = Engine::new(ctx, stages, files, &batch.held, purpose)?;
    show(BatchEvent::Read)?;

    let began = Instant::now();
    let mut scheduler = Scheduler::new(&files.config, batch.slots(), room, MOST_NEW);
    let mut texts: Vec<(Vec<u32>, Stop)> = vec![(Vec::new(), Stop::Length); batch.requests.len()];
    let mut passes = 0;
    loop {
        while scheduler.has_room(0)
            && let Some((place, Request { prompt, most })) = waiting.next()
        {
            let sampler = Sampler::of_place(batch.sampling, place);
            let carried = (place, TextWriter::new(prompt, *most, room, sampler));
            scheduler.admit(SlotText::new(prompt.clone(), carried));
        }
        // All ranks have the same logits, and decide alike.
        let plan = scheduler.plan();
        if plan.step.is_empty() {
            break;
        }
        let mut bases = vec![TokenBasis::Largest; plan.step.rows()];
        for rows in &plan.rows {
            if let Some((_, writing)) = scheduler.carried(rows.slot) {
                bases[rows.first] = writing.basis();
            }
        }
        let is_decided = |read: &RowNumbers| {
            plan.rows.iter().all(|rows| {
                let text = scheduler.carried(rows.slot);
                text.is_none_or(|(_, writing)| {
                    read.row(rows.first).is_ok_and(|row| writing.is_decided_by(row))
                })
            })
        };
        let read = engine.pass(&plan.step)?.read(&bases, is_decided)?;
        passes += 1;
        for rows in &plan.rows {
            let Some(((place, writing), _)) = scheduler.text(rows.slot) else { continue };
            let place = *place;
            let told = |token| show(BatchEvent::Token(place, token));
            let stop = writing.next(read.row(rows.first)?, &files.ends, told);
            let stop = stop.with_context(|| format!("prompt {}", place + 1))?;
            match (stop, writing.tokens.last().copied()) {
                (None, Some(token)) => scheduler.write(rows.slot, token),
                (stop, _) => {
                    let stop = stop.unwrap_or(Stop::Length);
                    show(BatchEvent::Ended(place, stop))?;
                    let ended = scheduler.end(rows.slot, true);
                    texts[place] = (ended.map_or_else(Vec::new, |(_, writing)| writing.tokens), stop);
                }
            }
        }
    }
    Ok(BatchOutput {
        texts,
        passes,
        load: engine.load,
        seconds: began.elapsed().as_secs_f64(),
        bytes: engine.bytes,
    })
}
