//! The time of a model of one layer for prompts, and for one token of each of some texts; prints JSON.
//!
//! `benchmarks/layers.py` compares it with transformers. The model is a folder, whose tables should be small beside the layer.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, ensure};
use candle_core::DType;
use candle_dist::{RankContext, World};
use candle_lm::engine::{Engine, ModelOptions, Purpose};
use candle_lm::files::Files;
use candle_lm::step::DecodeStep;
use clap::Parser;
use examples::allocator;
use examples::cli::{self, Checked, UsageError};
use examples::timing::median;
use serde::Serialize;

/// Measures a model of one layer
#[derive(Clone, Debug, Parser)]
struct Args {
    /// The folder of the model
    #[arg(long)]
    model: PathBuf,
    /// Tokens of prompts, each measured by itself
    #[arg(long, value_delimiter = ',', default_values_t = [512, 2048])]
    prompts: Vec<usize>,
    /// Texts that get a token each, behind the first of the prompts
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8])]
    batches: Vec<usize>,
    /// Tokens of each text, one after another
    #[arg(long, default_value_t = 32)]
    steps: usize,
    /// Times that each prompt is computed, after one that warms up
    #[arg(long, default_value_t = 3)]
    calls: usize,
    /// Threads
    #[arg(long, default_value_t = 1)]
    threads: usize,
}

/// The median of a phase, and the logits behind the last token of each text.
#[derive(Debug, Serialize)]
struct PhaseTime {
    phase: String,
    ms: f64,
    logits: Vec<Vec<f32>>,
}

fn main() -> ExitCode {
    allocator::keep_pages();
    cli::run(validate, run)
}

fn validate(args: &Args) -> Checked {
    let counts = [&args.prompts[..], &args.batches, &[args.steps, args.calls, args.threads]].concat();
    match counts.contains(&0) || args.prompts.is_empty() {
        true => Err(UsageError("Give a prompt, and numbers of at least 1.".into())),
        false => Ok(()),
    }
}

fn run(args: &Args) -> anyhow::Result<()> {
    let files = Files::open(&args.model)?;
    let rows = World::threads(1)
        .threads_per_rank(args.threads)
        .run(|ctx| measured(ctx, &files, args))?
        .pop()
        .context("no rank")?;
    println!("{}", serde_json::to_string(&rows)?);
    Ok(())
}

/// Tokens of a text, the same as those of the other program.
fn tokens(text: usize, from: usize, count: usize, vocabulary: usize) -> Vec<u32> {
    let mixed = |at: usize| ((at + 7919 * text + 1) as u32).wrapping_mul(2_654_435_761) >> 16;
    (from..from + count).map(|at| mixed(at) % vocabulary as u32).collect()
}

/// The milliseconds in which a step is computed, and its logits.
fn timed(engine: &mut Engine, step: &DecodeStep) -> anyhow::Result<(f64, Vec<Vec<f32>>)> {
    let began = Instant::now();
    let logits = engine.step(step)?;
    let ms = began.elapsed().as_secs_f64() * 1e3;
    Ok((ms, logits.to_dtype(DType::F32)?.to_vec2()?))
}

/// Each phase by itself: prompts in the first slot, then tokens of several texts behind prompts of their own.
fn measured(ctx: &RankContext, files: &Files, args: &Args) -> anyhow::Result<Vec<PhaseTime>> {
    let vocabulary = files.config.vocab_size;
    let slots = args.batches.iter().copied().max().unwrap_or(1);
    let room = args.prompts.iter().copied().max().unwrap_or(1) + args.steps + 1;
    let purpose = Purpose::Write { slots, room, block: room };
    let mut engine = Engine::new(ctx, 1, files, &ModelOptions::of(DType::F32), purpose)?;
    let mut rows = Vec::new();
    let began = |text: usize, count: usize| {
        let mut step = DecodeStep::default();
        step.push(text, &tokens(text, 0, count, vocabulary), true);
        step
    };
    for &prompt in &args.prompts {
        let mut times = Vec::with_capacity(args.calls);
        let mut last = Vec::new();
        for call in 0..=args.calls {
            let (ms, logits) = timed(&mut engine, &began(0, prompt))?;
            if call > 0 {
                times.push(ms);
            }
            last = logits;
        }
        rows.push(PhaseTime { phase: format!("prompt {prompt}"), ms: median(&mut times), logits: last });
    }
    let first = args.prompts.first().copied().context("no prompt")?;
    for &batch in &args.batches {
        for text in 0..batch {
            engine.step(&began(text, first))?;
        }
        let mut times = Vec::with_capacity(args.steps);
        let mut last = Vec::new();
        for at in 0..args.steps {
            let mut step = DecodeStep::default();
            for text in 0..batch {
                step.push(text, &tokens(text, first + at, 1, vocabulary), false);
            }
            let (ms, logits) = timed(&mut engine, &step)?;
            times.push(ms);
            last = logits;
        }
        ensure!(last.len() == batch, "{} rows of logits for {batch} texts", last.len());
        rows.push(PhaseTime { phase: format!("token of {batch}"), ms: median(&mut times), logits: last });
    }
    Ok(rows)
}
