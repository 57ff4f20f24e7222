//! The family of Llama 4, whose layers attend to chunks with rotary positions, or to all tokens without.

use anyhow::{Context, Result, ensure};
use candle_shard::kernels::RopePairs;
use serde_json::{Map, Value, json};

use super::{Family, FamilyDefaults, PLAIN};
use crate::config::MOST;
use crate::config::experts::Experts;
use crate::config::fields::FieldRule::{self, Harmless, Used};
use crate::config::fields::{Fields, shortened};
use crate::config::parts::{AttentionTemperature, Parts, QkNorm};

/// Its row.
pub(super) static FAMILIES: [Family; 1] = [Family {
    model_type: "llama4_text",
    architecture: "Llama4ForCausalLM",
    fields: &LLAMA4,
    absent: FamilyDefaults { head_dim: Some(128), rope_theta: 500_000.0, ..PLAIN },
    parts: |fields, layers| {
        let rotary = rotary(fields, layers)?;
        let biased = fields.switch("attention_bias")?;
        Ok(Parts {
            pairs: RopePairs::Neighbors,
            qk_norm: match fields.switch_or("use_qk_norm", true)? {
                true => QkNorm::UnweightedBehindRotary,
                false => QkNorm::None,
            },
            qkv_bias: biased,
            output_bias: biased,
            windows: chunks(fields, &rotary)?,
            chunked: true,
            rotary,
            temperature: temperature(fields)?,
            experts: Some(Experts::llama4(fields, layers)?).filter(|experts| experts.layers.contains(&true)),
            names: &NAMES,
            ..Parts::default()
        })
    },
}];

const LLAMA4: [(&str, FieldRule); 18] = [
    ("attention_bias", Used),
    ("attention_chunk_size", Used),
    ("attn_scale", Used),
    ("attn_temperature_tuning", Used),
    // How keys and values are kept.
    ("cache_implementation", Harmless),
    ("floor_scale", Used),
    ("interleave_moe_layer_step", Used),
    ("layer_types", Used),
    ("moe_intermediate_size", Used),
    ("moe_layers", Used),
    ("no_rope_layer_interval", Used),
    ("no_rope_layers", Used),
    ("num_experts_per_tok", Used),
    ("num_local_experts", Used),
    // The loss has no term for the balance, whatever they say.
    ("output_router_logits", Harmless),
    ("router_aux_loss_coef", Harmless),
    // transformers does not read it.
    ("router_jitter_noise", Harmless),
    ("use_qk_norm", Used),
];

/// What files call the modules of feed-forward networks.
static NAMES: [(&str, &str); 6] = [
    ("mlp.gate_proj", "feed_forward.gate_proj"),
    ("mlp.up_proj", "feed_forward.up_proj"),
    ("mlp.down_proj", "feed_forward.down_proj"),
    ("mlp.shared_expert.gate_proj", "feed_forward.shared_expert.gate_proj"),
    ("mlp.shared_expert.up_proj", "feed_forward.shared_expert.up_proj"),
    ("mlp.shared_expert.down_proj", "feed_forward.shared_expert.down_proj"),
];

/// The fields of a config, with the widths of experts and of other networks under the names of other families, and what it leaves out.
///
/// # Errors
/// If the width of experts is said by the name of other families.
pub(super) fn plain(mut fields: Map<String, Value>) -> Result<Map<String, Value>> {
    let other = "moe_intermediate_size";
    ensure!(
        !fields.contains_key(other),
        "{other} is a field of other families: experts are as wide as intermediate_size says"
    );
    let mut width = |name: &str, absent: u64| {
        fields.remove(name).filter(|width| !width.is_null()).unwrap_or(json!(absent))
    };
    let (of_experts, of_others) = (width("intermediate_size", 8192), width("intermediate_size_mlp", 16384));
    fields.insert(other.into(), of_experts);
    fields.insert("intermediate_size".into(), of_others);
    fields.entry("num_key_value_heads").or_insert(json!(8));
    Ok(fields)
}

/// Which layers have rotary positions.
fn rotary(fields: &Fields, layers: usize) -> Result<Vec<bool>> {
    let interval = fields.optional_size("no_rope_layer_interval", MOST)?.unwrap_or(4);
    let is_empty = |list: &&Value| list.as_array().is_some_and(Vec::is_empty);
    let Some(list) = fields.get("no_rope_layers").filter(|list| !is_empty(list)) else {
        return Ok((1..=layers).map(|layer| !layer.is_multiple_of(interval)).collect());
    };
    // 1 is for layers that have them.
    let one = |value: &Value| value.as_u64().filter(|&n| n < 2).map(|n| n == 1);
    let read: Option<Vec<bool>> = list.as_array().and_then(|list| list.iter().map(one).collect());
    read.filter(|read| read.len() == layers)
        .with_context(|| format!("no_rope_layers is {}; want {layers} of 0 or 1", shortened(list)))
}

/// The positions of a chunk in each layer that attends to chunks: without a list those with rotary positions.
fn chunks(fields: &Fields, rotary: &[bool]) -> Result<Vec<Option<usize>>> {
    let chunk = fields.window("attention_chunk_size", Some(8192))?;
    let known = [("full_attention", false), ("chunked_attention", true)];
    let Some(types) = fields.by_layer_type(rotary.len(), &known)? else {
        return Ok(rotary.iter().map(|is_rotary| chunk.filter(|_| *is_rotary)).collect());
    };
    ensure!(
        chunk.is_some() || !types.contains(&true),
        "layer_types has chunked_attention, and attention_chunk_size is null"
    );
    Ok(types.into_iter().map(|is_chunked| chunk.filter(|_| is_chunked)).collect())
}

/// How queries of layers without rotary positions grow.
fn temperature(fields: &Fields) -> Result<Option<AttentionTemperature>> {
    let is_on = match fields.get("attn_temperature_tuning") {
        // Older files have a number, and all but 0 switch it on.
        Some(value) if value.is_number() => value.as_f64() != Some(0.0),
        _ => fields.switch_or("attn_temperature_tuning", true)?,
    };
    let length = fields.optional_size("floor_scale", MOST)?.unwrap_or(8192);
    let scale = fields.factor("attn_scale")?.unwrap_or(0.1);
    let tuned = AttentionTemperature { scale, length, first: 1, is_of_rotary: false };
    Ok(Some(tuned).filter(|tuned| is_on && tuned.scale > 0.0))
}
