//! The families of Cohere.

use anyhow::Result;
use candle_shard::kernels::RopePairs;

use super::{Family, FamilyDefaults, PLAIN, biased, windows};
use crate::config::fields::FieldRule::{self, Only, Used};
use crate::config::fields::Fields;
use crate::config::fields::Plain::{False, One, Text, True};
use crate::config::parts::{NormKind, Norms, Parts};

/// Their rows.
pub(super) static FAMILIES: [Family; 2] = [
    Family {
        model_type: "cohere",
        architecture: "CohereForCausalLM",
        fields: &[("attention_bias", Used), ("layer_norm_eps", Used), ("logit_scale", Used)],
        absent: FamilyDefaults { rope_theta: 500_000.0, ..ABSENT },
        parts: cohere,
    },
    Family {
        model_type: "cohere2",
        architecture: "Cohere2ForCausalLM",
        fields: &[
            ("_sliding_window_pattern", Used),
            ("attention_bias", Used),
            ("cache_implementation", FieldRule::Harmless),
            ("layer_norm_eps", Used),
            // What the list of layers says in other words.
            ("layer_switch", FieldRule::Harmless),
            ("layer_types", Used),
            ("logit_scale", Used),
            ("order_of_interleaved_layers", Only(Text("local_attn_first"))),
            ("position_embedding_type", Only(Text("rope_gptj"))),
            ("rotary_pct", Only(One)),
            ("sliding_window", Used),
            ("sliding_window_pattern", Used),
            ("use_embedding_sharing", FieldRule::Harmless),
            ("use_gated_activation", Only(True)),
            ("use_parallel_block", Only(True)),
            ("use_parallel_embedding", Only(False)),
        ],
        absent: ABSENT,
        parts: |fields, layers| {
            let pattern = fields.pattern(layers)?.unwrap_or(4);
            let windows = windows(fields, layers, fields.window("sliding_window", Some(4096))?, pattern)?;
            let rotary = windows.iter().map(Option::is_some).collect();
            Ok(Parts { windows, rotary, ..cohere(fields, layers)? })
        },
    },
];

const ABSENT: FamilyDefaults = FamilyDefaults { tied: true, ..PLAIN };

fn cohere(fields: &Fields, layers: usize) -> Result<Parts> {
    Ok(Parts {
        norms: Norms::Shared,
        norm: NormKind::Layer,
        pairs: RopePairs::Neighbors,
        logits_divisor: 1.0 / fields.optional_positive("logit_scale")?.unwrap_or(0.0625),
        ..biased(fields, layers)?
    })
}
