//! Decoding speed of a Llama on one rank and on two, compared with candle-transformers on the same cores; see `--help`.
//!
//! candle settles its threads once for a process, so each measurement is a process of its own.

use std::hint::black_box;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Instant;
use std::{env, fs, thread};

use anyhow::{Context, ensure};
use candle_core::{DType, Device, Tensor};
use candle_dist::World;
use candle_lm::config::Config;
use candle_lm::dtype::DTypeName;
use candle_lm::engine::ModelOptions;
use candle_lm::files::Files;
use candle_lm::generate::{Task, generate};
use candle_lm::random_model;
use candle_lm::sample::Sampling;
use candle_nn::VarBuilder;
use candle_transformers::models::llama as theirs;
use clap::{Parser, ValueEnum};
use examples::allocator;
use examples::cli::{self, Checked, UsageError};
use examples::table::{number, table};
use examples::timing::median;
use serde::{Deserialize, Serialize};

/// Measures how fast a random Llama decodes, one token at a time
#[derive(Debug, Parser)]
struct Args {
    /// Width of the hidden states; feed-forward layers are 2.75 times as wide
    #[arg(long, default_value_t = 1024)]
    hidden: usize,
    /// Decoder layers
    #[arg(long, default_value_t = 8)]
    layers: usize,
    /// Dtype of the parameters
    #[arg(long, default_value = "f32")]
    dtype: DTypeName,
    /// Tokens of the prompt
    #[arg(long, default_value_t = 64)]
    prompt: usize,
    /// Tokens to write
    #[arg(long, default_value_t = 64)]
    tokens: usize,
    /// Times that each side runs, in turn
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Measure one side on the model in a folder, and print JSON
    #[arg(long, hide = true, requires = "folder")]
    side: Option<Side>,
    #[arg(long, hide = true)]
    folder: Option<std::path::PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Side {
    OneRank,
    TwoRanks,
    CandleOne,
    CandleTwo,
}

impl Side {
    const ALL: [(Self, &str); 4] = [
        (Self::OneRank, "1 rank, 1 thread"),
        (Self::TwoRanks, "2 ranks, 1 thread each"),
        (Self::CandleOne, "candle-transformers, 1 thread"),
        (Self::CandleTwo, "candle-transformers, 2 threads"),
    ];
}

/// Seconds.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
struct Times {
    first: f64,
    each: f64,
}

fn main() -> ExitCode {
    allocator::keep_pages();
    cli::run(validate, run)
}

fn validate(args: &Args) -> Checked {
    let refuse = |sentence: String| Err(UsageError(sentence));
    let Args { hidden, layers, prompt, tokens, rounds, .. } = *args;
    if [hidden, layers, prompt, rounds].contains(&0) {
        return refuse("--hidden, --layers, --prompt and --rounds are at least 1.".into());
    }
    if !hidden.is_multiple_of(64) {
        return refuse(format!("--hidden {hidden} does not divide into heads of 64."));
    }
    if tokens < 2 {
        return refuse(format!("--tokens {tokens} leaves no time between tokens: give at least 2."));
    }
    Ok(())
}

fn run(args: &Args) -> anyhow::Result<()> {
    if let (Some(side), Some(folder)) = (args.side, &args.folder) {
        println!("{}", serde_json::to_string(&measure(side, folder, args)?)?);
        return Ok(());
    }
    let scratch = tempfile::tempdir()?;
    let heads = args.hidden / 64;
    let config = Config {
        hidden_size: args.hidden,
        intermediate_size: args.hidden * 11 / 4,
        num_hidden_layers: args.layers,
        num_attention_heads: heads,
        num_key_value_heads: Some(heads.div_ceil(4)),
        vocab_size: 8192,
        ..random_model::config()
    };
    random_model::write(scratch.path(), &config, 0, args.dtype.into())?;
    let parameters = config.tensors().iter().map(|(_, shape)| shape.iter().product::<usize>()).sum::<usize>();
    println!("{} layers of {}, {} M parameters, {:?}", args.layers, args.hidden, parameters / 1_000_000, args.dtype);

    let bytes = parameters * DType::from(args.dtype).size_in_bytes();
    let weights = vec![1u64; bytes / size_of::<u64>()];
    let mut reading = [1, 2].map(|threads| (threads, Vec::new()));
    let mut times = Side::ALL.map(|_| (Vec::new(), Vec::new()));
    for _ in 0..args.rounds {
        for (threads, seconds) in &mut reading {
            seconds.push(read(&weights, *threads));
        }
        for ((side, _), (first, each)) in Side::ALL.iter().zip(&mut times) {
            let made = child(*side, scratch.path())?;
            first.push(made.first);
            each.push(made.each);
        }
    }
    let times = times.map(|(mut first, mut each)| Times { first: median(&mut first), each: median(&mut each) });
    let mut rows = table(&["side"], &["prompt, ms", "tokens/s", "of 1 rank"]);
    let alone = times[0].each;
    for ((_, name), made) in Side::ALL.iter().zip(&times) {
        rows.add_row(vec![
            (*name).into(),
            number(format!("{:.1}", made.first * 1e3)),
            number(format!("{:.1}", 1.0 / made.each)),
            number(format!("{:.2}", alone / made.each)),
        ]);
    }
    // The limit of each program: a token reads all weights once.
    for (threads, mut seconds) in reading {
        let each = median(&mut seconds);
        let name = format!("reading as many bytes, {threads} thread(s)");
        rows.add_row(vec![
            name.into(),
            number(""),
            number(format!("{:.1}", 1.0 / each)),
            number(format!("{:.2}", alone / each)),
        ]);
    }
    println!("{rows}");
    Ok(())
}

/// Returns the time that `threads` threads take to read all of `weights`, in seconds.
fn read(weights: &[u64], threads: usize) -> f64 {
    let began = Instant::now();
    thread::scope(|scope| {
        for part in weights.chunks(weights.len().div_ceil(threads).max(1)) {
            scope.spawn(move || black_box(part.iter().fold(0u64, |sum, x| sum.wrapping_add(*x))));
        }
    });
    began.elapsed().as_secs_f64()
}

/// Runs this program for one side.
fn child(side: Side, folder: &Path) -> anyhow::Result<Times> {
    let threads = if side == Side::CandleTwo { "2" } else { "1" };
    let side = side.to_possible_value().context("a side without a name")?;
    let output = Command::new(env::current_exe()?)
        .args(env::args_os().skip(1))
        .args(["--side", side.get_name(), "--folder"])
        .arg(folder)
        .env("CANDLE_NUM_THREADS", threads)
        .env("RAYON_NUM_THREADS", threads)
        .output()?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {error}", side.get_name());
    Ok(serde_json::from_slice(&output.stdout)?)
}

fn measure(side: Side, folder: &Path, args: &Args) -> anyhow::Result<Times> {
    let prompt: Vec<u32> = (0..args.prompt as u32).map(|i| i * 37 % 256).collect();
    let ranks = match side {
        Side::OneRank => 1,
        Side::TwoRanks => 2,
        Side::CandleOne | Side::CandleTwo => return theirs(folder, &prompt, args),
    };
    let sampling = Sampling::default();
    let task =
        Task { prompt, most: args.tokens, cache_tokens: None, sampling, held: ModelOptions::of(args.dtype.into()) };
    let files = Files::open(folder)?;
    let written = World::threads(ranks)
        .threads_per_rank(1)
        .run(|ctx| generate(ctx, 1, &files, &task, |_| Ok(true)))?
        .swap_remove(0);
    Ok(Times { first: written.first, each: written.rest / (written.tokens.len() - 1) as f64 })
}

/// Measures the same task with candle-transformers.
fn theirs(folder: &Path, prompt: &[u32], args: &Args) -> anyhow::Result<Times> {
    let config: theirs::LlamaConfig = serde_json::from_str(&fs::read_to_string(folder.join("config.json"))?)?;
    let config = config.into_config(false);
    let (dtype, device) = (DType::from(args.dtype), Device::Cpu);
    let weights = candle_core::safetensors::load(folder.join("model.safetensors"), &device)?;
    let model = theirs::Llama::load(VarBuilder::from_tensors(weights, dtype, &device), &config)?;
    let mut cache = theirs::Cache::new(true, dtype, &config, &device)?;
    let began = Instant::now();
    let (mut first, mut at) = (0.0, 0);
    let mut input = prompt.to_vec();
    for i in 0..args.tokens {
        let tokens = Tensor::from_slice(&input, (1, input.len()), &device)?;
        let token = model.forward(&tokens, at, &mut cache)?.squeeze(0)?.argmax(0)?.to_scalar()?;
        if i == 0 {
            first = began.elapsed().as_secs_f64();
        }
        at += input.len();
        input = vec![token];
    }
    Ok(Times { first, each: (began.elapsed().as_secs_f64() - first) / (args.tokens - 1) as f64 })
}
