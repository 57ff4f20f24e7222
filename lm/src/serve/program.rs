//! The program that serves a model.

use std::env;
use std::io::Write;
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Result, ensure};
use candle_dist::RankContext;
use candle_lm::InputError;
use candle_lm::files::Files;
use candle_lm::serve::{QueueLimits, RequestQueue, ServeOptions, ServeReport, serve};
use examples::cli::{self, Output};
use examples::launch::{Ranks, StopSignal};
use examples::progress::Loading;

use super::access::{Access, ApiKeys};
use super::encoder;
use super::front::{Front, FrontOptions};
use super::load;
use super::model::ServedModel;
use super::otlp::{SpanCounts, SpanExporter};
use crate::args::Args;
use crate::input::agree;
use crate::{memory, opened};

/// The most tokens of a text, if neither the command line nor the model says fewer.
const ROOM: usize = 8192;
/// How often ranks hear of each other while nobody asks: more often than any --timeout.
pub(super) const HEARTBEAT: Duration = Duration::from_millis(400);
/// The variable with the key of all clients.
const KEY: &str = "LM_API_KEY";
/// The tokens of prompts that may wait for each request that may.
pub(super) const WAITING_TOKENS: usize = 4096;

/// Returns the name of the model for clients.
pub fn name(args: &Args) -> String {
    let of_path = |path: &Path| match path.is_dir() {
        true => path.canonicalize().ok()?.file_name()?.to_str().map(str::to_owned),
        false => path.file_stem()?.to_str().map(str::to_owned),
    };
    let of_model = || {
        let model = args.model.as_deref()?;
        if args.hub_name().is_some() { model.to_str().map(str::to_owned) } else { of_path(model) }
    };
    args.serve.name.clone().or_else(of_model).unwrap_or_else(|| "random".into())
}

/// Serves the model under this name until a signal ends the program.
///
/// # Errors
/// If the model cannot be read, or the port is taken; that of the rank that failed.
pub fn run(args: &Args, name: &str, ranks: &Ranks<'_>) -> Result<bool> {
    // A launcher passes signals to all processes, and rank 0 decides when they end.
    let stop = StopSignal::await_first()?;
    if agree(ranks, encoder::is_one(args))? {
        return encoder::run(args, name, ranks, &stop);
    }
    let scratch = tempfile::tempdir()?;
    let (files, options, model) = agree(ranks, open(args, name, scratch.path()))?;
    opened::note(&files, ranks);
    let sizes = [options.slots, options.room(&files.config)];
    agree(ranks, memory::check(args, &files, &options.held, Some(sizes)))?;
    let limits =
        QueueLimits { requests: args.serve.queue, tokens: args.serve.queue.saturating_mul(WAITING_TOKENS) };
    let engine = ServedEngine {
        model,
        limits,
        bytes: files.bytes(),
        bytes_read: &|| files.bytes_read(),
        ranks: args.model_ranks(),
        serve: &|ctx, mine| serve(ctx, args.pp, &files, &options, mine),
    };
    host(args, name, ranks, (&stop, engine))
}

/// What a server has behind its queue.
pub(super) struct ServedEngine<'a> {
    pub(super) model: ServedModel,
    pub(super) limits: QueueLimits,
    /// The bytes of the files.
    pub(super) bytes: u64,
    /// Those of them that were read so far.
    pub(super) bytes_read: &'a (dyn Fn() -> u64 + Sync),
    pub(super) ranks: usize,
    /// What each rank does; rank 0 gets the queue.
    pub(super) serve: &'a EngineRank<'a>,
}

/// What a rank of a server does.
type EngineRank<'a> = dyn Fn(&RankContext, Option<&RequestQueue>) -> Result<ServeReport> + Sync + 'a;

/// Hosts an engine until a signal ends the program.
///
/// # Errors
/// If the port is taken; that of the rank that failed.
pub(super) fn host(
    args: &Args,
    name: &str,
    ranks: &Ranks<'_>,
    (stop, engine): (&StopSignal, ServedEngine<'_>),
) -> Result<bool> {
    let ServedEngine { model, limits, bytes, bytes_read, ranks: count, serve } = engine;
    let queue = RequestQueue::new(limits);
    let otlp = args.serve.otlp.as_deref().filter(|_| ranks.is_first());
    let exporter = agree(ranks, otlp.map(|url| SpanExporter::start(url, name)).transpose())?;
    let spans = exporter.as_ref().map(SpanExporter::counts);
    let front = || listen(args, Box::leak(Box::new(model)), &queue, (stop, spans)).map(Some);
    let front = agree(ranks, if ranks.is_first() { front() } else { Ok(None) })?;
    let address = front.as_ref().map(|front| format!("http://{}", front.address()));
    let is_over = AtomicBool::new(false);
    let serve_on = |ctx: &RankContext, loading: &Loading| -> Result<ServeReport> {
        let mine = (ctx.rank() == 0).then_some(&queue);
        thread::scope(|scope| {
            if mine.is_some() {
                scope.spawn(|| {
                    tell_open(&queue, &is_over, loading, (name, address.as_deref()));
                    if args.serve.load_every > 0 {
                        load::tell(&queue, &is_over, Duration::from_secs(args.serve.load_every));
                    }
                });
            }
            let served = serve(ctx, mine);
            is_over.fetch_or(mine.is_some(), Ordering::Release);
            served
        })
    };
    let served = Loading::watch(ranks.is_first(), bytes, bytes_read, |loading| {
        ranks.run(count, |ctx| serve_on(ctx, loading))
    });
    // Clients read their errors before the program ends with its cause.
    front.into_iter().for_each(Front::finish);
    exporter.into_iter().for_each(SpanExporter::finish);
    if let Some(report) = served? {
        let ServeReport { tokens, passes, .. } = report;
        cli::tell("note", format_args!("the server has ended after {passes} passes with {tokens} tokens"));
    }
    Ok(true)
}

/// Opens the model, and decides how it serves.
fn open(args: &Args, name: &str, scratch: &Path) -> Result<(Files, ServeOptions, ServedModel)> {
    let mut files = opened::files(args, scratch)?;
    let model = ServedModel::new(name, &mut files)?;
    let room = args.batches.cache_tokens.unwrap_or(ROOM).min(files.config.longest());
    let options = ServeOptions {
        slots: args.serve.slots,
        room: Some(room),
        memory: args.serve.cache_bytes,
        chunk: args.serve.chunk,
        heartbeat: HEARTBEAT,
        ..ServeOptions::of(opened::held(args, &files)?)
    };
    options.cache_bytes(&files.config, args.model_ranks(), args.pp)?;
    Ok((files, options, model))
}

/// Begins to listen. Until the model is read, requests are answered with status 503.
fn listen(
    args: &Args,
    model: &'static ServedModel,
    queue: &RequestQueue,
    (stop, spans): (&StopSignal, Option<Arc<SpanCounts>>),
) -> Result<Front> {
    let given = &args.serve;
    let mut keys = given.api_key_file.as_deref().map(ApiKeys::read).transpose()?.unwrap_or_default();
    // A file that was read into the variable ends with a line break.
    let given_key = env::var(KEY).ok().map(|key| key.trim().to_owned());
    if let Some(key) = given_key.filter(|key| !key.is_empty() && keys.is_empty()) {
        ensure!(key.len() >= 8, "{KEY} has fewer than 8 bytes, which can be guessed: give a longer one");
        keys.add(KEY, &key);
    }
    let is_local = given.host.is_loopback();
    if !is_local && keys.is_empty() {
        cli::tell(
            "warning",
            format_args!(
                "everybody who reaches {} may ask: give --api-key-file, or keep strangers out",
                given.host
            ),
        );
    }
    let options = FrontOptions {
        access: Access { keys, is_local },
        limits: given.limits(),
        connections: given.connections,
        drain: Duration::from_secs(given.drain),
        logs: true,
        spans,
    };
    let address = (given.host, given.port);
    let listener = TcpListener::bind(address).map_err(|error| {
        InputError(format!(
            "--host {} --port {}: {error}; give another port, or 0 for any",
            given.host, given.port
        ))
    })?;
    Ok(Front::start(listener, model, queue.clone(), stop.flag(), options)?)
}

/// Tells when the model is read.
fn tell_open(
    queue: &RequestQueue,
    is_over: &AtomicBool,
    loading: &Loading,
    (name, address): (&str, Option<&str>),
) {
    while !is_over.load(Ordering::Acquire) {
        match queue.wait_until_open(Duration::from_millis(100)) {
            Ok(false) => continue,
            Ok(true) => {
                loading.finish();
                let (status, address) = (queue.status(), address.unwrap_or_default());
                let said = format!(
                    "Serving {name} at {address}: {} texts at once, of up to {} tokens.",
                    status.slots,
                    status.room.unwrap_or_default()
                );
                // If nobody reads stdout, the server serves all the same.
                writeln!(Output::new(None).screen(), "{said}").ok();
            }
            Err(_) => {}
        }
        return;
    }
}
