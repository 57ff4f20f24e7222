//! How the metadata of a GGUF file describes experts.

use anyhow::{Result, ensure};
use candle_shard::Weights;
use serde_json::{Map, Value, json};

use super::mamba::NEMOTRON_MIXTURE;
use super::{Metadata, plain};
use crate::config::MOST_LAYERS;
use crate::config::experts::MIXTRAL;
use crate::config::tensors::{EXPERT_BIASES, EXPERTS};
use crate::expert_files::GATE_UP;

/// How logits become scores, after the name of the architecture: 1 for the softmax, and 2 for the logistic function.
const SCORES: &str = "expert_gating_func";

/// What files call mixtures of ERNIE.
pub(super) const ERNIE: &str = "ernie4_5-moe";

/// What files call mixtures of EXAONE.
pub(super) const EXAONE: &str = "exaone-moe";

/// The keys that [`fields`] reads beside those that are fields.
pub(super) const KEYS: [&str; 1] = [SCORES];

/// Keys of mixtures that are made like DeepSeek's, the fields that they stand for, and the values with which they mean nothing in
/// another one, as zeros do.
const IDLE: [(&str, &str, u64); 6] = [
    ("expert_weights_scale", "routed_scaling_factor", 1),
    ("expert_shared_count", "n_shared_experts", 0),
    ("expert_group_count", "n_group", 1),
    ("expert_group_used_count", "topk_group", 1),
    ("leading_dense_block_count", "first_k_dense_replace", 0),
    ("nextn_predict_layers", "num_nextn_predict_layers", 0),
];

/// The layers that predict further tokens. A file that counts some and has none of their tensors has lost them.
pub(super) fn drafts(weights: &Weights, fields: &mut Map<String, Value>) -> u64 {
    const DRAFTS: &str = "num_nextn_predict_layers";
    if !weights.names().any(|name| name.contains(".nextn.")) {
        fields.insert(DRAFTS.into(), json!(0));
    }
    fields.get(DRAFTS).and_then(Value::as_u64).unwrap_or(0)
}

/// The layers of a file behind those of a model, of so many layers, that predict further tokens.
pub(super) fn draft_layers(weights: &Weights, layers: usize) -> usize {
    let layer = |name: &str| name.strip_prefix("blk.")?.split('.').next()?.parse::<usize>().ok();
    let last = weights.names().filter(|name| name.contains(".nextn.")).filter_map(layer).max();
    last.map_or(0, |last| (last + 1).saturating_sub(layers))
}

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
    let only = match kind {
        "glm4moe" | "minimax-m2" | "lfm2moe" | "llama4" | EXAONE | NEMOTRON_MIXTURE => 2,
        // The softmax of the chosen logits, which is that of all over its sum.
        "gpt-oss" => 3,
        _ => 1,
    };
    let value = metadata.get(&format!("{kind}.{SCORES}")).and_then(plain);
    ensure!(
        value.as_ref().is_none_or(|value| *value == json!(only)),
        "{kind}.{SCORES} is {}, and only {only} is supported",
        value.unwrap_or_default()
    );
    if kind == "lfm2moe" {
        let dense = fields.remove("first_k_dense_replace").unwrap_or(json!(0));
        fields.insert("num_dense_layers".into(), dense);
    }
    if kind == ERNIE {
        ernie(fields)?;
    }
    if kind == "hunyuan-moe" {
        // A network of the same width, which there is one of.
        let count = fields.remove("n_shared_experts");
        ensure!(
            count.as_ref().is_none_or(|count| *count == json!(1)),
            "{kind}.expert_shared_count is {}, and only 1 is supported",
            count.unwrap_or_default()
        );
    }
    if !["glm4moe", EXAONE, NEMOTRON_MIXTURE].contains(&kind) {
        for (key, name, idle) in IDLE {
            let Some(value) = fields.remove(name) else { continue };
            let is_idle = value.as_f64().is_some_and(|value| value == 0.0 || value == idle as f64);
            ensure!(is_idle, "{kind}.{key} is {value}, and only {idle} is supported");
        }
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
            normalizes(kind, fields)?;
        }
        ERNIE => normalizes(kind, fields)?,
        "lfm2moe" => {
            normalizes(kind, fields)?;
            let has_bias = weights.names().any(|name| name.ends_with(".exp_probs_b.bias"));
            fields.insert("use_expert_bias".into(), json!(has_bias));
        }
        "granitemoe" => {
            if let Some(inner) = fields.remove("moe_intermediate_size") {
                fields.insert("intermediate_size".into(), inner);
            }
            normalizes(kind, fields)?;
            if fields.get("shared_intermediate_size").is_some_and(|width| *width != json!(0)) {
                fields.insert("model_type".into(), json!("granitemoeshared"));
            } else {
                fields.remove("shared_intermediate_size");
            }
        }
        "hunyuan-moe" => {
            for (key, name) in [
                ("expert_feed_forward_length", "moe_intermediate_size"),
                ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
            ] {
                let (width, all) = (fields.remove(name), fields.get("intermediate_size"));
                ensure!(
                    width.is_none() || width.as_ref() == all,
                    "{kind}.{key} is {}, and only feed_forward_length {} is supported",
                    width.unwrap_or_default(),
                    all.cloned().unwrap_or_default()
                );
            }
            normalizes(kind, fields)?;
        }
        "gpt-oss" => {
            // What is said of layers without experts, which there are none of.
            if let Some(inner) = fields.remove("moe_intermediate_size") {
                fields.insert("intermediate_size".into(), inner);
            }
        }
        "minimax-m2" => {
            // What is said of layers without experts, which there are none of.
            if let Some(inner) = fields.remove("moe_intermediate_size") {
                fields.insert("intermediate_size".into(), inner);
            }
            normalizes(kind, fields)?;
        }
        "glm4moe" | EXAONE => {
            // Without the keys, which llama.cpp takes as off.
            for (name, absent) in [("norm_topk_prob", json!(false)), ("num_nextn_predict_layers", json!(0))] {
                fields.entry(name).or_insert(absent);
            }
            for name in ["first_k_dense_replace", "n_shared_experts"] {
                fields.entry(name).or_insert(json!(0));
            }
            // The layers that predict further tokens are counted with the others.
            let number = |name: &str| fields.get(name).and_then(Value::as_u64).unwrap_or(0);
            let layers = number("num_hidden_layers").saturating_sub(drafts(weights, fields));
            fields.insert("num_hidden_layers".into(), json!(layers));
            if kind == EXAONE {
                return width_of_shared(kind, fields, "n_shared_experts");
            }
            fields.insert("use_qk_norm".into(), json!(weights.contains_tensor("blk.0.attn_q_norm.weight")));
        }
        NEMOTRON_MIXTURE => {
            // Without the key, which llama.cpp takes as off.
            fields.entry("norm_topk_prob").or_insert(json!(false));
            let shared = fields.remove("shared_expert_intermediate_size");
            fields.extend(shared.map(|width| ("moe_shared_expert_intermediate_size".to_owned(), width)));
            ensure!(
                fields.get("n_group").is_none_or(|count| *count == json!(1))
                    || fields.contains_key("topk_group"),
                "{kind}.expert_group_count is said without {kind}.expert_group_used_count"
            );
            let drafts = drafts(weights, fields);
            let layers = fields.get("num_hidden_layers").and_then(Value::as_u64).unwrap_or(0);
            fields.insert("num_hidden_layers".into(), json!(layers.saturating_sub(drafts)));
        }
        "qwen2moe" | "olmoe" => {
            // Which llama.cpp takes for granted.
            let normalize = fields.entry("norm_topk_prob").or_insert(json!(false));
            ensure!(
                *normalize == json!(false),
                "{kind}.expert_weights_norm is true, and only false is supported"
            );
            // What is said of experts whose width is that of feed-forward layers.
            if kind == "olmoe"
                && let Some(inner) = fields.remove("moe_intermediate_size")
            {
                fields.insert("intermediate_size".into(), inner);
            }
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

/// The layers of ERNIE that have experts, and the network beside these.
fn ernie(fields: &mut Map<String, Value>) -> Result<()> {
    for (was, is, absent) in [
        ("first_k_dense_replace", "moe_layer_start_index", 0),
        ("interleave_moe_layer_step", "moe_layer_interval", 1),
        ("n_shared_experts", "moe_num_shared_experts", 0),
    ] {
        let value = fields.remove(was).unwrap_or(json!(absent));
        fields.insert(is.into(), value);
    }
    width_of_shared(ERNIE, fields, "moe_num_shared_experts")
}

/// Takes away the width of the network for all tokens, which is that of as many experts as the field `count` says.
fn width_of_shared(kind: &str, fields: &mut Map<String, Value>, count: &str) -> Result<()> {
    let number = |name: &str| fields.get(name).and_then(Value::as_u64).unwrap_or(0);
    let width = number(count).saturating_mul(number("moe_intermediate_size"));
    let said = fields.remove("shared_expert_intermediate_size");
    ensure!(
        said.as_ref().is_none_or(|said| *said == json!(width)),
        "{kind}.expert_shared_feed_forward_length is {}, and only {width} is supported, that of all shared experts together",
        said.unwrap_or_default()
    );
    Ok(())
}

/// Takes away the field that says whether weights are normalized, which llama.cpp takes for granted.
pub(super) fn normalizes(kind: &str, fields: &mut Map<String, Value>) -> Result<()> {
    let normalize = fields.remove("norm_topk_prob");
    ensure!(
        normalize.is_none_or(|value| value == json!(true)),
        "{kind}.expert_weights_norm is false, and only true is supported"
    );
    Ok(())
}

/// The tensors with the gates and the ups of all experts of a layer by themselves, which some files have in one.
///
/// # Errors
/// If one has another shape; it is named.
pub(super) fn apart(mut weights: Weights) -> Result<Weights> {
    for (whole, parts) in [(GATE_UP.to_owned(), EXPERTS), (format!("{GATE_UP}_bias"), EXPERT_BIASES)] {
        let layers: Vec<String> =
            weights.names().filter_map(|name| name.strip_suffix(&whole)).map(str::to_owned).collect();
        for layer in layers {
            let name = format!("{layer}{whole}");
            let rows = weights.shape(&name)?.get(1).copied().unwrap_or(0);
            ensure!(rows.is_multiple_of(2), "{name:?} has {rows} rows; expected as many gates as ups");
            let parts = [0, 1].map(|at| (format!("{layer}{}", parts[at]), rows / 2));
            weights = weights.split_dim(&name, 1, &parts)?;
        }
    }
    Ok(weights)
}

/// The name that a tensor of one expert has on the Hub, in files whose experts are not stacked.
pub(super) fn renamed(layer: &str, module: &str, expert: &str) -> Option<String> {
    let part = ["ffn_gate", "ffn_up", "ffn_down"].iter().position(|name| *name == module)?;
    Some(format!("model.layers.{layer}.{}.{expert}.{}.weight", MIXTRAL.experts, MIXTRAL.layers[part]))
}
