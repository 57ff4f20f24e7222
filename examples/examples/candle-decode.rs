//! The speed of candle-transformers' quantized Llama on a GGUF file: greedy tokens after a prompt; prints JSON.
//!
//! `benchmarks/decode.py` compares it with `lm`. `CANDLE_NUM_THREADS` sets its threads.

use std::fs::File;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::ensure;
use candle_core::quantized::gguf_file::Content;
use candle_core::{Device, Tensor};
use candle_lm::files::Files;
use candle_lm::tokens::encode;
use candle_transformers::models::quantized_llama::ModelWeights;
use clap::Parser;
use examples::allocator;
use examples::cli::{self, Checked, UsageError};
use serde_json::json;

/// Measures candle-transformers' quantized Llama
#[derive(Debug, Parser)]
struct Args {
    /// A GGUF file
    #[arg(long)]
    model: PathBuf,
    /// The text to continue
    #[arg(long)]
    prompt: String,
    /// Tokens to write
    #[arg(long, default_value_t = 64)]
    max_tokens: usize,
}

fn main() -> ExitCode {
    allocator::keep_pages();
    cli::run(validate, run)
}

fn validate(args: &Args) -> Checked {
    match args.max_tokens {
        0 | 1 => Err(UsageError("--max-tokens leaves no time between tokens: give at least 2.".into())),
        _ => Ok(()),
    }
}

fn run(args: &Args) -> anyhow::Result<()> {
    let prompt = encode(&Files::open(&args.model)?.tokenizer()?, &args.prompt)?;
    ensure!(!prompt.is_empty(), "the prompt has no tokens; give some text");
    let device = Device::Cpu;
    let mut file = File::open(&args.model)?;
    let content = Content::read(&mut file)?;
    let mut model = ModelWeights::from_gguf(content, &mut file, &device)?;
    let began = Instant::now();
    let (mut first, mut position) = (0.0, 0);
    let (mut input, mut tokens) = (prompt.clone(), Vec::new());
    for i in 0..args.max_tokens {
        let x = Tensor::from_slice(&input, (1, input.len()), &device)?;
        let token: u32 = model.forward(&x, position)?.squeeze(0)?.argmax(0)?.to_scalar()?;
        if i == 0 {
            first = began.elapsed().as_secs_f64();
        }
        position += input.len();
        tokens.push(token);
        input = vec![token];
    }
    let rest = began.elapsed().as_secs_f64() - first;
    let report = json!({
        "tokens": tokens,
        "prompt_tokens_per_s": prompt.len() as f64 / first,
        "tokens_per_s": (args.max_tokens - 1) as f64 / rest,
    });
    println!("{report}");
    Ok(())
}
