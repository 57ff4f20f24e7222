//! How the metadata and tensors of a GGUF file scale rotary positions.

use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device};
use candle_shard::Weights;
use serde_json::{Map, Value, json};

use super::{Metadata, latent, plain, whole};
use crate::config::{Config, RopeScaling};

/// The kinds of models that may turn a share of each head.
const SHARES: [&str; 3] = ["phi3", "glm4moe", "minimax-m2"];

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

/// By how much the factor of scores grows with the logarithm of YaRN's factor, in latent attention.
const LOG_MULTIPLIER: &str = "rope.scaling.yarn_log_multiplier";

/// The keys that [`fields`] reads, all after the name of the architecture.
pub(super) const KEYS: [&str; 10] = [
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    LOG_MULTIPLIER,
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
    let known: &[&str] = match scaling {
        Some("yarn") if kind == latent::KIND => &[
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
        None | Some("none") => &[],
        Some(other) => {
            bail!("{kind}.rope.scaling.type is {other:?}, and only none, linear and yarn are supported")
        }
    };
    let always = ["rope.dimension_count", "rope.scaling.type", "rope.scaling.finetuned"];
    for key in KEYS.iter().filter(|key| !always.contains(key) && !known.contains(key)) {
        let is_one = own(key).and_then(plain).and_then(|value| value.as_f64()) == Some(1.0);
        let is_neutral = is_one && key.ends_with("attn_factor");
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
            if kind == latent::KIND {
                // Cosines and sines have no factor.
                let share = own(LOG_MULTIPLIER).and_then(plain).and_then(|share| share.as_f64());
                match share.filter(|&share| share != 0.0) {
                    Some(share) => ["mscale", "mscale_all_dim"]
                        .into_iter()
                        .for_each(|name| drop(said.insert(name.into(), json!(10.0 * share)))),
                    None => drop(said.insert("attention_factor".into(), json!(1.0))),
                }
            }
            fields.insert("rope_scaling".into(), said.into());
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
        let count = own("rope.dimension_count").and_then(whole);
        let heads = own("attention.head_count").and_then(whole).unwrap_or(1).max(1);
        let embedding = own("embedding_length").and_then(whole).unwrap_or(0);
        let dim = own("attention.key_length").and_then(whole).unwrap_or(embedding / heads).max(1);
        fields.insert("partial_rotary_factor".into(), json!(count.unwrap_or(dim) as f64 / dim as f64));
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
