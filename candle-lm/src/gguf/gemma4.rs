//! What GGUF files of Gemma 4 say.

use anyhow::{Context, Result, ensure};
use candle_shard::Weights;
use serde_json::{Map, Value, json};

use super::{KEY_HEADS, Metadata, one_of, whole};
use crate::config::tensors::{BESIDE_DENSE, EMBEDDING_GATE, LAYER_EMBEDDINGS, LAYER_SCALAR, ROUTER};

/// The architecture.
pub(super) const KIND: &str = "gemma4";

/// The keys that [`fields`] reads, all after the name of the architecture.
pub(super) const KEYS: [&str; 5] = [
    "attention.key_length_swa",
    "attention.shared_kv_layers",
    "attention.value_length_swa",
    "embedding_length_per_layer_input",
    "rope.dimension_count_swa",
];

/// The norms of a layer whose experts are beside another network, in the order of [`BESIDE_DENSE`].
const NORMS: [&str; 3] = ["post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2"];

/// The tensors of embeddings of layers, in the order of [`LAYER_EMBEDDINGS`] and of [`EMBEDDING_GATE`].
const EMBEDDINGS: [&str; 3] = ["per_layer_token_embd", "per_layer_model_proj", "per_layer_proj_norm"];
const GATE: [&str; 3] = ["inp_gate", "proj", "post_norm"];

/// The name that a tensor outside of layers has here, if only this architecture has it.
pub(super) fn of_model(name: &str) -> Option<String> {
    let module = name.strip_suffix(".weight")?;
    let at = EMBEDDINGS.iter().position(|known| *known == module)?;
    Some(format!("{}.weight", LAYER_EMBEDDINGS[at]))
}

/// The name that a tensor of a layer has here, if only this architecture has it.
pub(super) fn renamed(layer: &str, rest: &[&str]) -> Option<String> {
    let name = match rest {
        ["layer_output_scale", "weight"] => LAYER_SCALAR.to_owned(),
        ["ffn_gate_inp", "scale"] => format!("{ROUTER}.scale"),
        ["ffn_down_exps", "scale"] => format!("{ROUTER}.per_expert_scale"),
        [module, "weight"] => {
            let place = |names: [&str; 3]| names.iter().position(|name| name == module);
            let norm = place(NORMS).map(|at| BESIDE_DENSE[at]);
            format!("{}.weight", norm.or_else(|| place(GATE).map(|at| EMBEDDING_GATE[at]))?)
        }
        _ => return None,
    };
    Some(format!("model.layers.{layer}.{name}"))
}

/// Changes the fields to those that a `config.json` would have.
///
/// # Errors
/// If a key is missing, or layers are unlike each other in a way that is not supported.
pub(super) fn fields(metadata: &Metadata, weights: &Weights, fields: &mut Map<String, Value>) -> Result<()> {
    let own = |key: &str| metadata.get(&format!("{KIND}.{key}"));
    let size =
        |key: &str| own(key).and_then(whole).with_context(|| format!("there is no number for {KIND}.{key}"));
    let (full, local) = (size("attention.key_length")?, size("attention.key_length_swa")?);
    for key in ["attention.value_length_swa", "rope.dimension_count_swa"] {
        ensure!(
            own(key).and_then(whole).is_none_or(|width| width == local),
            "{KIND}.{key} is not {local}, the width of a head, which is not supported"
        );
    }
    fields.insert("global_head_dim".into(), json!(full));
    fields.insert("head_dim".into(), json!(local));
    for (key, name) in [
        ("attention.shared_kv_layers", "num_kv_shared_layers"),
        ("embedding_length_per_layer_input", "hidden_size_per_layer_input"),
    ] {
        fields.insert(name.into(), json!(own(key).and_then(whole).unwrap_or(0)));
    }
    let types = fields.get("layer_types").and_then(Value::as_array).cloned();
    let types = types.with_context(|| format!("there is no list {KIND}.attention.sliding_window_pattern"))?;
    // Numbers of each layer: one of layers with a window, and one of others.
    let of_kind = |list: &[Value], kind: &str, what: &str| {
        let values = list.iter().zip(&types).filter(|(_, of)| *of == kind).map(|(value, _)| value);
        ensure!(list.len() == types.len(), "{KIND}: layers have unlike {what}, which is not supported");
        one_of(KIND, what, values)
    };
    let first_full = types.iter().position(|kind| kind == "full_attention");
    let has_values =
        first_full.is_none_or(|layer| weights.contains_tensor(&format!("blk.{layer}.attn_v.weight")));
    fields.insert("attention_k_eq_v".into(), json!(!has_values));
    if let Some(Value::Array(list)) = fields.get("num_key_value_heads").cloned() {
        let [of_windows, of_others] =
            ["sliding_attention", "full_attention"].map(|kind| of_kind(&list, kind, KEY_HEADS));
        let (of_windows, of_others) = (of_windows?, of_others?);
        let one = of_windows.or_else(|| of_others.clone());
        ensure!(
            !has_values || of_others.is_none() || of_others == one,
            "{KIND}: layers without a window have other numbers of key heads and values of their own, which is not supported"
        );
        fields.insert("num_key_value_heads".into(), json!(one));
        fields.extend(of_others.map(|count| ("num_global_key_value_heads".into(), count)));
    }
    if let Some(Value::Array(list)) = fields.get("intermediate_size").cloned() {
        // Layers that use keys of others may be twice as wide.
        let shared = fields.get("num_kv_shared_layers").and_then(Value::as_u64).unwrap_or(0) as usize;
        let (own, others) = list.split_at(list.len().saturating_sub(shared));
        let width = |list: &[Value]| one_of(KIND, "widths of feed-forward networks", list.iter());
        let (own, others) = (width(own)?, width(others)?);
        let twice = own.as_ref().and_then(Value::as_u64).and_then(|width| width.checked_mul(2));
        let is_wide = others.is_some() && others != own;
        ensure!(
            !is_wide || others.as_ref().and_then(Value::as_u64) == twice,
            "{KIND}: layers have unlike widths of feed-forward networks, which is not supported"
        );
        fields.insert("use_double_wide_mlp".into(), json!(is_wide));
        fields.insert("intermediate_size".into(), own.unwrap_or_default());
    }
    if let Ok(shape) = weights.shape("per_layer_token_embd.weight") {
        fields.insert("vocab_size_per_layer_input".into(), json!(shape.first()));
    }
    if let Some(count) = fields.remove("num_local_experts").filter(|count| *count != json!(0)) {
        fields.insert("num_experts".into(), count);
        fields.insert("enable_moe_block".into(), json!(true));
    } else {
        ["num_experts_per_tok", "moe_intermediate_size"].iter().for_each(|name| drop(fields.remove(*name)));
    }
    let theta = fields.remove("rope_theta").unwrap_or(json!(1_000_000.0));
    let of_windows = fields.remove("rope_local_base_freq").unwrap_or(json!(10_000.0));
    let form = |theta: Value| json!({"rope_type": "default", "rope_theta": theta});
    fields.insert(
        "rope_parameters".into(),
        json!({"full_attention": form(theta), "sliding_attention": form(of_windows)}),
    );
    fields.insert("hidden_activation".into(), json!("gelu_pytorch_tanh"));
    Ok(())
}
