//! Small models of all families against what transformers computes, taken down by `benchmarks/lm_facts.py`.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_dist::RankContext;
use candle_lm::cache::Cache;
use candle_lm::config::Config;
use candle_lm::engine::ModelOptions;
use candle_lm::files::Files;
use candle_lm::generate::{Task, generate};
use candle_lm::model::Decoder;
use candle_lm::sample::Sampling;
use candle_shard::nn::MeshVarBuilder;
use candle_shard::strict;
use serde::Deserialize;
use serde_json::Value;
use test_utils::on_ranks;

use crate::lm::facts::weight;

#[derive(Deserialize)]
pub(crate) struct Families {
    pub(crate) prompt: Vec<u32>,
    pub(crate) models: Vec<Family>,
}

#[derive(Deserialize)]
pub(crate) struct Family {
    pub(crate) case: String,
    pub(crate) config: Value,
    /// The parameters of transformers' model.
    pub(crate) names: Vec<String>,
    /// After the first token and after the last one of the prompt.
    pub(crate) logits: [Vec<f32>; 2],
    /// Greedy decoding.
    pub(crate) tokens: Vec<u32>,
}

pub(crate) fn families() -> Families {
    serde_json::from_str(include_str!("families.json")).unwrap()
}

/// The tensors of a model as its files have them.
pub(crate) fn stored(config: &Config) -> HashMap<String, Tensor> {
    config.stored().into_iter().map(|(name, shape)| (name.clone(), weight(&name, &shape))).collect()
}

/// Writes the folder of a model, without a tokenizer.
pub(crate) fn write(folder: &Path, config: &Value) -> HashMap<String, Tensor> {
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let tensors = stored(&Config::read(folder, &[]).unwrap());
    candle_core::safetensors::save(&tensors, folder.join("model.safetensors")).unwrap();
    tensors
}

/// The logits `[tokens, vocabulary]` of what follows each token of the prompt.
pub(crate) fn logits(
    ctx: &RankContext,
    path: &Path,
    prompt: &[u32],
    dequantize: bool,
) -> anyhow::Result<Vec<Vec<f32>>> {
    let files = Files::open(path)?;
    let mesh = ctx.mesh(&[("tp", ctx.world_size())])?;
    let plan = Decoder::plan(&files.config, "tp");
    let vb =
        MeshVarBuilder::from_weights(files.weights(), 0, &mesh, plan, DType::F32, &Device::Cpu)?.frozen();
    let vb = if dequantize { vb.dequantized() } else { vb };
    let model = Decoder::new(&files.config, prompt.len(), &vb)?;
    vb.finish()?;
    let mut cache = Cache::of(&files.config, prompt.len());
    // A part at once, and the others one by one.
    let mut rows = Vec::new();
    let tokens = |tokens: &[u32]| Tensor::from_slice(tokens, (1, tokens.len()), &Device::Cpu);
    let (first, rest) = prompt.split_at(prompt.len() - 2);
    rows.extend(model.forward_cached(&tokens(first)?, &mut cache)?.squeeze(0)?.to_vec2::<f32>()?);
    for token in rest {
        rows.extend(model.forward_cached(&tokens(&[*token])?, &mut cache)?.squeeze(0)?.to_vec2::<f32>()?);
    }
    Ok(rows)
}

/// Asserts that the model of a folder has these logits after the first and after the last token of a prompt, on 1 to 3 ranks.
pub(crate) fn assert_logits(path: &Path, prompt: &[u32], want: &[Vec<f32>; 2], case: &str) {
    for ranks in 1..=3 {
        let (path, prompt, want, what) = (path.to_owned(), prompt.to_vec(), want.clone(), case.to_owned());
        on_ranks(ranks, case, move |ctx| -> anyhow::Result<()> {
            let rows = strict(|| logits(ctx, &path, &prompt, false))?;
            for (got, want) in [&rows[0], &rows[prompt.len() - 1]].into_iter().zip(&want) {
                for (got, want) in got.iter().zip(want) {
                    assert!(
                        (got - want).abs() < 1e-4,
                        "{what} on {}: {got} instead of {want}",
                        ctx.world_size()
                    );
                }
            }
            Ok(())
        });
    }
}

/// The tokens of greedy decoding.
pub(crate) fn greedy(path: &Path, prompt: &[u32], most: usize, [ranks, stages]: [usize; 2]) -> Vec<u32> {
    let mut files = Files::open(path).unwrap();
    files.ends.clear();
    let (files, sampling) = (Arc::new(files), Sampling::default());
    let task = Task {
        prompt: prompt.to_vec(),
        most,
        cache_tokens: None,
        sampling,
        held: ModelOptions::of(DType::F32),
    };
    let written = on_ranks(ranks, "greedy", move |ctx| -> anyhow::Result<Vec<u32>> {
        Ok(strict(|| generate(ctx, stages, &files, &task, |_| Ok(true)))?.tokens)
    });
    written.into_iter().next().unwrap()
}

#[test]
fn each_family_computes_the_logits_of_transformers_on_every_mesh() {
    let Families { prompt, models } = families();
    for Family { case, config, names, logits: want, .. } in models {
        let folder = tempfile::tempdir().unwrap();
        let tensors = write(folder.path(), &config);
        let mut has: Vec<&String> = tensors.keys().collect();
        has.sort();
        assert_eq!(has, names.iter().collect::<Vec<_>>(), "{case}");
        assert_logits(folder.path(), &prompt, &want, &case);
    }
}

#[test]
fn each_family_decodes_the_tokens_of_transformers_in_stages_too() {
    let Families { prompt, models } = families();
    for Family { case, config, tokens, .. } in models {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &config);
        let path: PathBuf = folder.path().into();
        for mesh in [[1, 1], [2, 1], [2, 2], [4, 2]] {
            assert_eq!(greedy(&path, &prompt, tokens.len(), mesh), tokens, "{case} on {mesh:?}");
        }
    }
}
