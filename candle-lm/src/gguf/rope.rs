//! How the metadata and tensors of a GGUF file scale rotary positions.

use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device};
use candle_shard::Weights;
use serde_json::{Map, Value, json};

use super::{Metadata, latent, plain, whole};
use crate::config::{Config, RopeScaling};

/// The kinds of models that may turn a share of each head.
const SHARES: [&str; 10] = [
    "phi3",
    "chatglm",
    "glm4",
    "glm4moe",
    "minimax-m2",
    "nemotron",
    "stablelm",
    "qwen35",
    "qwen35moe",
    "qwen3next",
];

/// The tensor with a divisor for each frequency: the scaling of Llama 3.
pub(super) const FREQUENCIES: &str = "rope_freqs.weight";

/// The tensors of Phi-3, and the fields that they stand for.
pub(super) const LISTS: [(&str, &str); 2] =
    [("rope_factors_short.weight", "short_factor"), ("rope_factors_long.weight", "long_factor")];

/// Keys of YaRN, and the fields that they stand for.
const YARN: [(&str, &str); 4] = [
    ("rope.scaling.factor", "factor"),
    ("rope.scaling.original_context_length", "original_max_position_embeddings"),
    ("rope.scaling.yarn_beta_fast", "beta_fast"),
    ("rope.scaling.yarn_beta_slow", "beta_slow"),
];

/// The part of the factor of YaRN that scores have apart from it: `mscale_all_dim`, a tenth of it in latent attention.
const LOG_MULTIPLIER: &str = "rope.scaling.yarn_log_multiplier";
/// How fast queries grow with their positions.
const TEMPERATURE: &str = "attention.temperature_scale";

/// The keys that [`fields`] reads, all after the name of the architecture.
pub(super) const KEYS: [&str; 11] = [
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    LOG_MULTIPLIER,
    TEMPERATURE,
    // How the model was trained.
    "rope.scaling.finetuned",
];

/// Adds the fields that a `config.json` would have.
///
/// # Errors
/// If a scaling is not known, or a key would have no effect; it is named.
pub(super) fn fields(
    kind: &str,
    metadata: &Metadata,
    (weights, has_values): (&Weights, bool),
    fields: &mut Map<String, Value>,
) -> Result<()> {
    let own = |key: &str| metadata.get(&format!("{kind}.{key}"));
    let has = |name: &str| weights.names().any(|known| known == name);
    let scaling = own("rope.scaling.type").map(|kind| kind.to_string().map(String::as_str)).transpose();
    let scaling = scaling.with_context(|| format!("{kind}.rope.scaling.type is not a text"))?;
    let is_phi3 = kind == "phi3";
    let yarn_attention = own("rope.scaling.factor")
        .and_then(plain)
        .and_then(|factor| factor.as_f64())
        .map_or(1.0, |factor| 0.1 * factor.max(1.0).ln() + 1.0);
    let known: &[&str] = match scaling {
        Some("yarn") if latent::is_kind(kind) => &[
            "rope.scaling.factor",
            "rope.scaling.original_context_length",
            "rope.scaling.yarn_beta_fast",
            "rope.scaling.yarn_beta_slow",
            LOG_MULTIPLIER,
        ],
        Some("yarn") => &[
            "rope.scaling.factor",
            "rope.scaling.original_context_length",
            "rope.scaling.yarn_beta_fast",
            "rope.scaling.yarn_beta_slow",
        ],
        Some("linear") => &["rope.scaling.factor"],
        None | Some("none" | "longrope") if is_phi3 => {
            &["rope.scaling.original_context_length", "rope.scaling.attn_factor"]
        }
        // The base is stretched already, and these numbers have no effect.
        None | Some("none") if ["hunyuan-dense", "hunyuan-moe"].contains(&kind) => {
            &["rope.scaling.original_context_length"]
        }
        None | Some("none") => &[],
        Some(other) => {
            bail!("{kind}.rope.scaling.type is {other:?}, and only none, linear and yarn are supported")
        }
    };
    let always = ["rope.dimension_count", "rope.scaling.type", "rope.scaling.finetuned"];
    let of_kind: &[&str] = if ["mistral3", latent::MISTRAL].contains(&kind) && scaling == Some("yarn") {
        &[LOG_MULTIPLIER, TEMPERATURE]
    } else {
        &[]
    };
    let is_known = |key: &str| [&always[..], known, of_kind].iter().any(|keys| keys.contains(&key));
    for key in KEYS.iter().filter(|key| !is_known(key)) {
        let value = own(key).and_then(plain).and_then(|value| value.as_f64());
        // llama.cpp computes the factor of YaRN by itself, and does not read the one that converters write.
        let is_usual = *key == "rope.scaling.yarn_attn_factor"
            && value.is_some_and(|value| (value - yarn_attention).abs() < 1e-5);
        let is_one = value == Some(1.0);
        let is_neutral =
            is_usual || is_one && (key.ends_with("attn_factor") || *key == "rope.scaling.factor");
        ensure!(
            own(key).is_none() || is_neutral,
            "there is {kind}.{key} with {kind}.rope.scaling.type {scaling:?}, which is not supported"
        );
    }
    match scaling {
        Some("linear") => {
            let factor = own("rope.scaling.factor").and_then(plain);
            fields.insert("rope_scaling".into(), json!({"rope_type": "linear", "factor": factor}));
        }
        Some("yarn") => {
            let said = YARN.iter().filter_map(|(key, name)| Some(((*name).to_owned(), plain(own(key)?)?)));
            let mut said: Map<String, Value> =
                said.chain([("rope_type".to_owned(), json!("yarn"))]).collect();
            if kind == "gpt-oss" {
                // So the model was trained; files do not say it.
                said.insert("truncate".into(), json!(false));
            }
            if latent::is_kind(kind) {
                // Cosines and sines have no factor.
                let share = own(LOG_MULTIPLIER).and_then(plain).and_then(|share| share.as_f64());
                match share.filter(|&share| share != 0.0) {
                    Some(share) => ["mscale", "mscale_all_dim"]
                        .into_iter()
                        .for_each(|name| drop(said.insert(name.into(), json!(10.0 * share)))),
                    None => drop(said.insert("attention_factor".into(), json!(1.0))),
                }
            }
            if let Some(all) = own(LOG_MULTIPLIER).and_then(plain).filter(|_| !latent::is_kind(kind)) {
                said.extend([("mscale".to_owned(), json!(1.0)), ("mscale_all_dim".to_owned(), all)]);
            }
            said.extend(own(TEMPERATURE).and_then(plain).map(|scale| ("llama_4_scaling_beta".into(), scale)));
            if kind == latent::MISTRAL {
                said.entry("llama_4_scaling_beta").or_insert(json!(0.0));
            }
            fields.insert("rope_scaling".into(), said.into());
        }
        None | Some("none") if kind == latent::MISTRAL => {
            let said = json!({"rope_type": "default", "llama_4_scaling_beta": 0.0});
            fields.insert("rope_scaling".into(), said);
        }
        _ => {}
    }
    if is_phi3 {
        if let Some(learned) = own("rope.scaling.original_context_length").and_then(plain) {
            fields.insert("original_max_position_embeddings".into(), learned);
        }
        let lists = LISTS.map(|(tensor, _)| has(tensor));
        ensure!(lists[0] == lists[1], "there is only one of {} and {}", LISTS[0].0, LISTS[1].0);
        if lists[0] {
            let mut said = Map::from_iter([("rope_type".to_owned(), json!("longrope"))]);
            said.extend(
                own("rope.scaling.attn_factor")
                    .and_then(plain)
                    .map(|factor| ("attention_factor".into(), factor)),
            );
            for (tensor, name) in LISTS {
                said.insert(name.into(), json!(read((weights, has_values), tensor)?));
            }
            fields.insert("rope_scaling".into(), said.into());
        }
    }
    if SHARES.contains(&kind) {
        let dim = fields.get("head_dim").and_then(Value::as_u64).filter(|&dim| dim > 0);
        let count = own("rope.dimension_count").and_then(whole).or(dim);
        if let (Some(count), Some(dim)) = (count, dim) {
            fields.insert("partial_rotary_factor".into(), json!(count as f64 / dim as f64));
        }
    }
    Ok(())
}

/// Sets the scaling that is in a tensor of the file.
///
/// # Errors
/// If there is another scaling too, or the tensor does not fit.
pub(super) fn read_factors(config: &mut Config, (weights, has_values): (&Weights, bool)) -> Result<()> {
    if weights.names().any(|name| name == FREQUENCIES) {
        ensure!(config.rope_scaling.is_none(), "there is {FREQUENCIES} and another rope scaling");
        config.rope_scaling = Some(RopeScaling::Factors(read((weights, has_values), FREQUENCIES)?));
        config.check()?;
    }
    Ok(())
}

/// Returns whether a tensor was read with the config.
pub(crate) fn is_read(config: &Config, tensor: &str) -> bool {
    match config.rope_scaling {
        Some(RopeScaling::Factors(_)) => tensor == FREQUENCIES,
        Some(RopeScaling::Longrope { .. }) => LISTS.iter().any(|(name, _)| *name == tensor),
        _ => false,
    }
}

/// The most factors of a tensor: one for each pair of a head.
const MOST: usize = 1 << 16;

fn read((weights, has_values): (&Weights, bool), name: &str) -> Result<Vec<f64>> {
    let shape = weights.shape(name)?;
    let &[count] = shape else { bail!("{name} has the shape {shape:?}; expected a list") };
    ensure!(count <= MOST, "{name} has {count} factors; expected at most {MOST}");
    if !has_values {
        return Ok(vec![1.0; count]);
    }
    let all = 0..count;
    let values = weights
        .read_block(name, std::slice::from_ref(&all), &Device::Cpu)?
        .to_dtype(DType::F64)?
        .to_vec1::<f64>()?;
    ensure!(
        values.iter().all(|&value| value.is_finite() && value > 0.0),
        "{name} has a factor that is not more than 0"
    );
    Ok(values)
}
