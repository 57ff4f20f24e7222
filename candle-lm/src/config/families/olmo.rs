//! The families of OLMo.

use super::{Family, FamilyDefaults, PLAIN, biased, windows};
use crate::config::fields::FieldRule::Used;
use crate::config::parts::{Norms, Parts, QkNorm};
use crate::config::rope;

/// Their rows.
pub(super) static FAMILIES: [Family; 2] = [
    Family {
        model_type: "olmo2",
        architecture: "Olmo2ForCausalLM",
        fields: &[("attention_bias", Used)],
        absent: PLAIN,
        parts: |fields, layers| {
            Ok(Parts { norms: Norms::After, qk_norm: QkNorm::All, ..biased(fields, layers)? })
        },
    },
    Family {
        model_type: "olmo3",
        architecture: "Olmo3ForCausalLM",
        fields: &[("attention_bias", Used), ("layer_types", Used), ("sliding_window", Used)],
        absent: FamilyDefaults { rope_theta: 500_000.0, ..PLAIN },
        parts: |fields, layers| {
            // Without an entry of their own, layers with a window have the base and no scaling.
            let ((theta, _), _) = rope::read(fields)?;
            Ok(Parts {
                norms: Norms::After,
                qk_norm: QkNorm::All,
                windows: windows(fields, layers, fields.window("sliding_window", Some(4096))?, 4)?,
                local_rope: Some(rope::read_local(fields, theta)?.unwrap_or((theta, None))),
                ..biased(fields, layers)?
            })
        },
    },
];
