//! How the metadata and tensors of a GGUF file describe latent attention.

use anyhow::{Context, Result, bail, ensure};
use candle_shard::Weights;
use serde_json::{Map, Value, json};

use super::experts::drafts;
use super::{Metadata, plain, whole};

/// The architecture of DeepSeek's models and of others that are made like them.
pub(super) const DEEPSEEK: &str = "deepseek2";
/// That of Mistral's, whose queries grow with their positions.
pub(super) const MISTRAL: &str = "mistral4";

/// Whether models of an architecture have latent attention.
pub(super) fn is_kind(kind: &str) -> bool {
    [DEEPSEEK, MISTRAL].contains(&kind)
}

/// The keys that [`fields`] reads, all after the name of the architecture.
pub(super) const KEYS: [&str; 7] = [
    "attention.q_lora_rank",
    "attention.kv_lora_rank",
    "attention.key_length",
    "attention.key_length_mla",
    "attention.value_length",
    "attention.value_length_mla",
    "expert_gating_func",
];

/// Fields of mixtures, and what they are where a file does not have their keys.
const ABSENT: [(&str, u64); 8] = [
    ("moe_intermediate_size", 1),
    ("n_group", 1),
    ("n_routed_experts", 1),
    ("n_shared_experts", 0),
    ("num_experts_per_tok", 1),
    ("num_nextn_predict_layers", 0),
    ("routed_scaling_factor", 1),
    ("topk_group", 1),
];

/// The layers and the tokens of GLM-4.7-Flash, whose first files do not say how scores are made.
const FLASH: ([u64; 2], u64) = ([47, 48], 154_880);

/// Changes the fields to those that a `config.json` would have.
///
/// # Errors
/// If a key is not there, or the widths do not fit each other.
pub(super) fn fields(
    kind: &str,
    metadata: &Metadata,
    weights: &Weights,
    fields: &mut Map<String, Value>,
) -> Result<()> {
    let number = |key: &str| metadata.get(&format!("{kind}.{key}")).and_then(whole);
    let size = |key: &str| number(key).with_context(|| format!("there is no {kind}.{key}"));
    let (rank, rotary) = (size("attention.kv_lora_rank")?, size("rope.dimension_count")?);
    // Where keys and values are one head of latents, the widths of the others have keys of their own.
    let of_head = |name: &str| number(&format!("{name}_mla")).map_or_else(|| size(name), Ok);
    let (key, value) = (of_head("attention.key_length")?, of_head("attention.value_length")?);
    ensure!(key > rotary, "{kind}: keys are {key} wide, and {rotary} of it have rotary positions");
    for (name, size) in [
        ("kv_lora_rank", Some(rank)),
        ("q_lora_rank", number("attention.q_lora_rank").filter(|&rank| rank > 0)),
        ("qk_nope_head_dim", Some(key - rotary)),
        ("qk_rope_head_dim", Some(rotary)),
        ("v_head_dim", Some(value)),
    ] {
        fields.insert(name.into(), json!(size));
    }
    // One head of latents, or as many as there are queries.
    fields.remove("num_key_value_heads");
    let count = |fields: &Map<String, Value>, name: &str| fields.get(name).and_then(Value::as_u64);
    let layers = count(fields, "num_hidden_layers");
    // The layers that predict further tokens are counted with the others.
    let drafts = drafts(weights, fields);
    fields.insert("num_hidden_layers".into(), json!(layers.map(|layers| layers.saturating_sub(drafts))));
    let zero = |value: &Value| value.as_f64() == Some(0.0);
    match fields.remove("num_local_experts").filter(|count| !zero(count)) {
        Some(count) => {
            fields.insert("n_routed_experts".into(), count);
            fields.entry("first_k_dense_replace").or_insert(json!(0));
        }
        None => {
            fields.insert("first_k_dense_replace".into(), json!(layers));
        }
    }
    for (name, absent) in ABSENT {
        let idle = name != "n_shared_experts" && fields.get(name).is_some_and(zero);
        if idle || !fields.contains_key(name) {
            fields.insert(name.into(), json!(absent));
        }
    }
    fields.entry("norm_topk_prob").or_insert(json!(false));
    let is_flash = layers.is_some_and(|layers| FLASH.0.contains(&layers))
        && count(fields, "vocab_size") == Some(FLASH.1);
    let gating = metadata.get(&format!("{kind}.expert_gating_func")).and_then(plain);
    match gating.as_ref().and_then(Value::as_u64) {
        Some(2) => {}
        None if is_flash => {}
        None | Some(0 | 1) if kind == MISTRAL => {}
        None | Some(0 | 1) => {
            fields.insert("model_type".into(), json!("deepseek_v2"));
            let is_grouped = fields.get("n_group") != Some(&json!(1));
            let method = if is_grouped { "group_limited_greedy" } else { "greedy" };
            fields.insert("topk_method".into(), json!(method));
        }
        Some(other) => {
            bail!("{kind}.expert_gating_func is {other}, and only 1 and 2 are supported")
        }
    }
    Ok(())
}

/// Joins the keys and values of all heads, which newer files have apart.
///
/// # Errors
/// If there is only one of the two, or they do not fit each other.
pub(super) fn joined(mut weights: Weights) -> Result<Weights> {
    let modules = |end: &str| -> Vec<String> {
        weights.names().filter_map(|name| name.strip_suffix(end)).map(str::to_owned).collect()
    };
    for layer in modules(".self_attn.k_b_proj.weight") {
        let [keys, values] = ["k_b_proj", "v_b_proj"].map(|part| format!("{layer}.self_attn.{part}.weight"));
        weights = weights.join_latent(&keys, &values, &format!("{layer}.self_attn.kv_b_proj"))?;
    }
    Ok(weights)
}
