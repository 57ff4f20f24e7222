//! The family of Gemma 4.

use anyhow::{Context, Result, bail, ensure};
use candle_nn::Activation;
use candle_shard::nn::Heads;
use serde_json::{Map, Value, json};

use super::{Family, FamilyDefaults, PLAIN};
use crate::config::experts::Experts;
use crate::config::fields::FieldRule::{self, Harmless, Only, Used};
use crate::config::fields::Plain::{False, Null, Text};
use crate::config::fields::shortened;
use crate::config::parts::{LayerEmbeddingSizes, Norms, Parts, QkNorm};
use crate::config::{MOST, MOST_LAYERS, rope};

/// Its row.
pub(super) static FAMILIES: [Family; 1] = [Family {
    model_type: "gemma4_text",
    architecture: "Gemma4ForCausalLM",
    fields: &GEMMA4,
    absent: FamilyDefaults { tied: true, head_dim: Some(256), rope_theta: 1_000_000.0, ..PLAIN },
    parts: |fields, layers| {
        let hidden = fields.size("hidden_size", MOST)? as f64;
        let window = fields.size("sliding_window", MOST)?;
        let types = fields.layer_types(layers)?.context("there is no layer_types")?;
        let is_there = |name: &str| fields.get(name).is_some_and(|value| *value != json!(0));
        let layer_embeddings = || -> Result<_> {
            Ok(LayerEmbeddingSizes {
                tokens: fields.size("vocab_size_per_layer_input", MOST)?,
                width: fields.size("hidden_size_per_layer_input", MOST)?,
            })
        };
        let sharing = match is_there("num_kv_shared_layers") {
            true => fields.size("num_kv_shared_layers", MOST_LAYERS)?,
            false => 0,
        };
        let (theta, scaling) = rope::read_local(fields, 10_000.0)?.unwrap_or((10_000.0, None));
        let query = fields.size("num_attention_heads", MOST)?;
        let from_keys = fields.switch("attention_k_eq_v")?;
        let heads = fields.optional_size("num_key_value_heads", MOST)?.unwrap_or(query);
        let of_full = fields.optional_size("num_global_key_value_heads", MOST)?.filter(|_| from_keys);
        let dim = fields.optional_size("global_head_dim", MOST)?.unwrap_or(512);
        Ok(Parts {
            norms: Norms::Both,
            qk_norm: QkNorm::Head,
            value_norm: true,
            values_from_keys: from_keys,
            full_heads: Some(Heads { query, key_value: of_full.unwrap_or(heads), dim }),
            layer_scalar: true,
            key_sources: key_sources(&types, sharing)?,
            double_wide: fields.switch("use_double_wide_mlp")?,
            layer_embeddings: is_there("hidden_size_per_layer_input").then(layer_embeddings).transpose()?,
            experts: fields.switch("enable_moe_block")?.then(|| Experts::gemma(fields)).transpose()?,
            names: &[("mlp.router", "router")],
            activation: Activation::GeluPytorchTanh,
            windows: types.iter().map(|is_sliding| is_sliding.then_some(window)).collect(),
            local_rope: Some((theta, scaling)),
            scores_scale: Some(1.0),
            logits_cap: fields.optional_positive("final_logit_softcapping")?,
            embedding_scale: hidden.sqrt(),
            ..Parts::default()
        })
    },
}];

const GEMMA4: [(&str, FieldRule); 20] = [
    ("attention_bias", Only(False)),
    ("attention_k_eq_v", Used),
    ("enable_moe_block", Used),
    // An older name.
    ("expert_intermediate_size", Only(Null)),
    ("final_logit_softcapping", Used),
    ("global_head_dim", Used),
    ("hidden_activation", Only(Text("gelu_pytorch_tanh"))),
    ("hidden_size_per_layer_input", Used),
    ("layer_types", Used),
    ("moe_intermediate_size", Used),
    ("num_experts", Used),
    ("num_experts_per_tok", Used),
    // transformers does not read it.
    ("num_local_experts", Harmless),
    ("num_global_key_value_heads", Used),
    ("num_kv_shared_layers", Used),
    ("partial_rotary_factor", Used),
    ("sliding_window", Used),
    // It is judged below.
    ("use_bidirectional_attention", Used),
    ("use_double_wide_mlp", Used),
    ("vocab_size_per_layer_input", Used),
];

/// The layer whose keys each of the layers uses: the last `sharing` ones those of the last layer before them with a window, or without, as
/// they have.
fn key_sources(has_window: &[bool], sharing: usize) -> Result<Vec<usize>> {
    let own = has_window.len().saturating_sub(sharing);
    let source = |layer: usize| match layer < own {
        true => Some(layer),
        false => has_window[..own].iter().rposition(|has| *has == has_window[layer]),
    };
    (0..has_window.len())
        .map(|layer| {
            source(layer).with_context(|| {
                format!(
                    "num_kv_shared_layers is {sharing}, and no layer before has keys for layer {layer}, which {} a window",
                    if has_window[layer] { "has" } else { "is without" }
                )
            })
        })
        .collect()
}

/// The fields of a config with those that it leaves out, and with the heads of layers without a window, which newer files have layer by layer,
/// under the names of older ones.
///
/// # Errors
/// If tokens see later ones, or heads are unlike in another way.
pub(super) fn plain(mut fields: Map<String, Value>) -> Result<Map<String, Value>> {
    for (name, absent) in [("hidden_size_per_layer_input", 256), ("vocab_size_per_layer_input", 262_144)] {
        let value = fields.entry(name).or_insert(Value::Null);
        if value.is_null() {
            *value = json!(absent);
        }
    }
    match fields.get("use_bidirectional_attention").and_then(Value::as_str) {
        // Only those of images do.
        None | Some("vision") => {}
        Some(other) => bail!("use_bidirectional_attention is {other:?}, which is not supported"),
    }
    let count = fields.get("num_hidden_layers").and_then(Value::as_u64).unwrap_or(0);
    let count = count.min(crate::config::MOST_LAYERS as u64) as usize;
    let mut types = match fields.remove("layer_types") {
        Some(Value::Array(types)) => types,
        None | Some(Value::Null) => {
            let one = |layer: usize| if layer.is_multiple_of(6) { FULL } else { "sliding_attention" };
            (1..=count).map(|layer| json!(one(layer))).collect()
        }
        Some(other) => bail!("layer_types is {}; expected a list", shortened(&other)),
    };
    // transformers changes the last one in any case.
    if let Some(last) = types.last_mut() {
        *last = json!(FULL);
    }
    if let Some(own) = fields.remove("per_layer_config").filter(|own| !own.is_null()) {
        for (name, value) in of_full(&own, &types)? {
            let said = fields.insert(name.into(), value.clone());
            ensure!(
                said.as_ref().is_none_or(|said| said.is_null() || *said == value),
                "{name} is {}, and per_layer_config says {value}",
                said.unwrap_or_default()
            );
        }
    }
    fields.insert("layer_types".into(), types.into());
    if let Some(count) = fields.remove("top_k_experts") {
        fields.insert("num_experts_per_tok".into(), count);
    }
    fields.entry("sliding_window").or_insert(json!(512));
    if fields.get("rope_parameters").is_none_or(Value::is_null) {
        let full =
            json!({"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0});
        let local = json!({"rope_type": "default", "rope_theta": 10_000.0});
        fields.insert("rope_parameters".into(), json!({FULL: full, "sliding_attention": local}));
    }
    Ok(fields)
}

/// Layers without a window.
const FULL: &str = "full_attention";

/// What `per_layer_config` says of all layers without a window, and of no others.
fn of_full(own: &Value, types: &[Value]) -> Result<Vec<(&'static str, Value)>> {
    const NAMES: [(&str, &str); 2] =
        [("head_dim", "global_head_dim"), ("num_key_value_heads", "num_global_key_value_heads")];
    let said =
        || format!("per_layer_config is {}; expected heads of the layers without a window", shortened(own));
    let own = own.as_object().with_context(said)?;
    let number = |layer: &String| layer.parse::<usize>().ok();
    let full = (0..types.len()).filter(|&layer| types[layer] == FULL);
    let mut layers: Vec<usize> = own.keys().map(number).collect::<Option<_>>().with_context(said)?;
    layers.sort_unstable();
    ensure!(layers.iter().copied().eq(full), said());
    let mut values = own.values();
    let Some(first) = values.next().and_then(Value::as_object) else { return Ok(Vec::new()) };
    ensure!(values.all(|other| other.as_object() == Some(first)), said());
    let name = |(name, value): (&String, &Value)| {
        let (_, known) = NAMES.iter().find(|(own, _)| own == name)?;
        Some((*known, value.clone()))
    };
    first.iter().map(name).collect::<Option<_>>().with_context(said)
}
