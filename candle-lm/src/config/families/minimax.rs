//! The families of MiniMax.

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::{Family, FamilyDefaults, PLAIN};
use crate::config::experts::{Experts, ROUTER};
use crate::config::fields::FieldRule::{self, Harmless, Only, Used};
use crate::config::fields::Plain::{One, Text, True, Zero};
use crate::config::fields::{Fields, joined, shortened};
use crate::config::parts::{Parts, QkNorm};

/// Their rows.
pub(super) static FAMILIES: [Family; 1] = [Family {
    model_type: "minimax_m2",
    architecture: "MiniMaxM2ForCausalLM",
    fields: &MINIMAX_M2,
    absent: FamilyDefaults { head_dim: Some(128), rope_theta: 5_000_000.0, ..PLAIN },
    parts: |fields, _| {
        full(fields)?;
        Ok(Parts { qk_norm: QkNorm::All, experts: Some(Experts::minimax(fields)?), ..Parts::default() })
    },
}];

const MINIMAX_M2: [(&str, FieldRule); 23] = joined(
    ROUTER,
    [
        ("attn_type_list", Used),
        // Factors of residuals.
        ("layernorm_full_attention_beta", Only(One)),
        ("layernorm_linear_attention_beta", Only(One)),
        ("layernorm_mlp_beta", Only(One)),
        ("mlp_intermediate_size", Harmless),
        ("mtp_transformer_layers", Harmless),
        ("num_experts", Used),
        ("num_mtp_modules", Harmless),
        ("partial_rotary_factor", Used),
        ("qk_norm_type", Only(Text("per_layer"))),
        ("rotary_dim", Used),
        ("router_jitter_noise", Only(Zero)),
        ("scoring_func", Only(Text("sigmoid"))),
        // Without these experts their mode says nothing.
        ("shared_intermediate_size", Only(Zero)),
        ("shared_moe_mode", Harmless),
        // Of layers with a window, of which there are none.
        ("swa_rope_theta", Harmless),
        ("use_mtp", Harmless),
        ("use_qk_norm", Only(True)),
        ("use_routing_bias", Only(True)),
    ],
);

/// Refuses layers with another attention.
fn full(fields: &Fields) -> Result<()> {
    let Some(list) = fields.get("attn_type_list") else { return Ok(()) };
    let is_full = list.as_array().is_some_and(|list| list.iter().all(|kind: &Value| *kind == json!(1)));
    ensure!(is_full, "attn_type_list is {}, and only 1, full attention, is supported", shortened(list));
    Ok(())
}
