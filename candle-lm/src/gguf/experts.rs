//! How the metadata of a GGUF file describes experts.

use anyhow::{Result, ensure};
use candle_shard::Weights;
use serde_json::{Map, Value, json};

use super::{Metadata, plain};
use crate::config::MOST_LAYERS;
use crate::config::experts::MIXTRAL;

/// The keys that [`fields`] reads beside those that are fields, all after the name of the architecture, and the only value
/// that is supported: softmax for the scores, and no experts that all tokens use.
const ONLY: [(&str, u64); 2] = [("expert_gating_func", 1), ("expert_shared_count", 0)];

/// Their names.
pub(super) const KEYS: [&str; 2] = [ONLY[0].0, ONLY[1].0];

/// Changes the fields to those that a `config.json` would have.
///
/// # Errors
/// If scores are computed in another way, or there are experts of another kind; the key is named.
pub(super) fn fields(
    kind: &str,
    metadata: &Metadata,
    weights: &Weights,
    fields: &mut Map<String, Value>,
) -> Result<()> {
    for (key, only) in ONLY {
        let value = metadata.get(&format!("{kind}.{key}")).and_then(plain);
        ensure!(
            value.as_ref().is_none_or(|value| *value == json!(only)),
            "{kind}.{key} is {}, and only {only} is supported",
            value.unwrap_or_default()
        );
    }
    // Files of models without experts may say that there are none.
    for name in ["num_local_experts", "num_experts_per_tok"] {
        if fields.get(name) == Some(&json!(0)) {
            fields.remove(name);
        }
    }
    if !fields.contains_key("num_local_experts") {
        return Ok(());
    }
    match kind {
        "llama" => {
            fields.insert("model_type".into(), json!("mixtral"));
            let normalize = fields.remove("norm_topk_prob");
            ensure!(
                normalize.as_ref().is_none_or(|value| *value == json!(true)),
                "{kind}.expert_weights_norm is false, and only true is supported"
            );
        }
        "qwen3moe" => {
            // Which llama.cpp takes for granted.
            fields.entry("norm_topk_prob").or_insert(json!(true));
            let layers =
                fields.get("num_hidden_layers").and_then(Value::as_u64).unwrap_or(0).min(MOST_LAYERS as u64);
            let is_dense = |layer: &u64| weights.shape(&format!("blk.{layer}.ffn_gate_inp.weight")).is_err();
            fields.insert("mlp_only_layers".into(), (0..layers).filter(is_dense).collect());
        }
        _ => {}
    }
    Ok(())
}

/// The name that a tensor of one expert has on the Hub, in files whose experts are not stacked.
pub(super) fn renamed(layer: &str, module: &str, expert: &str) -> Option<String> {
    let part = ["ffn_gate", "ffn_up", "ffn_down"].iter().position(|name| *name == module)?;
    Some(format!("model.layers.{layer}.{}.{expert}.{}.weight", MIXTRAL.experts, MIXTRAL.layers[part]))
}
