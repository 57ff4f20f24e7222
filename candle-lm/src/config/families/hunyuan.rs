//! The families of HunYuan.

use anyhow::{Result, ensure};
use serde_json::{Map, Value, json};

use super::{Family, PLAIN, biased};
use crate::config::experts::Experts;
use crate::config::fields::FieldRule::{self, Harmless, Only, Same, Used};
use crate::config::fields::Plain::{False, One, Text, True, Zero};
use crate::config::fields::{joined, shortened};
use crate::config::parts::{Parts, QkNorm};

/// Their rows.
pub(super) static FAMILIES: [Family; 2] = [
    Family {
        model_type: "hunyuan_v1_dense",
        architecture: "HunYuanDenseV1ForCausalLM",
        fields: &DENSE,
        absent: PLAIN,
        parts: |fields, layers| Ok(Parts { qk_norm: QkNorm::HeadBehindRotary, ..biased(fields, layers)? }),
    },
    Family {
        model_type: "hunyuan_v1_moe",
        architecture: "HunYuanMoEV1ForCausalLM",
        fields: &MIXTURE,
        absent: PLAIN,
        parts: |fields, layers| {
            let experts = Some(Experts::hunyuan(fields)?);
            Ok(Parts { qk_norm: QkNorm::HeadBehindRotary, experts, ..biased(fields, layers)? })
        },
    },
];

const BOTH: [(&str, FieldRule); 10] = [
    ("attention_bias", Used),
    // What transformers does not read, and other programs do.
    ("attention_head_dim", Harmless),
    ("cla_share_factor", Harmless),
    // Of models that classify texts.
    ("dense_list", Harmless),
    ("eod_token_id", Harmless),
    ("norm_type", Only(Text("rms"))),
    ("org_vocab_size", Same("vocab_size")),
    ("use_cla", Only(False)),
    ("use_qk_norm", Only(True)),
    ("use_rotary_pos_emb", Only(True)),
];

const DENSE: [(&str, FieldRule); 11] = joined(BOTH, [("num_experts", Only(One))]);

const MIXTURE: [(&str, FieldRule); 22] = joined(
    BOTH,
    [
        // All of these are what transformers computes whatever they say.
        ("moe_intermediate_size", Same("intermediate_size")),
        ("moe_layer_num_skipped", Only(Zero)),
        ("norm_topk_prob", Only(True)),
        ("num_experts", Used),
        ("num_experts_per_tok", Used),
        ("num_local_experts", Used),
        ("num_shared_expert", Only(One)),
        // The loss has no term for the balance.
        ("output_router_logits", Harmless),
        ("position_embedding_xdrope", Only(False)),
        ("routed_scaling_factor", Only(One)),
        ("router_aux_loss_coef", Harmless),
        ("use_mixed_mlp_moe", Only(True)),
    ],
);

/// The fields of a config of experts, where numbers that all layers have may be lists.
///
/// # Errors
/// If layers have unlike numbers.
pub(super) fn plain(mut fields: Map<String, Value>) -> Result<Map<String, Value>> {
    for name in ["moe_intermediate_size", "moe_topk", "num_experts", "num_shared_expert"] {
        let Some(Value::Array(list)) = fields.get(name) else { continue };
        let one = list.first().cloned().unwrap_or_default();
        ensure!(
            list.iter().all(|other| *other == one),
            "{name} is {}: layers with unlike experts are not supported",
            shortened(&json!(list))
        );
        fields.insert(name.into(), one);
    }
    if let Some(chosen) = fields.remove("moe_topk") {
        fields.insert("num_experts_per_tok".into(), chosen);
    }
    Ok(fields)
}
