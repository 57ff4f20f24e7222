//! The engine of a server of embeddings: what every rank runs.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use candle_core::DType;
use candle_dist::RankContext;
use candle_shard::nn::MeshVarBuilder;

use super::guard::{NO_QUEUE, guarded};
use super::order::RankOrder;
use super::queue::{QueueMode, RequestQueue, ServeStatus, WaitingRequest};
use super::request::{RequestError, ServeRequest};
use super::run::ServeReport;
use super::speed::PassLoad;
use super::stream::TokenEvent;
use crate::generate::Stop;
use crate::sentence_embedding::{self, Encoder, EncoderConfig};

/// How an encoder serves.
#[derive(Clone, Debug)]
pub struct EncoderOptions {
    /// The dtype of weights and of what is computed.
    pub dtype: DType,
    /// The most texts of a pass.
    pub slots: usize,
    /// The most places of a pass: its texts times the tokens of the longest one. One text may have more.
    pub places: usize,
    /// How often ranks hear of each other while there is nothing to do: more often than their timeout.
    pub heartbeat: Duration,
}

impl EncoderOptions {
    /// Up to 32 texts in a pass, with 4096 places, and a sign of life each second.
    pub fn of(dtype: DType) -> Self {
        Self { dtype, slots: 32, places: 4096, heartbeat: Duration::from_secs(1) }
    }
}

/// Serves embeddings by the encoder in `folder`, cut over all ranks, until the queue of rank 0 is drained or stopped. Every rank calls it;
/// rank 0 gives the queue.
///
/// A request is its prompt, all of which is one text: it ends with [`TokenEvent::Embedded`]. What else it asks for is not looked at. Texts
/// that wait are computed together.
///
/// # Errors
/// If the folder has no encoder that can be run, or a rank fails.
///
/// ```no_run
/// use candle_core::DType;
/// use candle_dist::World;
/// use candle_lm::serve::{EncoderOptions, QueueLimits, RequestQueue, serve_encoder};
///
/// let (queue, options) = (RequestQueue::new(QueueLimits::default()), EncoderOptions::of(DType::F32));
/// let folder = std::path::Path::new("all-MiniLM-L6-v2");
/// World::threads(2).run(|ctx| serve_encoder(ctx, folder, &options, (ctx.rank() == 0).then_some(&queue)))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn serve_encoder(
    ctx: &RankContext,
    folder: &Path,
    options: &EncoderOptions,
    queue: Option<&RequestQueue>,
) -> Result<ServeReport> {
    guarded(ctx, queue, |queue, report| {
        let began = Instant::now();
        let mesh = ctx.mesh(&[("tp", ctx.world_size())])?;
        let (config, weights) = (EncoderConfig::read(folder)?, sentence_embedding::weights(folder)?);
        let plan = Encoder::plan("tp");
        let vb = MeshVarBuilder::from_weights(weights, 0, &mesh, plan, options.dtype, ctx.device())?;
        let encoder = Encoder::new(&config, &vb.frozen())?;
        report.bytes = vb.finish()?.local_elem_count() * options.dtype.size_in_bytes();
        report.load = began.elapsed().as_secs_f64();
        if ctx.rank() > 0 {
            return follow(ctx, &encoder, report);
        }
        let queue = queue.context(NO_QUEUE)?;
        let status =
            ServeStatus { room: Some(config.longest()), slots: options.slots, ..ServeStatus::default() };
        queue.open(status, config.vocab_size);
        lead(ctx, &encoder, options, queue, report)
    })
}

/// Does what rank 0 says.
fn follow(ctx: &RankContext, encoder: &Encoder, report: &mut ServeReport) -> Result<()> {
    loop {
        match RankOrder::broadcast(None, ctx.group())? {
            RankOrder::End => return Ok(()),
            RankOrder::Wait => {}
            RankOrder::Compute(..) | RankOrder::ReadAll => {
                bail!("an order of rank 0 for a decoder: do all ranks serve the same model?");
            }
            RankOrder::Embed(texts) => {
                let began = Instant::now();
                encoder.embed(&texts)?;
                count(report, &texts, began);
            }
        }
    }
}

fn count(report: &mut ServeReport, texts: &[Vec<u32>], began: Instant) {
    report.passes += 1;
    report.tokens += texts.iter().map(Vec::len).sum::<usize>();
    report.seconds += began.elapsed().as_secs_f64();
}

/// Decides what is computed, as rank 0.
fn lead(
    ctx: &RankContext,
    encoder: &Encoder,
    options: &EncoderOptions,
    queue: &RequestQueue,
    report: &mut ServeReport,
) -> Result<()> {
    loop {
        let mode = queue.mode();
        let mut waiting = if mode == QueueMode::Stopping { Vec::new() } else { admit(queue, options) };
        if waiting.is_empty() {
            if mode > QueueMode::Open {
                RankOrder::broadcast(Some(RankOrder::End), ctx.group())?;
                return Ok(());
            }
            if !queue.wait(options.heartbeat) {
                RankOrder::broadcast(Some(RankOrder::Wait), ctx.group())?;
            }
            continue;
        }
        let admitted = Instant::now();
        let texts: Vec<Vec<u32>> =
            waiting.iter_mut().map(|text| std::mem::take(&mut text.request.prompt)).collect();
        let tokens: usize = texts.iter().map(Vec::len).sum();
        let running = waiting.len();
        let begin = |status: &mut ServeStatus| {
            status.running += running;
            status.prompt_tokens += tokens as u64;
        };
        queue.tell(begin, None);
        waiting.iter_mut().for_each(|text| text.spans.admit());
        let made = RankOrder::broadcast(Some(RankOrder::Embed(texts.clone())), ctx.group())
            .and_then(|_| Ok(encoder.embed(&texts)?.to_dtype(DType::F32)?.to_vec2::<f32>()?));
        let end = |status: &mut ServeStatus| {
            status.running = status.running.saturating_sub(running);
            status.ended += running as u64;
            status.passes += 1;
        };
        let seconds = admitted.elapsed().as_secs_f64();
        queue.tell(end, Some(PassLoad { prompt: tokens, seconds, unread: 0 }));
        match made {
            Ok(vectors) => {
                waiting.into_iter().zip(vectors).for_each(|(text, vector)| give(text, vector, admitted));
            }
            Err(error) => {
                let cause = RequestError::World(format!("{error:#}").into());
                waiting.iter().for_each(|text| fail(text, cause.clone()));
                return Err(error);
            }
        }
        count(report, &texts, admitted);
    }
}

/// Takes texts out of the queue that fit into one pass; the first one always does.
fn admit(queue: &RequestQueue, options: &EncoderOptions) -> Vec<WaitingRequest> {
    let now = Instant::now();
    let (mut taken, mut width): (Vec<WaitingRequest>, usize) = (Vec::new(), 0);
    while taken.len() < options.slots.max(1) {
        let places = |request: &ServeRequest| (taken.len() + 1) * width.max(request.prompt.len());
        let fits = |request: &ServeRequest| taken.is_empty() || places(request) <= options.places;
        let Some(text) = queue.take_if(now, fits) else { break };
        width = width.max(text.request.prompt.len());
        taken.push(text);
    }
    taken
}

fn give(text: WaitingRequest, vector: Vec<f32>, admitted: Instant) {
    if !vector.iter().all(|x| x.is_finite()) {
        let said = "the embedding of the text has something that is no number";
        return fail(&text, RequestError::Logits(said.into()));
    }
    text.spans.end(0, &Ok(Stop::End));
    text.events.send(TokenEvent::Begun { cached: 0, admitted, prompt_logprobs: Vec::new() });
    text.events.send(TokenEvent::Embedded(vector));
}

fn fail(text: &WaitingRequest, error: RequestError) {
    text.spans.end(0, &Err(error.clone()));
    text.events.send(TokenEvent::Failed(error));
}
