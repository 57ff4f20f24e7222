//! The families of Liquid AI: short convolutions, and attention in some layers.

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value, json};

use super::{Family, FamilyDefaults, PLAIN};
use crate::config::experts::{Experts, ROUTER};
use crate::config::fields::FieldRule::{self, Harmless, Only, Used};
use crate::config::fields::Plain::{False, True};
use crate::config::fields::{Fields, joined};
use crate::config::mixers::MixerKind;
use crate::config::parts::{Parts, QkNorm};
use crate::config::{MOST, MOST_LAYERS};

/// Their rows.
pub(super) static FAMILIES: [Family; 2] = [
    Family {
        model_type: "lfm2",
        architecture: "Lfm2ForCausalLM",
        fields: &LFM2,
        absent: ABSENT,
        parts: convolutions,
    },
    Family {
        model_type: MIXTURE,
        architecture: "Lfm2MoeForCausalLM",
        fields: &LFM2_MOE,
        absent: ABSENT,
        parts: |fields, layers| {
            let experts = Some(Experts::lfm2(fields, layers)?);
            Ok(Parts { experts, ..convolutions(fields, layers)? })
        },
    },
];

const ABSENT: FamilyDefaults = FamilyDefaults { tied: true, rope_theta: 1_000_000.0, ..PLAIN };

const MIXTURE: &str = "lfm2_moe";

/// Attention in some layers, and short convolutions in the others.
fn convolutions(fields: &Fields, layers: usize) -> Result<Parts> {
    let taps = fields.optional_size("conv_L_cache", 1 << 16)?.unwrap_or(3);
    let known = [("conv", MixerKind::ShortConv { taps }), ("full_attention", MixerKind::Attention)];
    let mixers = fields.mixers(layers, &known)?.unwrap_or_else(|| vec![MixerKind::Attention; layers]);
    Ok(Parts { qk_norm: QkNorm::Head, mixers, names: &NAMES, ..Parts::default() })
}

const LFM2_MOE: [(&str, FieldRule); 13] = joined(
    ROUTER,
    [
        ("conv_L_cache", Used),
        ("conv_bias", Only(False)),
        ("layer_types", Used),
        ("moe_intermediate_size", Used),
        ("norm_topk_prob", Used),
        ("num_dense_layers", Used),
        ("num_experts", Used),
        ("routed_scaling_factor", Used),
        ("use_expert_bias", Used),
    ],
);

const LFM2: [(&str, FieldRule); 14] = [
    // transformers reads none of these.
    ("block_dim", Harmless),
    ("block_mlp_init_scale", Harmless),
    ("block_norm_eps", Harmless),
    ("block_out_init_scale", Harmless),
    ("block_use_swiglu", Only(True)),
    ("block_use_xavier_init", Harmless),
    ("conv_L_cache", Used),
    ("conv_bias", Only(False)),
    ("conv_dim", Harmless),
    ("conv_dim_out", Harmless),
    ("conv_use_xavier_init", Harmless),
    ("layer_types", Used),
    ("num_heads", Harmless),
    ("use_pos_enc", Only(True)),
];

/// What files call the modules.
static NAMES: [(&str, &str); 9] = [
    ("model.norm", "model.embedding_norm"),
    ("input_layernorm", "operator_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.o_proj", "self_attn.out_proj"),
    ("self_attn.q_norm", "self_attn.q_layernorm"),
    ("self_attn.k_norm", "self_attn.k_layernorm"),
    ("mlp.gate_proj", "feed_forward.w1"),
    ("mlp.up_proj", "feed_forward.w3"),
    ("mlp.down_proj", "feed_forward.w2"),
];

/// Fields that other families call otherwise.
const OTHER_NAMES: [(&str, &str); 3] = [
    ("norm_eps", "rms_norm_eps"),
    ("block_ff_dim", "intermediate_size"),
    ("tie_embedding", "tie_word_embeddings"),
];

/// The fields of a config, under the names of all families, and with the width of the feed-forward layers that they have.
///
/// # Errors
/// If a width is no number, or the list of layers with attention is none.
pub(super) fn plain(mut fields: Map<String, Value>) -> Result<Map<String, Value>> {
    let is_mixture = fields.get("model_type") == Some(&json!(MIXTURE));
    for (name, common) in OTHER_NAMES {
        if let Some(value) = fields.remove(name).filter(|value| !value.is_null()) {
            fields.insert(common.into(), value);
        }
    }
    fields.entry("rms_norm_eps").or_insert(json!(1e-5));
    // The width of mixtures is what it is.
    if is_mixture {
        return Ok(fields);
    }
    let mut take = |name: &str| fields.remove(name).filter(|value| !value.is_null());
    let adjusts = match take("block_auto_adjust_ff_dim") {
        None => true,
        Some(Value::Bool(adjusts)) => adjusts,
        Some(other) => bail!("block_auto_adjust_ff_dim is {other}; expected true or false"),
    };
    let (factor, multiple, width) = (
        take("block_ffn_dim_multiplier").unwrap_or(json!(1.0)),
        take("block_multiple_of").unwrap_or(json!(256)),
        take("intermediate_size"),
    );
    if let Some(width) = width {
        let size = |name: &str, value: &Value| {
            let size = value.as_u64().filter(|size| (1..=MOST as u64).contains(size));
            size.with_context(|| format!("{name} is {value}; expected a whole number from 1 to {MOST}"))
        };
        let mut inner = size("intermediate_size", &width)?;
        if adjusts {
            let multiple = size("block_multiple_of", &multiple)?;
            let factor = factor.as_f64().filter(|factor| *factor > 0.0 && *factor <= MOST as f64);
            let factor = factor.context("block_ffn_dim_multiplier is no positive number")?;
            inner = (factor * (2 * inner / 3) as f64) as u64;
            inner = inner.div_ceil(multiple) * multiple;
        }
        fields.insert("intermediate_size".into(), json!(inner));
    }
    let attention = fields.remove("full_attn_idxs").filter(|list| !list.is_null());
    if let (Some(list), None | Some(Value::Null)) = (attention, fields.get("layer_types")) {
        let layers = fields.get("num_hidden_layers").and_then(Value::as_u64).unwrap_or(0);
        let layers = layers.min(MOST_LAYERS as u64);
        let numbers: Option<Vec<u64>> =
            list.as_array().and_then(|list| list.iter().map(Value::as_u64).collect());
        let numbers =
            numbers.with_context(|| format!("full_attn_idxs is {list}; expected numbers of layers"))?;
        ensure!(
            numbers.iter().all(|layer| *layer < layers),
            "full_attn_idxs is {list}; expected numbers of the {layers} layers"
        );
        let kind = |layer| if numbers.contains(&layer) { "full_attention" } else { "conv" };
        fields.insert("layer_types".into(), (0..layers).map(kind).collect());
    }
    Ok(fields)
}
