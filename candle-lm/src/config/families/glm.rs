//! The dense families of GLM.

use anyhow::Result;
use candle_shard::kernels::RopePairs;

use super::{Family, FamilyDefaults, PLAIN};
use crate::config::fields::FieldRule::{self, Used};
use crate::config::fields::Fields;
use crate::config::parts::{FUSED_GATE, Norms, Parts};

/// Their rows.
pub(super) static FAMILIES: [Family; 2] = [
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
