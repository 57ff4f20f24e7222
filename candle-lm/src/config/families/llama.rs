//! Llama, and the families that differ from it in a few parts.

use anyhow::Context;
use serde_json::Value;

use super::{Family, FamilyDefaults, PLAIN, biased, full};
use crate::config::experts::{self, Experts};
use crate::config::fields::FieldRule::{self, Only, Used};
use crate::config::fields::Plain::{False, Null, One, Text};
use crate::config::fields::{joined, shortened};
use crate::config::parts::{FUSED_GATE, FUSED_QKV, Parts, QkNorm};
use crate::config::rope;

/// Their rows.
pub(super) static FAMILIES: [Family; 7] = [
    Family {
        model_type: "llama",
        architecture: "LlamaForCausalLM",
        fields: &[("activation", Only(Text("swiglu"))), ("attention_bias", Used), ("mlp_bias", Used)],
        absent: PLAIN,
        parts: biased,
    },
    Family {
        model_type: "mistral",
        architecture: "MistralForCausalLM",
        fields: &[("sliding_window", Used)],
        absent: PLAIN,
        parts: |fields, layers| {
            let window = fields.window("sliding_window", Some(4096))?;
            Ok(Parts { windows: vec![window; layers], ..Parts::default() })
        },
    },
    Family {
        model_type: "ministral3",
        architecture: "Ministral3ForCausalLM",
        fields: &[("sliding_window", Used)],
        absent: FamilyDefaults { head_dim: Some(128), ..PLAIN },
        parts: |fields, layers| {
            let window = fields.window("sliding_window", None)?;
            let temperature = rope::temperature(fields)?;
            Ok(Parts { windows: vec![window; layers], temperature, ..Parts::default() })
        },
    },
    Family {
        model_type: "phi3",
        architecture: "Phi3ForCausalLM",
        fields: &[
            // Of all positions, or of none in a window.
            ("full_attn_mod", Only(One)),
            ("original_max_position_embeddings", Used),
            ("partial_rotary_factor", Used),
            ("sliding_window", Used),
        ],
        absent: PLAIN,
        parts: |fields, layers| {
            let window = fields.window("sliding_window", None)?;
            Ok(Parts { fused: &[FUSED_QKV, FUSED_GATE], windows: vec![window; layers], ..Parts::default() })
        },
    },
    Family {
        model_type: "smollm3",
        architecture: "SmolLM3ForCausalLM",
        fields: &[
            ("attention_bias", Used),
            ("layer_types", Used),
            ("max_window_layers", FieldRule::Harmless),
            ("mlp_bias", Used),
            ("no_rope_layer_interval", Used),
            ("no_rope_layers", Used),
            ("use_sliding_window", Only(False)),
        ],
        absent: FamilyDefaults { tied: true, rope_theta: 2_000_000.0, ..PLAIN },
        parts: |fields, layers| {
            full(fields)?;
            let interval = fields.optional_size("no_rope_layer_interval", 4096)?.unwrap_or(4);
            let rotary = match fields.get("no_rope_layers") {
                None => (1..=layers).map(|i| !i.is_multiple_of(interval)).collect(),
                // 1 is for layers that have rotary positions.
                Some(list) => {
                    let one = |value: &Value| value.as_u64().filter(|&n| n < 2).map(|n| n == 1);
                    let read: Option<Vec<bool>> =
                        list.as_array().and_then(|list| list.iter().map(one).collect());
                    let read = read.filter(|read| read.len() == layers);
                    read.with_context(|| {
                        format!("no_rope_layers is {}; want {layers} of 0 or 1", shortened(list))
                    })?
                }
            };
            Ok(Parts { rotary, ..biased(fields, layers)? })
        },
    },
    Family {
        model_type: "olmoe",
        architecture: "OlmoeForCausalLM",
        fields: &OLMOE,
        absent: PLAIN,
        parts: |fields, layers| {
            let experts = Some(Experts::olmo(fields)?);
            Ok(Parts { qk_norm: QkNorm::All, experts, ..biased(fields, layers)? })
        },
    },
    Family {
        model_type: "mixtral",
        architecture: "MixtralForCausalLM",
        fields: &experts::MIXTRAL_FIELDS,
        absent: FamilyDefaults { rope_theta: 1_000_000.0, ..PLAIN },
        parts: |fields, layers| {
            let window = fields.window("sliding_window", None)?;
            Ok(Parts {
                windows: vec![window; layers],
                experts: Some(Experts::mixtral(fields)?),
                ..Parts::default()
            })
        },
    },
];

const OLMOE: [(&str, FieldRule); 8] = joined(
    experts::ROUTER,
    [("attention_bias", Used), ("clip_qkv", Only(Null)), ("norm_topk_prob", Used), ("num_experts", Used)],
);
