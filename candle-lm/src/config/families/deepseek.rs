//! The families of DeepSeek, and others with latent attention.

use anyhow::{Result, ensure};
use candle_shard::kernels::RopePairs;
use serde_json::Value;

use super::{Family, PLAIN};
use crate::config::fields::FieldRule::{self, Harmless, Only, Used};
use crate::config::fields::Plain::{One, Text, True};
use crate::config::fields::{Fields, joined};
use crate::config::parts::{LatentWidths, Parts};
use crate::config::{MOST, MOST_LAYERS, rope};

/// Their rows.
pub(super) static FAMILIES: [Family; 4] = [
    Family {
        model_type: "deepseek_v3",
        architecture: "DeepseekV3ForCausalLM",
        fields: &V3,
        absent: PLAIN,
        parts: |fields, layers| latent(fields, layers, 3),
    },
    // The same model by another name.
    Family {
        model_type: "kimi_k2",
        architecture: "DeepseekV3ForCausalLM",
        fields: &V3,
        absent: PLAIN,
        parts: |fields, layers| latent(fields, layers, 3),
    },
    Family {
        model_type: "deepseek_v2",
        architecture: "DeepseekV2ForCausalLM",
        fields: &V2,
        absent: PLAIN,
        parts: |fields, layers| latent(fields, layers, 0),
    },
    Family {
        model_type: "glm4_moe_lite",
        architecture: "Glm4MoeLiteForCausalLM",
        fields: &V3,
        absent: PLAIN,
        parts: |fields, layers| latent(fields, layers, 1),
    },
];

/// Families that are not supported, and why.
pub(super) const REFUSED: [(&str, &str); 3] = [
    ("deepseek_v32", SPARSE),
    ("glm_moe_dsa", SPARSE),
    (
        "deepseek_v4",
        "its layers attend to compressed keys and have several residual streams, which is not implemented",
    ),
];

const SPARSE: &str =
    "each token attends to the keys that an indexer chooses (sparse attention), which is not implemented";

const V3: [(&str, FieldRule); 27] = joined(
    LATENT,
    [
        ("mlp_layer_types", Used),
        ("rope_interleave", Used),
        ("scoring_func", Only(Text("sigmoid"))),
        ("topk_method", Only(Text("noaux_tc"))),
    ],
);

const V2: [(&str, FieldRule); 26] = joined(
    LATENT,
    [("rope_interleave", Only(True)), ("scoring_func", Only(Text("softmax"))), ("topk_method", Harmless)],
);

/// The fields of all these families. Those of routers have no effect in models without experts.
const LATENT: [(&str, FieldRule); 23] = [
    ("attention_bias", Used),
    ("first_k_dense_replace", Used),
    ("num_nextn_predict_layers", Used),
    // They follow from other widths.
    ("head_dim", Harmless),
    ("qk_head_dim", Harmless),
    ("kv_lora_rank", Used),
    ("q_lora_rank", Used),
    ("qk_nope_head_dim", Used),
    ("qk_rope_head_dim", Used),
    ("v_head_dim", Used),
    ("moe_layer_freq", Only(One)),
    // Of another training.
    ("aux_loss_alpha", Harmless),
    ("seq_aux", Harmless),
    ("output_router_logits", Harmless),
    // How experts were distributed.
    ("ep_size", Harmless),
    ("moe_intermediate_size", Harmless),
    ("n_group", Harmless),
    ("n_routed_experts", Harmless),
    ("n_shared_experts", Harmless),
    ("norm_topk_prob", Harmless),
    ("num_experts_per_tok", Harmless),
    ("routed_scaling_factor", Harmless),
    ("topk_group", Harmless),
];

/// The parts of a model of latent attention whose layers have experts, but the first `dense` ones without a field that says so.
fn latent(fields: &Fields, layers: usize, dense: usize) -> Result<Parts> {
    let width = |name| fields.size(name, MOST);
    let widths = LatentWidths {
        query: fields.optional_size("q_lora_rank", MOST)?,
        rank: width("kv_lora_rank")?,
        own: width("qk_nope_head_dim")?,
        rotary: width("qk_rope_head_dim")?,
        value: width("v_head_dim")?,
    };
    let dense = match fields.get("mlp_layer_types").and_then(Value::as_array) {
        Some(types) => types.iter().take_while(|kind| *kind == "dense").count(),
        None => {
            fields.get("first_k_dense_replace").and_then(Value::as_u64).map_or(dense, |dense| dense as usize)
        }
    };
    ensure!(
        dense >= layers,
        "layers with experts are not supported in model_type {:?}",
        fields.family.model_type
    );
    let drafts = fields.factor("num_nextn_predict_layers")?.unwrap_or(1.0);
    let pairs = match fields.switch_or("rope_interleave", true)? {
        true => RopePairs::Neighbors,
        false => RopePairs::Halves,
    };
    let biased = fields.switch("attention_bias")?;
    Ok(Parts {
        pairs,
        qkv_bias: biased,
        output_bias: biased,
        scores_scale: Some(rope::scores_factor(fields)? / ((widths.own + widths.rotary) as f64).sqrt()),
        latent: Some(widths),
        draft_layers: (drafts as usize).min(MOST_LAYERS),
        ..Parts::default()
    })
}
