//! Rotary positions of each kind against transformers', below and above the learned context; facts of
//! `benchmarks/lm_facts.py`.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_dist::RankContext;
use candle_lm::cache::Cache;
use candle_lm::config::Config;
use candle_lm::files::Files;
use candle_lm::model::Decoder;
use candle_shard::nn::MeshVarBuilder;
use serde::Deserialize;
use serde_json::{Value, json};
use test_utils::on_ranks;

use crate::lm::families::{greedy, write};

#[derive(Deserialize)]
pub(crate) struct Ropes {
    pub(crate) prompt: Vec<u32>,
    pub(crate) models: Vec<Rope>,
}

#[derive(Deserialize)]
pub(crate) struct Rope {
    pub(crate) case: String,
    pub(crate) config: Value,
    /// The tokens of the shorter prompt.
    short: usize,
    /// After the shorter prompt and after the whole one.
    logits: [Vec<f32>; 2],
    /// Greedy decoding behind the shorter prompt, out of the learned context.
    tokens: Vec<u32>,
}

pub(crate) fn ropes() -> Ropes {
    serde_json::from_str(include_str!("ropes.json")).unwrap()
}

/// The logits after these tokens, computed at once.
pub(crate) fn after(ctx: &RankContext, path: &Path, tokens: &[u32]) -> anyhow::Result<Vec<f32>> {
    let files = Files::open(path)?;
    let mesh = ctx.mesh(&[("tp", ctx.world_size())])?;
    let plan = Decoder::plan(&files.config, "tp");
    let vb =
        MeshVarBuilder::from_weights(files.weights(), 0, &mesh, plan, DType::F32, &Device::Cpu)?.frozen();
    let model = Decoder::new(&files.config, 32, &vb)?;
    let mut cache = Cache::new(files.config.num_hidden_layers, 32);
    let tokens = Tensor::from_slice(tokens, (1, tokens.len()), &Device::Cpu)?;
    Ok(model.next(&tokens, &mut cache)?.squeeze(0)?.to_vec1()?)
}

#[test]
fn each_kind_of_rotary_positions_computes_the_logits_of_transformers() {
    let Ropes { prompt, models } = ropes();
    for Rope { case, config, short, logits, .. } in models {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &config);
        for ranks in 1..=3 {
            let (path, prompt, want, case) =
                (folder.path().to_owned(), prompt.clone(), logits.clone(), case.clone());
            on_ranks(ranks, &case.clone(), move |ctx| -> anyhow::Result<()> {
                for (length, want) in [(short, &want[0]), (prompt.len(), &want[1])] {
                    for (got, want) in after(ctx, &path, &prompt[..length])?.iter().zip(want) {
                        let on = ctx.world_size();
                        assert!(
                            (got - want).abs() < 1e-4,
                            "{case}, {length} tokens on {on}: {got} instead of {want}"
                        );
                    }
                }
                Ok(())
            });
        }
    }
}

#[test]
fn each_kind_decodes_the_tokens_of_transformers_out_of_the_learned_context() {
    let Ropes { prompt, models } = ropes();
    for Rope { case, config, short, tokens, .. } in models {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &config);
        for mesh in [[1, 1], [2, 1], [2, 2]] {
            let got = greedy(folder.path(), &prompt[..short], tokens.len(), mesh);
            assert_eq!(got, tokens, "{case} on {mesh:?}");
        }
    }
}

#[test]
fn keys_of_the_shorter_context_are_never_mixed_with_those_of_a_longer_one() {
    let Ropes { prompt, models } = ropes();
    let Rope { config, .. } = models.into_iter().find(|rope| rope.case == "longrope of phi3").unwrap();
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &config);
    let path = folder.path().to_owned();
    on_ranks(2, "mixed", move |ctx| -> anyhow::Result<()> {
        let files = Files::open(&path)?;
        let mesh = ctx.mesh(&[("tp", 2)])?;
        let plan = Decoder::plan(&files.config, "tp");
        let vb =
            MeshVarBuilder::from_weights(files.weights(), 0, &mesh, plan, DType::F32, &Device::Cpu)?.frozen();
        let model = Decoder::new(&files.config, 32, &vb)?;
        let mut cache = Cache::new(files.config.num_hidden_layers, 32);
        let tokens = |tokens: &[u32]| Tensor::from_slice(tokens, (1, tokens.len()), &Device::Cpu);
        model.next(&tokens(&prompt[..5])?, &mut cache)?;
        let said = model.next(&tokens(&prompt[5..])?, &mut cache).unwrap_err().to_string();
        assert!(said.contains("longer than 8") && said.contains("5 cached"), "{said}");
        Ok(())
    });
}

#[test]
fn fields_of_rotary_positions_that_do_not_fit_are_refused_by_name() {
    let models = ropes().models;
    let with = |case: &str, changes: Value| {
        let mut config = models.iter().find(|rope| rope.case == case).unwrap().config.clone();
        for (name, value) in changes.as_object().unwrap() {
            config["rope_parameters"][name] = value.clone();
        }
        format!("{:#}", Config::parse(&config.to_string()).unwrap_err())
    };
    let cases = [
        ("yarn", json!({"beta_slow": 64}), "beta_slow 64"),
        ("yarn", json!({"truncate": 3}), "truncate"),
        ("yarn", json!({"short_factor": [1]}), "short_factor"),
        ("yarn", json!({"attention_factor": "x"}), "attention_factor"),
        ("dynamic", json!({"factor": null}), "no factor"),
        ("longrope of phi3", json!({"long_factor": [1, 2]}), "long_factor has 2 factors for 8 pairs"),
        ("longrope of phi3", json!({"short_factor": [1, 2, 3, 4, 5, 6, 7, 0]}), "short_factor is 0"),
        ("a share", json!({"partial_rotary_factor": 0.2}), "3 of it"),
        ("a share", json!({"partial_rotary_factor": 1.5}), "partial_rotary_factor is 1.5"),
        ("a share", json!({"rope_type": "yarn"}), "\"yarn\" is not supported"),
        ("yarn", json!({"partial_rotary_factor": 0.5}), "only 1 is supported for model_type \"llama\""),
        (
            "two kinds of layers",
            json!({"sliding_attention": {"rope_type": "linear"}}),
            "rope_parameters.sliding_attention",
        ),
        ("two kinds of layers", json!({"sliding_attention": 3}), "sliding_attention is 3"),
    ];
    for (case, changes, want) in cases {
        let said = with(case, changes.clone());
        assert!(said.contains(want), "{case}, {changes}: {said}, want {want:?}");
    }
}
