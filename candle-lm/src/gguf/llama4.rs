//! What files of Llama 4 leave to the program.

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value, json};

use crate::config::Config;
use crate::config::parts::AttentionTemperature;

/// The architecture.
pub(super) const KIND: &str = "llama4";
/// The positions of a chunk, and of a step of the factor of queries.
pub(super) const CHUNK: usize = 8192;
/// How queries of layers without rotary positions grow.
pub(super) const TEMPERATURE: AttentionTemperature =
    AttentionTemperature { scale: 0.1, length: CHUNK, first: 1, is_of_rotary: false };
/// Every how many layers one sees all tokens, and has no rotary positions.
pub(super) const PERIOD: usize = 4;

/// Returns whether queries and keys have norms in llama.cpp, which follows from the number of experts.
pub(super) fn has_norms(experts: usize) -> bool {
    experts != 128
}

/// Returns every how many layers one has experts, if it is every so many.
pub(super) fn step(config: &Config) -> Option<usize> {
    let has_experts = |layer| config.parts.experts(layer).is_some();
    let mut layers = 0..config.num_hidden_layers;
    let step = layers.clone().position(has_experts)? + 1;
    layers.all(|layer| has_experts(layer) == (layer + 1).is_multiple_of(step)).then_some(step)
}

/// Changes the fields to those that a `config.json` would have.
///
/// # Errors
/// If a key is missing, or says of layers what is not supported.
pub(super) fn fields(fields: &mut Map<String, Value>) -> Result<()> {
    for (key, name, only) in [
        ("attention.sliding_window", "sliding_window", CHUNK),
        ("attention.sliding_window_pattern", "sliding_window_pattern", PERIOD),
    ] {
        let said = fields.remove(name);
        ensure!(
            said.as_ref().is_none_or(|said| *said == json!(only)),
            "{KIND}.{key} is {}, and only {only} is supported",
            said.unwrap_or_default()
        );
    }
    let mut need =
        |key: &str, name: &str| fields.remove(name).with_context(|| format!("there is no {KIND}.{key}"));
    let of_experts = need("expert_feed_forward_length", "moe_intermediate_size")?;
    let of_others = need("feed_forward_length", "intermediate_size")?;
    let experts = need("expert_count", "num_local_experts")?;
    let step = need("interleave_moe_layer_step", "interleave_moe_layer_step")?;
    let normalizes = fields.remove("norm_topk_prob").is_some_and(|value| value != json!(false));
    ensure!(!normalizes, "{KIND}.expert_weights_norm is true, and only false is supported");
    let has_norms = experts.as_u64().is_none_or(|experts| has_norms(experts as usize));
    for (name, value) in [
        ("attention_chunk_size", json!(CHUNK)),
        ("attn_scale", json!(TEMPERATURE.scale)),
        ("attn_temperature_tuning", json!(true)),
        ("floor_scale", json!(CHUNK)),
        ("interleave_moe_layer_step", step),
        ("intermediate_size", of_experts),
        ("intermediate_size_mlp", of_others),
        ("no_rope_layer_interval", json!(PERIOD)),
        ("num_local_experts", experts),
        ("use_qk_norm", json!(has_norms)),
    ] {
        fields.insert(name.into(), value);
    }
    Ok(())
}
