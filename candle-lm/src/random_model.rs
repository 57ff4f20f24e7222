//! A small random model in the layout of the Hub, so that the program runs where there is none.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use anyhow::{Result, anyhow};
use candle_core::{DType, Device, Tensor};
use candle_shard::random::{Distribution, Stream, sample_full};
use serde_json::json;

use crate::config::Config;
use crate::config::experts::{Experts, MIXTRAL};
use crate::config::parts::Parts;
use crate::tokens;

/// A config of the small model.
pub fn config() -> Config {
    Config {
        hidden_size: 256,
        intermediate_size: 704,
        num_hidden_layers: 4,
        num_attention_heads: 8,
        num_key_value_heads: Some(4),
        head_dim: None,
        vocab_size: 256,
        max_position_embeddings: 2048,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: None,
        tie_word_embeddings: false,
        bos_token_id: None,
        eos_token_id: None,
        parts: Parts::default(),
        quantization: None,
        has_images: false,
        family: "llama",
        notes: Vec::new(),
    }
}

/// A config of a small mixture of experts.
pub fn mixture() -> Config {
    let mixture = config();
    let (count, chosen, hidden) = (8, 2, mixture.intermediate_size);
    let experts = Experts { count, chosen, hidden, normalize: true, layers: Vec::new(), balance: 0.0, names: &MIXTRAL };
    let windows = vec![None; mixture.num_hidden_layers];
    Config { parts: Parts { experts: Some(experts), windows, ..Parts::default() }, family: "mixtral", ..mixture }
}

/// Writes a model of random parameters into `folder`: config, weights, and a tokenizer of bytes. It is a Llama, or a Mixtral
/// if it has experts.
///
/// # Errors
/// If a file cannot be written.
pub fn write(folder: &Path, config: &Config, seed: u64, dtype: DType) -> Result<()> {
    fs::create_dir_all(folder)?;
    let mut written = serde_json::to_value(config)?;
    written["architectures"] = json!(["LlamaForCausalLM"]);
    if let Some(Experts { count, chosen, .. }) = &config.parts.experts {
        written["model_type"] = json!("mixtral");
        written["architectures"] = json!(["MixtralForCausalLM"]);
        written["num_local_experts"] = json!(count);
        written["num_experts_per_tok"] = json!(chosen);
    }
    fs::write(folder.join("config.json"), serde_json::to_string_pretty(&written)?)?;
    let mut tensors = HashMap::new();
    for (name, shape) in config.stored() {
        let tensor = match shape[..] {
            [width] => Tensor::ones(width, dtype, &Device::Cpu)?,
            _ => {
                let spread = Distribution::Normal { mean: 0.0, stdev: 0.5 / (shape[1] as f64).sqrt() };
                sample_full(Stream::new(seed, &name), spread, shape.as_slice(), dtype, &Device::Cpu)?
            }
        };
        tensors.insert(name, tensor);
    }
    // Python's loaders want to know which framework the tensors are for.
    let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    safetensors::serialize_to_file(&tensors, Some(format), &folder.join("model.safetensors"))?;
    let tokenizer = tokens::of_bytes()?;
    tokenizer.save(folder.join("tokenizer.json"), true).map_err(|error| anyhow!("{error}"))
}
