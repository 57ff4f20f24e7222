//! The engine of a server: what every rank runs.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use candle_dist::RankContext;
use candle_shard::nn::Adapter;
use serde::{Deserialize, Serialize};

use super::guard::{NO_QUEUE, guarded};
use super::order::RankOrder;
use super::queue::{QueueMode, RequestQueue, ServeStatus};
use super::request::{RequestError, ServeRequest, TokenMask};
use super::spans;
use super::speed::PassLoad;
use super::text::{RequestText, TextProgress};
use crate::config::Config;
use crate::config::tensors::EXPERTS;
use crate::engine::{Engine, ModelOptions, Purpose};
use crate::files::Files;
use crate::generate::Stop;
use crate::memory;
use crate::pass::{PassBasis, RowNumbers, TokenBasis};
use crate::scheduler::{CacheBudget, PassPlan, PassRows, Scheduler};
use crate::step::DecodeStep;

/// How a model serves.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// The most texts at once, of each replica.
    pub slots: usize,
    /// The most tokens of a text, if not as many as the model takes.
    pub room: Option<usize>,
    /// The most bytes of all texts' keys, values and states on all ranks of a replica that share a layer, if
    /// not enough for the longest text in each slot. Where there is no memory for the next tokens, the text
    /// that was admitted last waits, and is computed again.
    pub memory: Option<usize>,
    /// The tokens for which a text takes memory at a time. Each time, its keys and values are copied.
    pub block: usize,
    /// The most tokens of prompts in a pass, beside one of each text that is being written. It bounds the
    /// time between two tokens of a text while others begin.
    pub chunk: usize,
    /// How often ranks hear of each other while there is nothing to do: more often than their timeout.
    pub heartbeat: Duration,
    /// How the model is held and cut.
    pub held: ModelOptions,
}

impl ServeOptions {
    /// Up to 4 texts at once, prompts in chunks of 256 tokens, memory for 64 tokens at a time, and a sign of
    /// life each second.
    pub fn of(held: ModelOptions) -> Self {
        Self {
            slots: 4,
            room: None,
            memory: None,
            block: 64,
            chunk: 256,
            heartbeat: Duration::from_secs(1),
            held,
        }
    }

    /// The most tokens of a text.
    pub fn room(&self, config: &Config) -> usize {
        self.room.unwrap_or(usize::MAX).min(config.longest())
    }

    /// The most bytes of keys and values, of `ranks` ranks in `stages` stages: those of one of the ranks that have other tokens of each
    /// text, and of one of those that have other experts.
    ///
    /// # Errors
    /// If the longest text has no room in them, or a number is 0.
    pub fn cache_bytes(&self, config: &Config, ranks: usize, stages: usize) -> Result<usize> {
        Ok(self.budget(config, ranks, stages)?.most)
    }

    fn budget(&self, config: &Config, ranks: usize, stages: usize) -> Result<CacheBudget> {
        let (room, cp) = (self.room(config), self.held.cp.max(1));
        ensure!(
            self.slots > 0 && room > 1,
            "{} texts of {room} tokens: expected 1 of 2 at least",
            self.slots
        );
        let tp = (ranks / self.held.dp.max(1) / stages.max(1) / cp / self.held.ep.max(1)).max(1);
        let dtype = self.held.cache.unwrap_or(self.held.dtype);
        // Ranks that have some tokens of each text take memory at once. A text whose positions depend on its
        // length would not be computed again as it was.
        let is_whole = cp > 1 || config.turns_by_length(room);
        let block = if is_whole { room } else { self.block.clamp(1, room) };
        let of = |blocks| memory::text_bytes(config, dtype, [blocks * block, room], [tp, stages, cp]);
        let budget = CacheBudget { room, block, first: of(1), next: of(2).saturating_sub(of(1)), most: 0 };
        let of_text = budget.of_text(room);
        let most = of_text.saturating_mul(self.slots);
        // Each rank of experts has all of it, and each rank of tokens its part.
        let copies = cp * self.held.ep.max(1);
        let most = self.memory.map_or(most, |memory| (memory / copies).min(most));
        ensure!(
            of_text <= most,
            "a text of {room} tokens takes {of_text} bytes, and all have {most}: give more memory, or texts fewer tokens"
        );
        Ok(CacheBudget { most, ..budget })
    }
}

/// What a rank did.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ServeReport {
    /// The passes of the model.
    pub passes: usize,
    /// The tokens that they computed.
    pub tokens: usize,
    /// The seconds of all passes.
    pub seconds: f64,
    /// The seconds in which this rank's part of the model was read.
    pub load: f64,
    /// The bytes of all weights that this rank holds.
    pub bytes: usize,
}

/// Serves requests on all ranks, in `stages` stages, until the queue of rank 0 is drained or stopped. Every
/// rank calls it; rank 0 gives the queue.
///
/// Each request says which of the adapters of `files` its text has, if any. Texts with unlike adapters are
/// computed in one pass.
///
/// A pass of the model computes the next token of each text and a chunk of the prompts of new ones, on each
/// of the replicas of `options` those of its own texts. Rank 0 decides what it has, tells all ranks, and
/// chooses the tokens. An error of one request ends it alone. If a rank fails, all requests fail with its
/// error.
///
/// # Errors
/// Those of [`Engine::new`], of [`ServeOptions::cache_bytes`] and of the model; if an adapter has modules of
/// its own in place of the model's.
///
/// ```
/// use std::time::Duration;
/// use candle_core::DType;
/// use candle_dist::World;
/// use candle_lm::engine::ModelOptions;
/// use candle_lm::files::Files;
/// use candle_lm::random_model;
/// use candle_lm::serve::{QueueLimits, RequestQueue, ServeOptions, ServeRequest, TokenEvent, serve};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let folder = tempfile::tempdir()?;
/// random_model::write(folder.path(), &random_model::config(), 7, DType::F32)?;
/// let files = Files::open(folder.path())?;
/// let options = ServeOptions { room: Some(64), ..ServeOptions::of(ModelOptions::of(DType::F32)) };
/// let queue = RequestQueue::new(QueueLimits::default());
/// let front = queue.clone();
/// let client = std::thread::spawn(move || {
///     assert_eq!(front.wait_until_open(Duration::from_secs(60)), Ok(true));
///     let mut stream = front.submit(ServeRequest::new(vec![1, 2, 3], 5)).unwrap();
///     let events = std::iter::from_fn(|| stream.next_event(Duration::from_secs(60)));
///     let tokens = events.filter(|event| matches!(event, TokenEvent::Token { .. })).count();
///     front.drain();
///     tokens
/// });
/// World::threads(2).run(|ctx| serve(ctx, 1, &files, &options, (ctx.rank() == 0).then_some(&queue)))?;
/// assert_eq!(client.join().unwrap(), 5);
/// # Ok(())
/// # }
/// ```
pub fn serve(
    ctx: &RankContext,
    stages: usize,
    files: &Files,
    options: &ServeOptions,
    queue: Option<&RequestQueue>,
) -> Result<ServeReport> {
    guarded(ctx, queue, |ends, report| begin(ctx, stages, files, options, ends, report))
}

fn begin(
    ctx: &RankContext,
    stages: usize,
    files: &Files,
    options: &ServeOptions,
    queue: Option<&RequestQueue>,
    report: &mut ServeReport,
) -> Result<()> {
    let config = &files.config;
    let room = options.room(config);
    if let Some(adapter) = files.adapters.iter().find(|adapter| adapter.trains_modules()) {
        bail!(
            "the adapter {:?} has modules in place of those of the model (modules_to_save), which texts without it need: merge it",
            adapter.name()
        );
    }
    if let Some(adapter) = files.adapters.iter().find(|adapter| changes_experts(adapter, config)) {
        bail!(
            "the adapter {:?} changes experts (target_parameters), which texts of a batch have in common: merge it",
            adapter.name()
        );
    }
    let budget = options.budget(config, ctx.world_size(), stages)?;
    let (slots, dp) = (options.slots, options.held.dp);
    let purpose = Purpose::Write { slots, room, block: budget.block };
    let mut engine = Engine::new(ctx, stages, files, &options.held, purpose)?;
    (report.load, report.bytes) = (engine.load, engine.bytes);
    if ctx.rank() > 0 {
        return follow(ctx, &mut engine, report);
    }
    let queue = queue.context(NO_QUEUE)?;
    let status = ServeStatus {
        room: Some(room),
        slots: slots * dp,
        cache_bytes: budget.most.saturating_mul(dp),
        adapters: files.adapters.len(),
        ..ServeStatus::default()
    };
    queue.open(status, config.vocab_size);
    let mut leader = Leader {
        queue,
        replicas: (0..dp)
            .map(|_| Scheduler::new(config, slots, room, options.chunk).within(budget))
            .collect(),
        mask: TokenMask::new(config.vocab_size),
        ends: &files.ends,
        room,
        heartbeat: options.heartbeat,
    };
    let led = leader.lead(ctx, &mut engine, report);
    if let Err(error) = &led {
        leader.fail(&RequestError::World(Arc::from(format!("{error:#}"))));
    }
    led
}

/// Whether an adapter changes the experts of a model.
fn changes_experts(adapter: &Adapter, config: &Config) -> bool {
    let layers = (0..config.num_hidden_layers).filter(|&layer| config.parts.experts(layer).is_some());
    let paths = layers.flat_map(|layer| EXPERTS.map(|part| format!("model.layers.{layer}.{part}")));
    paths.into_iter().any(|path| adapter.changes(&path))
}

/// Does what rank 0 says.
fn follow(ctx: &RankContext, engine: &mut Engine, report: &mut ServeReport) -> Result<()> {
    loop {
        match RankOrder::broadcast(None, ctx.group())? {
            RankOrder::End => return Ok(()),
            RankOrder::Wait => {}
            RankOrder::Embed(_) => {
                bail!("an order of rank 0 for an encoder: do all ranks serve the same model?")
            }
            RankOrder::ReadAll => drop(engine.read_of_each(&PassBasis::All)?),
            RankOrder::Compute(steps, basis) => {
                let began = Instant::now();
                engine.step_of_each(&steps, &basis)?;
                report.passes += 1;
                report.tokens += steps.iter().map(DecodeStep::len).sum::<usize>();
                report.seconds += began.elapsed().as_secs_f64();
            }
        }
    }
}

/// Rank 0, which decides.
struct Leader<'a> {
    queue: &'a RequestQueue,
    /// The texts of each replica.
    replicas: Vec<Scheduler<RequestText>>,
    mask: TokenMask,
    ends: &'a BTreeSet<u32>,
    room: usize,
    heartbeat: Duration,
}

impl Leader<'_> {
    fn lead(&mut self, ctx: &RankContext, engine: &mut Engine, report: &mut ServeReport) -> Result<()> {
        // When the last pass ended, if there was no pause since.
        let mut last: Option<Instant> = None;
        loop {
            let mode = self.queue.mode();
            if mode == QueueMode::Stopping {
                self.fail(&RequestError::Stopped);
            } else {
                self.sweep();
                self.admit();
            }
            let mut plans: Vec<PassPlan> = self.replicas.iter_mut().map(Scheduler::plan).collect();
            let steps: Vec<DecodeStep> =
                plans.iter_mut().map(|plan| std::mem::take(&mut plan.step)).collect();
            let tokens: usize = steps.iter().map(DecodeStep::len).sum();
            if tokens > 0 {
                let began = Instant::now();
                let span = spans::of_pass(&self.replicas, &steps, &plans);
                span.in_scope(|| -> Result<()> {
                    let basis = self.basis(&plans, &steps);
                    let order = RankOrder::Compute(steps.clone(), basis.clone());
                    RankOrder::broadcast(Some(order), ctx.group())?;
                    let mut read = engine.step_of_each(&steps, &basis)?;
                    if read.as_ref().is_some_and(|read| !self.is_decided_by(&plans, read)) {
                        RankOrder::broadcast(Some(RankOrder::ReadAll), ctx.group())?;
                        read = engine.read_of_each(&PassBasis::All)?;
                    }
                    read.map_or(Ok(()), |read| self.take(&plans, &read))
                })?;
                drop(span);
                let now = Instant::now();
                let seconds = (now - last.unwrap_or(began)).as_secs_f64();
                last = Some(now);
                report.passes += 1;
                report.tokens += tokens;
                report.seconds += seconds;
                let unread = self.replicas.iter().map(Scheduler::unread).sum();
                let prompt = plans.iter().map(|plan| plan.prompt).sum();
                self.tell(Some(PassLoad { prompt, seconds, unread }));
                continue;
            }
            last = None;
            self.tell(None);
            if mode > QueueMode::Open {
                RankOrder::broadcast(Some(RankOrder::End), ctx.group())?;
                return Ok(());
            }
            if !self.queue.wait(self.heartbeat) {
                RankOrder::broadcast(Some(RankOrder::Wait), ctx.group())?;
            }
        }
    }

    /// Ends texts whose clients are gone, or whose time is over.
    fn sweep(&mut self) {
        let now = Instant::now();
        self.queue.sweep(now);
        self.end_texts(true, |text| match text.is_abandoned() {
            false if text.is_late(now) => {
                text.finish(if text.is_begun() { Ok(Stop::Length) } else { Err(RequestError::Deadline) });
                true
            }
            is_abandoned => is_abandoned,
        });
    }

    /// Gives free slots to requests that wait, those of the replica that has the least to compute and to keep
    /// with the text. A text that is larger than what is free waits, and all others with it.
    fn admit(&mut self) {
        let now = Instant::now();
        loop {
            let replicas = &self.replicas;
            let has_room = |request: &ServeRequest| {
                replicas.iter().any(|replica| replica.has_room(request.prompt.len()))
            };
            let Some(waiting) = self.queue.take_if(now, has_room) else { return };
            let text = RequestText::new(waiting, self.ends, self.room);
            let tokens = text.prompt;
            let free = self.replicas.iter_mut().filter(|replica| replica.has_room(tokens));
            if let Some(replica) = free.min_by_key(|replica| replica.load_with(&text)) {
                replica.admit(text);
            }
            let count = |status: &mut ServeStatus| {
                status.running += 1;
                status.prompt_tokens += tokens as u64;
            };
            self.queue.tell(count, None);
        }
    }

    /// What is read of the logits of a pass. Several replicas read no candidates.
    fn basis(&self, plans: &[PassPlan], steps: &[DecodeStep]) -> PassBasis {
        let mut bases = Vec::new();
        for ((replica, plan), step) in self.replicas.iter().zip(plans).zip(steps) {
            let first = bases.len();
            bases.resize(first + step.rows(), TokenBasis::Largest);
            for rows in &plan.rows {
                if let Some(text) = replica.carried(rows.slot) {
                    bases[first + rows.first] = text.basis(rows);
                }
            }
        }
        match PassBasis::of(&bases) {
            PassBasis::Candidates(_) if plans.len() > 1 => PassBasis::All,
            basis => basis,
        }
    }

    /// Whether what was read decides the next tokens of all texts.
    fn is_decided_by(&self, plans: &[PassPlan], read: &RowNumbers) -> bool {
        placed(plans).all(|(replica, rows)| {
            let text = self.replicas[replica].carried(rows.slot);
            text.is_none_or(|text| text.is_decided_by(read, &rows))
        })
    }

    /// Takes what was read of the logits of a pass, one replica's behind another's.
    fn take(&mut self, plans: &[PassPlan], read: &RowNumbers) -> Result<()> {
        for (replica, rows) in placed(plans) {
            let scheduler = &mut self.replicas[replica];
            let Some((text, reused)) = scheduler.text(rows.slot) else { continue };
            let before = (text.is_begun(), text.written());
            let progress = text.advance(read, &rows, reused, &mut self.mask);
            let reused = if text.is_begun() && !before.0 { reused as u64 } else { 0 };
            let written = (text.written() - before.1) as u64;
            let ended = matches!(progress, TextProgress::Ended { .. });
            match progress {
                TextProgress::Reading => {}
                TextProgress::Wrote(token) => scheduler.write(rows.slot, token),
                TextProgress::Ended { is_sound } => drop(scheduler.end(rows.slot, is_sound)),
            }
            let count = |status: &mut ServeStatus| {
                status.reused_tokens += reused;
                status.written_tokens += written;
                status.running -= usize::from(ended).min(status.running);
                status.ended += u64::from(ended);
            };
            self.queue.tell(count, None);
        }
        Ok(())
    }

    /// Ends the texts for which `ends` says so.
    fn end_texts(&mut self, is_sound: bool, ends: impl Fn(&RequestText) -> bool) {
        let ended: usize = self.replicas.iter_mut().map(|replica| replica.end_where(is_sound, &ends)).sum();
        let count = |status: &mut ServeStatus| {
            status.running = status.running.saturating_sub(ended);
            status.ended += ended as u64;
        };
        self.queue.tell(count, None);
    }

    /// Ends all texts with an error.
    fn fail(&mut self, error: &RequestError) {
        self.end_texts(false, |text| {
            text.finish(Err(error.clone()));
            true
        });
    }

    fn tell(&self, pass: Option<PassLoad>) {
        let used = self.replicas.iter().map(Scheduler::used_bytes).sum();
        let (again, preemptions) = self
            .replicas
            .iter()
            .map(Scheduler::preempted)
            .fold((0, 0), |(all, count), (waiting, so_far)| (all + waiting, count + so_far));
        let told = |status: &mut ServeStatus| {
            (status.used_bytes, status.waiting, status.preemptions) = (used, again, preemptions);
            status.passes += u64::from(pass.is_some());
        };
        self.queue.tell(told, pass);
    }
}

/// The rows of all plans with their replicas, one replica's rows behind another's.
fn placed(plans: &[PassPlan]) -> impl Iterator<Item = (usize, PassRows)> + '_ {
    let firsts = plans.iter().scan(0, |first, plan| {
        let own = *first;
        *first += plan.rows.iter().map(|rows| rows.rows).sum::<usize>();
        Some(own)
    });
    plans.iter().zip(firsts).enumerate().flat_map(|(replica, (plan, first))| {
        plan.rows.iter().map(move |rows| (replica, PassRows { first: first + rows.first, ..*rows }))
    })
}
