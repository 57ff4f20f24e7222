//! What GGUF files say of layers of Mamba 2.

use anyhow::Result;
use candle_shard::Weights;
use serde_json::{Map, Value, json};

use super::{KEY_HEADS, Metadata, number, one_of, plain, state_widths};
use crate::config::MOST_LAYERS;

/// The architectures that have such layers.
pub(super) const KINDS: [&str; 5] = [FALCON, "granitehybrid", "mamba2", "nemotron_h", NEMOTRON_MIXTURE];

/// Hybrids whose layers have attention and states side by side. The factors of such models are in the weights of files.
pub(super) const FALCON: &str = "falcon-h1";

/// NVIDIA's hybrids that have layers with experts.
pub(super) const NEMOTRON_MIXTURE: &str = "nemotron_h_moe";

/// Tensors of the layers by their modules, with the dims that they have here.
const SHAPES: [(&str, usize); 4] =
    [("mamba.conv1d.weight", 3), ("mamba.norm.weight", 1), ("mamba.A_log", 1), ("mamba.D", 1)];

/// The name that a tensor of a layer has here, if it has no module of its own.
pub(super) fn renamed(layer: &str, rest: &[&str]) -> Option<String> {
    let name = match rest {
        ["ssm_a"] => "A_log",
        ["ssm_d"] => "D",
        ["ssm_dt", "bias"] => "dt_bias",
        // In files of Falcon it has no other name.
        ["ffn_norm"] => return Some(format!("model.layers.{layer}.post_attention_layernorm.weight")),
        _ => return None,
    };
    Some(format!("model.layers.{layer}.mamba.{name}"))
}

/// The tensors in the shapes that layers have, whatever dims of 1 and groups a converter has written.
///
/// # Errors
/// If a tensor has another shape; it is named.
pub(super) fn shaped(mut weights: Weights) -> Result<Weights> {
    for (end, rank) in SHAPES {
        let names: Vec<String> =
            weights.names().filter(|name| name.ends_with(end)).map(str::to_owned).collect();
        for name in names {
            weights = match (weights.shape(&name)?.len(), rank) {
                (2, 3) => weights.unsqueeze(&name, 1)?,
                (2, 1) => weights.flatten(&name)?,
                _ => weights,
            };
        }
    }
    Ok(weights)
}

/// Changes the fields to those that a `config.json` would have.
///
/// # Errors
/// If a key is missing, or layers are unlike each other in a way that is not supported.
pub(super) fn fields(
    kind: &str,
    metadata: &Metadata,
    weights: &Weights,
    fields: &mut Map<String, Value>,
) -> Result<()> {
    let has = |name: &str| weights.contains_tensor(name);
    let number = |fields: &Map<String, Value>, name: &str| number(kind, fields, name);
    let [inner, width] = state_widths(kind, fields)?;
    fields.insert("mamba_head_dim".into(), json!(width));
    let hidden = number(fields, "hidden_size")?.max(1);
    let layers = number(fields, "num_hidden_layers")?.min(MOST_LAYERS as u64) as usize;
    let of_layers = |name: &str| (0..layers).any(|layer| has(&format!("blk.{layer}.{name}")));
    let biases = [of_layers("ssm_conv1d.bias"), of_layers("ssm_in.bias")];
    let list = |fields: &Map<String, Value>, name: &str| match fields.get(name) {
        // Layers that predict further tokens come last.
        Some(Value::Array(list)) => list.iter().take(layers).cloned().collect(),
        Some(one) => vec![one.clone(); layers],
        None => vec![json!(0); layers],
    };
    let (keys, mut inners) = (list(fields, "num_key_value_heads"), list(fields, "intermediate_size"));
    let has_experts = |layer: usize| has(&format!("blk.{layer}.ffn_gate_inp.weight"));
    let sparse: Vec<bool> = (0..layers).map(|layer| kind == NEMOTRON_MIXTURE && has_experts(layer)).collect();
    // The width of experts is a number of its own.
    for (inner, _) in inners.iter_mut().zip(&sparse).filter(|(_, is_sparse)| **is_sparse) {
        *inner = json!(0);
    }
    let one_of = |name: &str, list: &[Value]| {
        let count = one_of(kind, name, list.iter().filter(|count| **count != json!(0)))?;
        anyhow::Ok(count.unwrap_or(json!(1)))
    };
    match kind {
        "mamba2" => {
            for (was, is) in [
                ("mamba_head_dim", "head_dim"),
                ("mamba_num_heads", "num_heads"),
                ("ssm_state_size", "state_size"),
            ] {
                if let Some(value) = fields.remove(was) {
                    fields.insert(is.into(), value);
                }
            }
            fields.insert("expand".into(), json!(inner / hidden));
            fields.remove("num_key_value_heads");
        }
        FALCON => {}
        _ => {
            fields.insert("num_key_value_heads".into(), one_of(KEY_HEADS, &keys)?);
            fields.insert("intermediate_size".into(), one_of("widths of feed-forward networks", &inners)?);
            let kind_of = |((keys, inner), is_sparse): ((&Value, &Value), &bool)| match *keys != json!(0) {
                _ if *is_sparse => "moe",
                true => "full_attention",
                false if kind != "granitehybrid" && *inner != json!(0) => "mlp",
                false => "linear_attention",
            };
            let kinds = keys.iter().zip(&inners).zip(&sparse).map(kind_of).collect();
            fields.insert("layer_types".into(), kinds);
        }
    }
    if ["granitehybrid", FALCON].contains(&kind) {
        for (was, is) in [
            ("conv_kernel", "mamba_d_conv"),
            ("mamba_head_dim", "mamba_d_head"),
            ("mamba_num_heads", "mamba_n_heads"),
            ("n_groups", "mamba_n_groups"),
            ("ssm_state_size", "mamba_d_state"),
            ("shared_expert_intermediate_size", "shared_intermediate_size"),
        ] {
            if let Some(value) = fields.remove(was) {
                fields.insert(is.into(), value);
            }
        }
        fields.insert("mamba_conv_bias".into(), json!(biases[0]));
        fields.insert("mamba_proj_bias".into(), json!(biases[1]));
    }
    match kind {
        FALCON => {
            fields.insert("mamba_d_ssm".into(), json!(inner));
            // llama.cpp has it behind the gates.
            fields.insert("mamba_rms_norm".into(), json!(of_layers("ssm_norm.weight")));
            fields.insert("mamba_norm_before_gate".into(), json!(false));
        }
        "granitehybrid" => {
            fields.insert("mamba_expand".into(), json!(inner / hidden));
            let turns = metadata.get("granitehybrid.rope.scaling.finetuned").and_then(plain);
            let positions = if turns == Some(json!(false)) { Value::Null } else { json!("rope") };
            fields.insert("position_embedding_type".into(), positions);
            // Files without experts may leave out how many there are.
            fields.entry("num_local_experts").or_insert(json!(0));
            let width = fields.get("intermediate_size").cloned().unwrap_or_default();
            fields.entry("shared_intermediate_size").or_insert(width);
        }
        _ => {
            fields.insert("use_conv_bias".into(), json!(biases[0]));
            fields.insert("use_bias".into(), json!(biases[1]));
            // Files of NVIDIA's hybrids have the same number under the name of other norms too.
            let other = fields.remove("layer_norm_eps");
            if let Some(eps) = fields.remove("rms_norm_eps").or(other) {
                fields.insert("layer_norm_epsilon".into(), eps);
            }
        }
    }
    Ok(())
}
