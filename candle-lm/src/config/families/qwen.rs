//! The families of Qwen.

use anyhow::Result;

use super::{Family, FamilyDefaults, PLAIN, biased, full};
use crate::config::experts::{self, Experts};
use crate::config::fields::FieldRule::{self, Only, Used};
use crate::config::fields::Fields;
use crate::config::fields::Plain::{False, True};
use crate::config::parts::{Parts, QkNorm};

/// Their rows.
pub(super) static FAMILIES: [Family; 4] = [
    Family {
        model_type: "qwen2",
        architecture: "Qwen2ForCausalLM",
        fields: &QWEN2,
        absent: PLAIN,
        parts: |fields, layers| {
            Ok(Parts { qkv_bias: true, windows: qwen(fields, layers)?, ..Parts::default() })
        },
    },
    Family {
        model_type: "qwen3",
        architecture: "Qwen3ForCausalLM",
        fields: &QWEN3,
        absent: FamilyDefaults { head_dim: Some(128), ..PLAIN },
        parts: |fields, layers| {
            Ok(Parts { qk_norm: QkNorm::Head, windows: qwen(fields, layers)?, ..biased(fields, layers)? })
        },
    },
    Family {
        model_type: "qwen2_moe",
        architecture: "Qwen2MoeForCausalLM",
        fields: &experts::QWEN2_FIELDS,
        absent: PLAIN,
        parts: |fields, layers| {
            let window = window(fields)?;
            let most = fields.optional_size("max_window_layers", 1 << 20)?.unwrap_or(28);
            let types = fields.layer_types(layers)?;
            let is_sliding =
                |i: usize| types.as_ref().map_or(i.is_multiple_of(2) && i < most, |types| types[i]);
            if types.is_some() && window.is_none() {
                full(fields)?;
            }
            Ok(Parts {
                qkv_bias: fields.switch_or("qkv_bias", true)?,
                windows: (0..layers).map(|i| window.filter(|_| is_sliding(i))).collect(),
                experts: Some(Experts::qwen2(fields, layers)?),
                ..Parts::default()
            })
        },
    },
    Family {
        model_type: "qwen3_moe",
        architecture: "Qwen3MoeForCausalLM",
        fields: &experts::QWEN_FIELDS,
        absent: PLAIN,
        parts: |fields, layers| {
            let window = window(fields)?;
            let experts = Some(Experts::qwen3(fields, layers)?);
            Ok(Parts {
                qk_norm: QkNorm::Head,
                windows: vec![window; layers],
                experts,
                ..biased(fields, layers)?
            })
        },
    },
];

const QWEN2: [(&str, FieldRule); 7] = qwen_fields(Only(True), Only(False));

const QWEN3: [(&str, FieldRule); 7] = qwen_fields(Used, Only(True));

/// The fields of Qwen's models. Qwen 2 always has biases of queries, keys and values, and Qwen 3 norms of queries and keys.
const fn qwen_fields(biases: FieldRule, norms: FieldRule) -> [(&'static str, FieldRule); 7] {
    [
        ("attention_bias", biases),
        ("layer_types", Used),
        ("max_window_layers", Used),
        ("sliding_window", Used),
        ("use_mrope", Only(False)),
        ("use_qk_norm", norms),
        ("use_sliding_window", Used),
    ]
}

/// The window of layers that have one, if the switch is on.
fn window(fields: &Fields) -> Result<Option<usize>> {
    match fields.switch("use_sliding_window")? {
        true => fields.window("sliding_window", Some(4096)),
        false => Ok(None),
    }
}

/// The windows of Qwen's layers.
fn qwen(fields: &Fields, layers: usize) -> Result<Vec<Option<usize>>> {
    let window = window(fields)?;
    let first = fields.optional_size("max_window_layers", 1 << 20)?.unwrap_or(28);
    let types = fields.layer_types(layers)?;
    let is_sliding = |i: usize| types.as_ref().map_or(i >= first, |types| types[i]);
    if types.is_some() && window.is_none() {
        full(fields)?;
    }
    Ok((0..layers).map(|i| window.filter(|_| is_sliding(i))).collect())
}
