//! The families of OpenAI: gpt-oss.

use serde_json::{Map, Value, json};

use super::{Family, FamilyDefaults, PLAIN, windows};
use crate::config::experts::{Experts, ROUTER};
use crate::config::fields::FieldRule::{self, Harmless, Used};
use crate::config::fields::joined;
use crate::config::parts::Parts;

/// Their rows.
pub(super) static FAMILIES: [Family; 1] = [Family {
    model_type: "gpt_oss",
    architecture: "GptOssForCausalLM",
    fields: &GPT_OSS,
    absent: FamilyDefaults { head_dim: Some(64), rope_theta: 150_000.0, ..PLAIN },
    parts: |fields, layers| {
        let biased = fields.switch_or("attention_bias", true)?;
        Ok(Parts {
            qkv_bias: biased,
            output_bias: biased,
            sinks: true,
            windows: windows(fields, layers, fields.window("sliding_window", Some(128))?, 2)?,
            experts: Some(Experts::gpt_oss(fields)?),
            ..Parts::default()
        })
    },
}];

const GPT_OSS: [(&str, FieldRule); 12] = joined(
    ROUTER,
    [
        ("attention_bias", Used),
        // Other names of fields that are there too.
        ("experts_per_token", Harmless),
        ("initial_context_length", Harmless),
        ("layer_types", Used),
        ("num_experts", Used),
        ("sliding_window", Used),
        ("swiglu_alpha", Used),
        ("swiglu_limit", Used),
    ],
);

/// The fields of a config, with the scaling of positions that it has without a field.
pub(super) fn plain(mut fields: Map<String, Value>) -> Map<String, Value> {
    let has_rope = ["rope_parameters", "rope_scaling"]
        .iter()
        .any(|name| fields.get(*name).is_some_and(|rope| !rope.is_null()));
    if !has_rope {
        let scaling = json!({
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
            "original_max_position_embeddings": 4096,
        });
        fields.insert("rope_scaling".into(), scaling);
    }
    fields
}
