//! A small random model in the layout of the Hub, so that the program runs where there is none.

use std::collections::HashMap;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use candle_core::{DType, Device, Tensor};
use candle_shard::random::{Distribution, Stream, sample_full};
use candle_shard::regular;
use serde_json::{Map, Value, json};

use crate::config::Config;
use crate::config::experts::Experts;
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
    let experts = Experts { count, chosen, hidden, ..Experts::default() };
    let windows = vec![None; mixture.num_hidden_layers];
    Config {
        parts: Parts { experts: Some(experts), windows, ..Parts::default() },
        family: "mixtral",
        ..mixture
    }
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
    weights(folder, config, seed, dtype, |columns| 0.5 / (columns as f64).sqrt())?;
    let tokenizer = tokens::of_bytes()?;
    tokenizer.save(folder.join("tokenizer.json"), true).map_err(|error| anyhow!("{error}"))
}

/// Files of a tokenizer and of texts, which a random model of a config has too.
const BESIDE: [&str; 7] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
];

/// The deviation of random weights where a config does not say it.
const DEVIATION: f64 = 0.02;

/// Writes a model of random parameters into `folder` that has the config and the tokenizer of the folder `like`, whose weights need not be
/// there: matrices of the deviation that the config names (`initializer_range`), as transformers makes them, norms that change
/// nothing, and biases of zeros.
///
/// # Errors
/// If the config is not that of a model that can be run, without what the fields `ignored` say, or a file cannot be read or written.
pub fn write_like(folder: &Path, like: &Path, ignored: &[String], seed: u64, dtype: DType) -> Result<()> {
    let config = Config::read(like, ignored)?;
    let mut fields: Map<String, Value> =
        serde_json::from_str(&regular::read_text(like.join("config.json"), regular::CONFIG)?)?;
    // What is written is not quantized.
    fields.remove("quantization_config");
    let named = fields.get("initializer_range").and_then(Value::as_f64);
    let deviation = named.filter(|range| range.is_finite() && *range > 0.0).unwrap_or(DEVIATION);
    fs::create_dir_all(folder)?;
    fs::write(folder.join("config.json"), serde_json::to_string_pretty(&fields)?)?;
    for name in BESIDE {
        match regular::read(like.join(name), regular::TOKENIZER) {
            Ok(bytes) => fs::write(folder.join(name), bytes)?,
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error).with_context(|| format!("{}", like.join(name).display())),
        }
    }
    weights(folder, &config, seed, dtype, |_| deviation)
}

/// Writes random weights; `deviation` is that of matrices with so many columns.
fn weights(
    folder: &Path,
    config: &Config,
    seed: u64,
    dtype: DType,
    deviation: impl Fn(usize) -> f64,
) -> Result<()> {
    let mut tensors = HashMap::new();
    for (name, shape) in config.stored() {
        let tensor = match shape[..] {
            [width] if name.ends_with(".A_log") => {
                let spread = Distribution::Uniform { lo: 0.0, up: 16f64.ln() };
                sample_full(Stream::new(seed, &name), spread, &[width], dtype, &Device::Cpu)?
            }
            [width] if name.contains(".linear_attn.") || name.ends_with(".dt_bias") => {
                Tensor::ones(width, dtype, &Device::Cpu)?
            }
            [heads] if name.ends_with(".sinks") => {
                let spread = Distribution::Normal { mean: 0.0, stdev: deviation(config.hidden_size) };
                sample_full(Stream::new(seed, &name), spread, &[heads], dtype, &Device::Cpu)?
            }
            // Those of experts too.
            _ if name.ends_with("_bias") && !name.contains(".linear_attn.") => {
                Tensor::zeros(shape.as_slice(), dtype, &Device::Cpu)?
            }
            [width] if name.ends_with("bias") || config.parts.norms_add_one => {
                Tensor::zeros(width, dtype, &Device::Cpu)?
            }
            [width] => Tensor::ones(width, dtype, &Device::Cpu)?,
            _ => {
                let spread = Distribution::Normal { mean: 0.0, stdev: deviation(shape[1]) };
                sample_full(Stream::new(seed, &name), spread, shape.as_slice(), dtype, &Device::Cpu)?
            }
        };
        tensors.insert(name, tensor);
    }
    // Python's loaders want to know which framework the tensors are for.
    let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    Ok(safetensors::serialize_to_file(&tensors, Some(format), &folder.join("model.safetensors"))?)
}
