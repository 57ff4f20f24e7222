//! A Llama over ranks against candle-transformers' and transformers' on the same files.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

pub(crate) mod adapted;
mod batch;
pub(crate) mod chat;
mod chat_variables;
#[path = "config.rs"]
mod configs;
mod contexts;
mod damaged;
mod dtypes;
mod experts;
pub(crate) mod export;
pub(crate) mod facts;
pub(crate) mod families;
mod folders;
mod front;
pub(crate) mod gguf;
pub(crate) mod hub;
mod info;
mod latents;
mod mlx;
mod proofs;
mod quantized;
mod requests;
mod ropes;
mod score;
mod shares;
mod smollm2;
mod states;
mod text;
pub(crate) mod tokenizers;
mod vocabularies;
mod wrappers;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_dist::RankContext;
use candle_lm::cache::Cache;
use candle_lm::config::{Config, RopeScaling};
use candle_lm::engine::ModelOptions;
use candle_lm::files::Files;
use candle_lm::generate::{Task, generate};
use candle_lm::model::Decoder;
use candle_lm::random_model;
use candle_lm::sample::Sampling;
use candle_nn::VarBuilder;
use candle_shard::Weights;
use candle_shard::nn::MeshVarBuilder;
use candle_transformers::models::llama as theirs;
use test_utils::on_ranks;

const TOKENS: [u32; 11] = [3, 14, 15, 9, 2, 6, 5, 35, 8, 9, 7];

/// A small model with so many query and key heads.
pub(crate) fn config(query: usize, key_value: usize) -> Config {
    Config {
        hidden_size: query * 8,
        intermediate_size: 44,
        num_hidden_layers: 2,
        num_attention_heads: query,
        num_key_value_heads: Some(key_value),
        vocab_size: 37,
        max_position_embeddings: 64,
        ..random_model::config()
    }
}

fn cases() -> Vec<(&'static str, Config)> {
    let llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 16,
    };
    vec![
        ("grouped heads", config(4, 2)),
        ("all heads", Config { num_key_value_heads: None, ..config(4, 4) }),
        ("one key head", config(6, 1)),
        ("key heads that do not divide", config(6, 3)),
        ("a tied table", Config { tie_word_embeddings: true, ..config(4, 2) }),
        ("stretched positions", Config { rope_scaling: Some(llama3), rope_theta: 500_000.0, ..config(4, 2) }),
    ]
}

/// candle-transformers' logits of what follows each of the tokens.
fn reference(folder: &Path) -> Vec<Vec<f32>> {
    let text = fs::read_to_string(folder.join("config.json")).unwrap();
    let config: theirs::LlamaConfig = serde_json::from_str(&text).unwrap();
    let config = config.into_config(false);
    let weights = candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu).unwrap();
    let vb = VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu);
    let model = theirs::Llama::load(vb, &config).unwrap();
    let after = |count: usize| {
        let mut cache = theirs::Cache::new(true, DType::F32, &config, &Device::Cpu).unwrap();
        let tokens = Tensor::from_slice(&TOKENS[..count], (1, count), &Device::Cpu).unwrap();
        model.forward(&tokens, 0, &mut cache).unwrap().squeeze(0).unwrap().to_vec1().unwrap()
    };
    (1..=TOKENS.len()).map(after).collect()
}

/// The model on an axis of all ranks.
fn model(ctx: &RankContext, folder: &Path, config: &Config, longest: usize) -> candle_shard::Result<Decoder> {
    let weights = Weights::open(folder)?;
    let mesh = ctx.mesh(&[("tp", ctx.world_size())])?;
    let vb = MeshVarBuilder::from_weights(
        weights,
        0,
        &mesh,
        Decoder::plan(config, "tp"),
        DType::F32,
        &Device::Cpu,
    )?;
    let model = Decoder::new(config, longest, &vb.frozen())?;
    vb.finish()?;
    Ok(model)
}

pub(crate) fn llama(flags: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_lm")).args(flags).output().expect("the program starts")
}

fn tokens(tokens: &[u32]) -> candle_core::Result<Tensor> {
    Tensor::from_slice(tokens, (1, tokens.len()), &Device::Cpu)
}

fn assert_close(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let off = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(off < 1e-4, "{what}: off by {off}");
}

#[test]
fn logits_are_those_of_candle_transformers_on_every_mesh() {
    for (case, config) in cases() {
        let folder = tempfile::tempdir().unwrap();
        random_model::write(folder.path(), &config, 7, DType::F32).unwrap();
        let want = Arc::new(reference(folder.path()));
        let path = Arc::new(folder.path().to_owned());
        for world in 1..=5 {
            let (want, path, config) = (want.clone(), path.clone(), config.clone());
            on_ranks(world, case, move |ctx| -> candle_shard::Result<()> {
                let model = model(ctx, &path, &config, TOKENS.len())?;
                let cache = || Cache::new(config.num_hidden_layers, TOKENS.len());
                let whole =
                    model.forward_cached(&tokens(&TOKENS)?, &mut cache())?.squeeze(0)?.to_vec2::<f32>()?;
                for (i, (got, want)) in whole.iter().zip(want.iter()).enumerate() {
                    assert_close(got, want, &format!("{case} on {world}: prefill, token {i}"));
                }
                // In parts: some tokens at once, then one by one.
                for first in [1, 4, TOKENS.len()] {
                    let mut cache = cache();
                    let mut start = 0;
                    for end in first..=TOKENS.len() {
                        let logits = model.next(&tokens(&TOKENS[start..end])?, &mut cache)?;
                        let what = format!("{case} on {world}: decode, token {end}");
                        assert_close(&logits.squeeze(0)?.to_vec1::<f32>()?, &want[end - 1], &what);
                        start = end;
                    }
                    let full = model.next(&tokens(&[1])?, &mut cache).unwrap_err().to_string();
                    assert!(full.contains("1 tokens after 11 in a cache for 11"), "{full}");
                }
                Ok(())
            });
        }
    }
}

#[test]
fn a_rank_reads_its_part_and_all_write_the_same_text() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(4, 2);
    random_model::write(folder.path(), &config, 7, DType::F32).unwrap();
    let files = Arc::new(Files::open(folder.path()).unwrap());
    let text = |world: usize, stages: usize, temperature: f64| {
        let sampling = Sampling { temperature, top_p: 0.9, seed: 5, ..Sampling::default() };
        let task = Task {
            prompt: TOKENS.to_vec(),
            most: 20,
            cache_tokens: None,
            sampling,
            held: ModelOptions::of(DType::F32),
        };
        let files = files.clone();
        let ranks = on_ranks(world, "text", move |ctx| {
            let mut shown = Vec::new();
            let written = generate(ctx, stages, &files, &task, |token| {
                shown.extend(token);
                Ok(true)
            });
            let written = written.map_err(|e| e.to_string())?;
            assert_eq!(shown, written.tokens);
            Ok::<_, String>(written)
        });
        let all = config.parameters();
        for rank in &ranks {
            assert_eq!(rank.tokens, ranks[0].tokens);
            assert!(world == 1 || rank.parameters < all * 2 / 3, "{} of {all}", rank.parameters);
        }
        ranks[0].tokens.clone()
    };
    for temperature in [0.0, 1.0] {
        let one = text(1, 1, temperature);
        assert_eq!(one.len(), 20);
        for (world, stages) in [(2, 1), (4, 1), (2, 2), (4, 2), (3, 3)] {
            assert_eq!(text(world, stages, temperature), one, "{stages} stages on {world} ranks");
        }
    }
}

#[test]
fn files_that_do_not_fit_are_named_before_anything_is_read() {
    let config = config(4, 2);
    let refused = |spoil: &dyn Fn(&Path)| {
        let folder = tempfile::tempdir().unwrap();
        random_model::write(folder.path(), &config, 7, DType::F32).unwrap();
        spoil(folder.path());
        format!("{:#}", Files::open(folder.path()).unwrap_err())
    };
    let with = |changed: Config| {
        refused(&|folder| {
            fs::write(folder.join("config.json"), serde_json::to_string(&changed).unwrap()).unwrap();
        })
    };
    let cases = [
        (
            refused(&|folder| fs::remove_file(folder.join("config.json")).unwrap()),
            vec!["config.json", "No such file"],
        ),
        (
            refused(&|folder| fs::write(folder.join("config.json"), "{}").unwrap()),
            vec!["config.json", "model_type"],
        ),
        (refused(&|folder| fs::remove_file(folder.join("model.safetensors")).unwrap()), vec!["no"]),
        (
            refused(&|folder| {
                let file = folder.join("model.safetensors");
                let bytes = fs::read(&file).unwrap();
                fs::write(&file, &bytes[..bytes.len() - 9]).unwrap();
            }),
            vec!["model.safetensors"],
        ),
        (with(Config { num_hidden_layers: 3, ..config.clone() }), vec!["model.layers.2.", "is not there"]),
        (with(Config { intermediate_size: 45, ..config.clone() }), vec!["mlp.", "[44, 32]", "[45, 32]"]),
        (with(Config { num_key_value_heads: Some(3), ..config.clone() }), vec!["num_key_value_heads 3", "4"]),
        (
            with(Config { hidden_size: 34, ..config.clone() }),
            vec!["num_attention_heads 4 does not divide hidden_size 34"],
        ),
    ];
    for (said, wanted) in cases {
        assert!(wanted.iter().all(|want| said.contains(want)), "{said}, want {wanted:?}");
    }
}
