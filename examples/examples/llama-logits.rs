//! Writes the logits of a checkpoint after each token of a text, on any number of ranks, for comparisons.
//!
//! Without a folder, it creates a small random model and compares two ranks with one.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use candle_core::{DType, Tensor};
use candle_dist::{RankContext, World, threads};
use candle_lm::cache::Cache;
use candle_lm::files::Files;
use candle_lm::model::Decoder;
use candle_lm::{random_model, tokens};
use candle_shard::Weights;
use candle_shard::nn::MeshVarBuilder;
use clap::Parser;
use serde_json::json;

/// Writes the tokens of a text and the logits after each of them as JSON
#[derive(Debug, Parser)]
struct Args {
    /// Folder of the model [default: a small random one, and only a summary is written]
    #[arg(long, value_name = "FOLDER")]
    model: Option<PathBuf>,
    /// The text
    #[arg(long, value_name = "TEXT", default_value = "Once upon a time")]
    text: String,
    /// Ranks over which each layer is sharded
    #[arg(long, value_name = "N", default_value_t = 2)]
    tp: usize,
}

/// The logits `[tokens, vocabulary]` in f32.
fn logits(ctx: &RankContext, folder: &Path, ids: &[u32]) -> Result<Vec<Vec<f32>>> {
    let config = Files::open(folder)?.config;
    let mesh = ctx.mesh(&[("tp", ctx.world_size())])?;
    let weights = Weights::open(folder)?;
    let vb = MeshVarBuilder::from_weights(weights, 0, &mesh, Decoder::plan(&config, "tp"), DType::F32, ctx.device())?;
    let model = Decoder::new(&config, ids.len(), &vb.frozen())?;
    vb.finish()?;
    let mut cache = Cache::new(config.num_hidden_layers, ids.len());
    let ids = Tensor::from_slice(ids, (1, ids.len()), ctx.device())?;
    Ok(model.forward_cached(&ids, &mut cache)?.squeeze(0)?.to_vec2()?)
}

fn on_ranks(ranks: usize, folder: &Path, ids: &[u32]) -> Result<Vec<Vec<f32>>> {
    let mut all = World::threads(ranks).run(|ctx| logits(ctx, folder, ids))?;
    Ok(all.swap_remove(0))
}

fn main() -> Result<()> {
    let Args { model, text, tp } = Args::parse();
    threads::settle(threads::default_per_rank(tp));
    let scratch = tempfile::tempdir()?;
    if model.is_none() {
        random_model::write(scratch.path(), &random_model::config(), 0, DType::F32)?;
    }
    let folder = model.as_deref().unwrap_or(scratch.path());
    let ids = tokens::encode(&tokens::read(folder)?, &text)?;
    let made = on_ranks(tp, folder, &ids)?;
    if model.is_some() {
        return Ok(writeln!(std::io::stdout(), "{}", json!({ "tokens": ids, "logits": made }))?);
    }
    let one = on_ranks(1, folder, &ids)?;
    let off = made.iter().flatten().zip(one.iter().flatten()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    println!("{} tokens, {} logits each: {tp} ranks differ from one by at most {off:e}", ids.len(), made[0].len());
    ensure!(off < 1e-4, "the logits of {tp} ranks are off by {off}");
    Ok(())
}
