//! The families of GLM.

use anyhow::Result;
use candle_shard::kernels::RopePairs;

use super::{Family, FamilyDefaults, PLAIN, biased, drafts};
use crate::config::experts::{DEEPSEEK_FIELDS, Experts};
use crate::config::fields::FieldRule::{self, Used};
use crate::config::fields::{Fields, joined};
use crate::config::parts::{FUSED_GATE, Norms, Parts, QkNorm};

/// Their rows.
pub(super) static FAMILIES: [Family; 3] = [
    Family {
        model_type: "glm",
        architecture: "GlmForCausalLM",
        fields: &FIELDS,
        absent: ABSENT,
        parts: |fields, _| glm(fields, Norms::Before),
    },
    Family {
        model_type: "glm4",
        architecture: "Glm4ForCausalLM",
        fields: &FIELDS,
        absent: ABSENT,
        parts: |fields, _| glm(fields, Norms::BothOfGlm),
    },
    Family {
        model_type: "glm4_moe",
        architecture: "Glm4MoeForCausalLM",
        fields: &GLM4_MOE,
        absent: FamilyDefaults { rotary_share: 0.5, ..PLAIN },
        parts: |fields, layers| {
            Ok(Parts {
                qk_norm: if fields.switch("use_qk_norm")? { QkNorm::Head } else { QkNorm::None },
                output_bias: false,
                draft_layers: drafts(fields)?,
                experts: Some(Experts::deepseek(fields, layers)?),
                ..biased(fields, layers)?
            })
        },
    },
];

const FIELDS: [(&str, FieldRule); 2] = [("attention_bias", Used), ("partial_rotary_factor", Used)];

const ABSENT: FamilyDefaults = FamilyDefaults { head_dim: Some(128), rotary_share: 0.5, ..PLAIN };

fn glm(fields: &Fields, norms: Norms) -> Result<Parts> {
    Ok(Parts {
        norms,
        qkv_bias: fields.switch_or("attention_bias", true)?,
        pairs: RopePairs::Neighbors,
        fused: &[FUSED_GATE],
        ..Parts::default()
    })
}

const GLM4_MOE: [(&str, FieldRule); 18] = joined(
    DEEPSEEK_FIELDS,
    [("attention_bias", Used), ("partial_rotary_factor", Used), ("use_qk_norm", Used)],
);
