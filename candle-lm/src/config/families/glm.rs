//! The families of GLM.

use super::{Family, FamilyDefaults, PLAIN, biased, drafts};
use crate::config::experts::{DEEPSEEK_FIELDS, Experts};
use crate::config::fields::FieldRule::{self, Used};
use crate::config::fields::joined;
use crate::config::parts::{Parts, QkNorm};

/// Their rows.
pub(super) static FAMILIES: [Family; 1] = [Family {
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
}];

const GLM4_MOE: [(&str, FieldRule); 18] = joined(
    DEEPSEEK_FIELDS,
    [("attention_bias", Used), ("partial_rotary_factor", Used), ("use_qk_norm", Used)],
);
