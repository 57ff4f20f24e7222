//! The families of ERNIE.

use candle_shard::kernels::RopePairs;
use serde_json::{Map, Value};

use super::{Family, FamilyDefaults, PLAIN, rename, rename_absent};
use crate::config::experts::Experts;
use crate::config::fields::FieldRule::{self, Harmless, Only, Used};
use crate::config::fields::Plain::{False, One, Text};
use crate::config::parts::Parts;

/// Their rows.
pub(super) static FAMILIES: [Family; 2] = [
    Family {
        model_type: "ernie4_5",
        architecture: "Ernie4_5ForCausalLM",
        fields: &[("compression_ratio", Only(One)), ("use_bias", Used)],
        absent: FamilyDefaults { tied: true, head_dim: Some(128), rope_theta: 500_000.0, ..PLAIN },
        parts: |fields, _| {
            let bias = fields.switch("use_bias")?;
            Ok(Parts {
                qkv_bias: bias,
                output_bias: bias,
                mlp_bias: bias,
                pairs: RopePairs::Neighbors,
                ..Parts::default()
            })
        },
    },
    Family {
        model_type: "ernie4_5_moe",
        architecture: "Ernie4_5_MoeForCausalLM",
        fields: &MIXTURE,
        absent: FamilyDefaults { tied: true, rope_theta: 500_000.0, ..PLAIN },
        parts: |fields, layers| {
            let experts = Some(Experts::ernie(fields, layers)?);
            Ok(Parts { pairs: RopePairs::Neighbors, experts, ..Parts::default() })
        },
    },
];

const MIXTURE: [(&str, FieldRule); 17] = [
    ("compression_ratio", Only(One)),
    // What transformers does not read: how many tokens an expert takes in training, and whether the bias of the choice was learned.
    ("moe_capacity", Harmless),
    ("moe_gate", Only(Text("topk"))),
    ("moe_gate_act", Only(Text("softmax"))),
    ("moe_intermediate_size", Used),
    ("moe_layer_end_index", Used),
    ("moe_layer_interval", Used),
    ("moe_layer_start_index", Used),
    ("moe_norm_min", Used),
    ("moe_num_shared_experts", Used),
    ("moe_use_aux_free", Harmless),
    ("num_experts_per_tok", Used),
    ("num_local_experts", Used),
    // Of layers that predict further tokens, which are left out.
    ("num_nextn_predict_layers", Harmless),
    ("output_router_logits", Used),
    ("router_aux_loss_coef", Used),
    // The output layer would have one too.
    ("use_bias", Only(False)),
];

/// The fields of a config of experts, whose numbers have the names of other mixtures.
pub(super) fn plain(mut fields: Map<String, Value>) -> Map<String, Value> {
    rename(&mut fields, &[("moe_num_experts", "num_local_experts")]);
    rename_absent(&mut fields, &[("moe_k", "num_experts_per_tok")]);
    fields
}
