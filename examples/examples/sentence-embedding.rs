//! Computes sentence embeddings with a BERT encoder that a plan shards over ranks, and shows which sentences are alike.
//!
//! Run it with the folder of a model, for example the one that `scripts/minilm.sh` downloads:
//! `cargo run --release --example sentence-embedding -- "$(scripts/minilm.sh)" 3`

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use candle_core::{DType, Device};
use candle_dist::{RankContext, World};
use candle_lm::sentence_embedding::{self, Encoder, EncoderConfig};
use candle_lm::tokens;
use candle_shard::nn::MeshVarBuilder;

const SENTENCES: [&str; 3] =
    ["The capital of France is Paris.", "Paris is the French capital city.", "A pipeline has several stages."];

/// The cosines between all sentences, and the parameters that this rank holds.
fn on_rank(ctx: &RankContext, folder: &Path, texts: &[Vec<u32>]) -> Result<(Vec<Vec<f32>>, usize)> {
    let mesh = ctx.mesh(&[("tp", ctx.world_size())])?;
    let weights = sentence_embedding::weights(folder)?;
    let vb = MeshVarBuilder::from_weights(weights, 0, &mesh, Encoder::plan("tp"), DType::F32, &Device::Cpu)?;
    let model = Encoder::new(&EncoderConfig::read(folder)?, &vb.frozen())?;
    let parameters = vb.finish()?.local_elem_count();
    let embeddings = model.embed(texts)?;
    Ok((embeddings.matmul(&embeddings.t()?)?.to_vec2()?, parameters))
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let usage = "usage: sentence-embedding FOLDER [RANKS], with the folder that scripts/minilm.sh prints";
    let folder = PathBuf::from(args.next().filter(|folder| !folder.is_empty()).context(usage)?);
    let ranks: usize = args.next().map_or(Ok(2), |ranks| ranks.parse()).context(usage)?;
    let tokenizer = tokens::read(&folder)?;
    let encode = |text| tokenizer.encode(text, true).map_err(|error| anyhow::anyhow!("{error}"));
    let texts = SENTENCES.map(|text| Ok(encode(text)?.get_ids().to_vec())).into_iter().collect::<Result<Vec<_>>>()?;
    let made = World::threads(ranks).run(|ctx| on_rank(ctx, &folder, &texts))?;
    for (rank, (_, parameters)) in made.iter().enumerate() {
        println!("rank {rank} holds {parameters} parameters");
    }
    for (sentence, cosines) in SENTENCES.iter().zip(&made[0].0) {
        let cosines: Vec<String> = cosines.iter().map(|cosine| format!("{cosine:6.3}")).collect();
        println!("{}  {sentence}", cosines.join(" "));
    }
    Ok(())
}
