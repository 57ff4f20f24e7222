//! Sentence embeddings of a BERT encoder over ranks against transformers'; facts of `benchmarks/minilm_facts.py`.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use candle_lm::sentence_embedding::{self, Encoder, EncoderConfig};
use candle_lm::tokens;
use candle_shard::nn::MeshVarBuilder;
use serde::Deserialize;
use serde_json::{Value, json};
use test_utils::{on_ranks, skip};

use crate::lm::facts::weight;

#[derive(Deserialize)]
pub(crate) struct Facts {
    pub(crate) small: Small,
    real: Real,
}

/// A small encoder whose weights follow from their names.
#[derive(Deserialize)]
pub(crate) struct Small {
    config: Value,
    names: BTreeMap<String, Vec<usize>>,
    pub(crate) ids: Vec<Vec<u32>>,
    pub(crate) embeddings: Vec<Vec<f32>>,
}

/// all-MiniLM-L6-v2.
#[derive(Deserialize)]
struct Real {
    sentences: Vec<String>,
    ids: Vec<Vec<u32>>,
    embeddings: Vec<Vec<f32>>,
}

pub(crate) fn facts() -> Facts {
    serde_json::from_str(include_str!("sentence_embedding.json")).unwrap()
}

/// Writes the small encoder, with these tensors too.
pub(crate) fn write(folder: &Path, small: &Small, more: &[&str]) {
    fs::write(folder.join("config.json"), small.config.to_string()).unwrap();
    let mut tensors: HashMap<String, Tensor> =
        small.names.iter().map(|(name, shape)| (name.clone(), weight(name, shape))).collect();
    tensors.extend(
        more.iter().map(|name| ((*name).to_owned(), Tensor::zeros(2, DType::F32, &Device::Cpu).unwrap())),
    );
    candle_core::safetensors::save(&tensors, folder.join("model.safetensors")).unwrap();
}

/// Compares embeddings on a number of ranks, up to a distance of the numbers.
fn check(folder: &Path, (ids, want): (&[Vec<u32>], &[Vec<f32>]), ranks: usize, (dtype, most): (DType, f32)) {
    let (folder, ids, want) = (folder.to_owned(), ids.to_vec(), want.to_vec());
    on_ranks(ranks, "embeddings", move |ctx| -> anyhow::Result<()> {
        let mesh = ctx.mesh(&[("tp", ctx.world_size())])?;
        let (config, plan) = (EncoderConfig::read(&folder)?, Encoder::plan("tp"));
        let vb = MeshVarBuilder::from_weights(
            sentence_embedding::weights(&folder)?,
            0,
            &mesh,
            plan,
            dtype,
            &Device::Cpu,
        )?;
        let model = Encoder::new(&config, &vb.frozen())?;
        let built = vb.finish()?;
        assert_eq!(
            built.local_elem_count() < built.elem_count(),
            ctx.world_size() > 1,
            "the plan shards the encoder"
        );
        // Padding changes nothing: a batch, and each text by itself.
        let mut got = model.embed(&ids)?.to_vec2::<f32>()?;
        for ids in &ids {
            got.extend(model.embed(std::slice::from_ref(ids))?.to_vec2::<f32>()?);
        }
        for (got, want) in got.iter().zip(want.iter().chain(&want)) {
            assert_eq!(got.len(), want.len());
            for (got, want) in got.iter().zip(want) {
                let what = format!("{got} instead of {want} in {dtype:?} on {} ranks", ctx.world_size());
                assert!((got - want).abs() < most, "{what}");
            }
        }
        Ok(())
    });
}

#[test]
fn embeddings_of_a_small_encoder_are_those_of_transformers_on_every_mesh() {
    let small = facts().small;
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &small, &["pooler.dense.bias", "embeddings.position_ids"]);
    let small = (&small.ids[..], &small.embeddings[..]);
    for ranks in [1, 2, 3, 5] {
        check(folder.path(), small, ranks, (DType::F32, 1e-5));
    }
    for (half, most) in [(DType::BF16, 2e-2), (DType::F16, 2e-3)] {
        check(folder.path(), small, 2, (half, most));
    }
}

#[test]
fn what_the_encoder_does_not_compute_is_refused_by_name() {
    let mut small = facts().small;
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &small, &["classifier.bias"]);
    let said = sentence_embedding::weights(folder.path()).unwrap_err().to_string();
    assert!(said.contains("classifier.bias"), "{said}");
    fs::create_dir(folder.path().join("1_Pooling")).unwrap();
    for (said, is_read) in [
        (
            json!({"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": false, "include_prompt": true}),
            true,
        ),
        (json!({"pooling_mode_mean_tokens": false, "pooling_mode_cls_token": true}), false),
        (json!({"pooling_mode_mean_tokens": true, "pooling_mode_max_tokens": true}), false),
        (json!({"pooling_mode": "mean", "embedding_dimension": 48}), true),
        (json!({"pooling_mode": "cls"}), false),
    ] {
        fs::write(folder.path().join("1_Pooling/config.json"), said.to_string()).unwrap();
        let read = EncoderConfig::read(folder.path()).map(drop).map_err(|error| format!("{error:#}"));
        assert!(
            read.as_ref().map_or_else(|said| said.contains("pooling_mode"), |()| is_read),
            "{said}: {read:?}"
        );
        assert_eq!(read.is_ok(), is_read, "{said}: {read:?}");
    }
    fs::remove_dir_all(folder.path().join("1_Pooling")).unwrap();
    let module = |kind: &str| json!({"idx": 0, "name": "0", "path": "", "type": format!("sentence_transformers.models.{kind}")});
    for (kinds, is_read) in
        [(["Transformer", "Pooling", "Normalize"], true), (["Transformer", "Pooling", "Dense"], false)]
    {
        let modules: Vec<Value> = kinds.iter().map(|kind| module(kind)).collect();
        fs::write(folder.path().join("modules.json"), json!(modules).to_string()).unwrap();
        let read = EncoderConfig::read(folder.path()).map_err(|error| format!("{error:#}"));
        assert!(read.as_ref().map_or_else(|said| said.contains("Dense"), |_| is_read), "{read:?}");
    }
    let pool = json!({"path": "2_Pooling", "type": "sentence_transformers.models.Pooling"});
    fs::write(folder.path().join("modules.json"), json!([pool]).to_string()).unwrap();
    fs::create_dir(folder.path().join("2_Pooling")).unwrap();
    for (file, field, other, value) in [
        ("2_Pooling/config.json", "pooling_mode", json!("cls"), json!("mean")),
        ("sentence_bert_config.json", "do_lower_case", json!(true), json!(false)),
        ("config_sentence_transformers.json", "default_prompt_name", json!("query"), json!(null)),
    ] {
        let read = |value: &Value| {
            fs::write(folder.path().join(file), json!({field: value, "max_seq_length": 5}).to_string())
                .unwrap();
            EncoderConfig::read(folder.path()).map_err(|error| format!("{error:#}"))
        };
        let said = read(&other).unwrap_err();
        assert!(said.contains(field), "{said}");
        read(&value).unwrap();
    }
    // As sentence-transformers has it, which cuts longer texts.
    let config = EncoderConfig::read(folder.path()).unwrap();
    assert!(config.longest() == 5 && config.max_position_embeddings > 5);
    for file in ["modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"] {
        fs::remove_file(folder.path().join(file)).unwrap();
    }
    let plain = small.config.clone();
    for (field, value) in [
        ("hidden_act", json!("gelu_new")),
        ("model_type", json!("roberta")),
        ("position_embedding_type", json!("relative_key")),
        ("num_attention_heads", json!(7)),
        ("is_decoder", json!(true)),
    ] {
        small.config = plain.clone();
        small.config[field] = value;
        write(folder.path(), &small, &[]);
        let said = format!("{:#}", EncoderConfig::read(folder.path()).unwrap_err());
        assert!(said.contains(field), "{said}");
    }
}

#[test]
fn embeddings_of_minilm_are_those_of_sentence_transformers_on_every_mesh() {
    let Some(folder) = std::env::var_os("CANDLE_MINILM").filter(|path| !path.is_empty()).map(PathBuf::from)
    else {
        skip("CANDLE_MINILM is not set; see scripts/minilm.sh");
        return;
    };
    let real = facts().real;
    let tokenizer = tokens::read(&folder).unwrap();
    let ids = |text: &String| tokenizer.encode(text.as_str(), true).unwrap().get_ids().to_vec();
    assert_eq!(real.sentences.iter().map(ids).collect::<Vec<_>>(), real.ids);
    for ranks in [1, 2, 3, 5] {
        check(&folder, (&real.ids, &real.embeddings), ranks, (DType::F32, 1e-5));
    }
}
