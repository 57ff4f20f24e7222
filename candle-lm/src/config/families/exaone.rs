//! The families of EXAONE.

use anyhow::Result;
use serde_json::{Map, Value};

use super::{Family, PLAIN, full, rename, windows};
use crate::config::experts::{DEEPSEEK_FIELDS, Experts};
use crate::config::fields::FieldRule::{self, Harmless, Used};
use crate::config::fields::{Fields, joined};
use crate::config::parts::{Norms, Parts, QkNorm};

/// Their rows.
pub(super) static FAMILIES: [Family; 2] = [
    Family {
        model_type: "exaone4",
        architecture: "Exaone4ForCausalLM",
        fields: &FIELDS,
        absent: PLAIN,
        parts: |fields, layers| Ok(Parts { norms: Norms::After, ..attention(fields, layers)? }),
    },
    Family {
        model_type: "exaone_moe",
        architecture: "ExaoneMoeForCausalLM",
        fields: &MIXTURE,
        absent: PLAIN,
        parts: |fields, layers| {
            Ok(Parts { experts: Some(Experts::exaone(fields, layers)?), ..attention(fields, layers)? })
        },
    },
];

const FIELDS: [(&str, FieldRule); 7] = [
    // Of layers that predict further tokens.
    ("_num_mtp_layers", Harmless),
    ("layer_types", Used),
    ("mtp_loss_scaling_factor", Harmless),
    ("mtp_share_layers", Harmless),
    ("num_nextn_predict_layers", Harmless),
    ("sliding_window", Used),
    ("sliding_window_pattern", Used),
];

const MIXTURE: [(&str, FieldRule); 23] = joined(
    DEEPSEEK_FIELDS,
    // What other programs read in the place of the number of dense layers.
    joined::<7, 1, 8>(FIELDS, [("is_moe_layer", Harmless)]),
);

/// Norms of heads, and windows in some layers, which alone have rotary positions then.
fn attention(fields: &Fields, layers: usize) -> Result<Parts> {
    let window = fields.window("sliding_window", Some(4096))?;
    let (windows, rotary) = match window {
        None => {
            full(fields)?;
            (Vec::new(), Vec::new())
        }
        Some(_) => {
            // transformers does not read the pattern beside the list.
            let pattern = match fields.get("layer_types") {
                Some(_) => None,
                None => fields.pattern(layers)?,
            };
            let windows = windows(fields, layers, window, pattern.unwrap_or(4))?;
            let rotary = windows.iter().map(Option::is_some).collect();
            (windows, rotary)
        }
    };
    Ok(Parts { qk_norm: QkNorm::Head, windows, rotary, ..Parts::default() })
}

/// The fields of a config of experts, whose numbers have the names of other mixtures.
pub(super) fn plain(mut fields: Map<String, Value>) -> Map<String, Value> {
    rename(&mut fields, &[("num_experts", "num_local_experts"), ("num_shared_experts", "n_shared_experts")]);
    fields
}
