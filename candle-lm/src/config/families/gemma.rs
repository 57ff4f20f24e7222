//! The families of Gemma.

use anyhow::{Result, ensure};
use candle_nn::Activation;

use super::{Family, FamilyDefaults, PLAIN, windows};
use crate::config::fields::FieldRule::{self, Only, Used};
use crate::config::fields::Fields;
use crate::config::fields::Plain::{False, Text};
use crate::config::parts::{Norms, Parts, QkNorm};
use crate::config::{MOST, rope};

/// Their rows.
pub(super) static FAMILIES: [Family; 3] = [
    Family {
        model_type: "gemma",
        architecture: "GemmaForCausalLM",
        fields: &[("hidden_act", Used), ("hidden_activation", Only(Text("gelu_pytorch_tanh")))],
        absent: FamilyDefaults { tied: true, head_dim: Some(256), ..PLAIN },
        parts: |fields, _| {
            // The older name means the same, as in transformers.
            let known = ["gelu_pytorch_tanh", "gelu"];
            let activation = fields.get("hidden_act");
            ensure!(
                activation.is_none_or(|activation| known.iter().any(|known| activation == known)),
                "hidden_act is {}, and only gelu_pytorch_tanh is supported",
                activation.cloned().unwrap_or_default()
            );
            let hidden = fields.size("hidden_size", MOST)? as f64;
            Ok(Parts {
                norms_add_one: true,
                activation: Activation::GeluPytorchTanh,
                embedding_scale: hidden.sqrt(),
                ..Parts::default()
            })
        },
    },
    Family {
        model_type: "gemma2",
        architecture: "Gemma2ForCausalLM",
        fields: &GEMMA2,
        absent: FamilyDefaults { tied: true, head_dim: Some(256), ..PLAIN },
        parts: |fields, layers| gemma(fields, layers, 2, [Some(50.0), Some(30.0)]),
    },
    Family {
        model_type: "gemma3_text",
        architecture: "Gemma3ForCausalLM",
        fields: &GEMMA3,
        absent: FamilyDefaults { tied: true, head_dim: Some(256), rope_theta: 1_000_000.0, ..PLAIN },
        parts: |fields, layers| {
            let parts = gemma(fields, layers, fields.pattern(layers)?.unwrap_or(6), [None; 2])?;
            let theta = fields.optional_positive("rope_local_base_freq")?.unwrap_or(10_000.0);
            let local = rope::read_local(fields, theta)?.unwrap_or((theta, None));
            Ok(Parts { qk_norm: QkNorm::Head, local_rope: Some(local), scores_cap: None, ..parts })
        },
    },
];

const GEMMA2: [(&str, FieldRule); 10] = [
    ("attention_bias", Only(False)),
    ("attn_logit_softcapping", Used),
    ("cache_implementation", FieldRule::Harmless),
    ("final_logit_softcapping", Used),
    ("hidden_act", FieldRule::Harmless),
    ("hidden_activation", Only(Text("gelu_pytorch_tanh"))),
    ("layer_types", Used),
    ("query_pre_attn_scalar", Used),
    ("sliding_window", Used),
    // The same number as sliding_window.
    ("sliding_window_size", FieldRule::Harmless),
];

const GEMMA3: [(&str, FieldRule); 12] = [
    ("_sliding_window_pattern", Used),
    ("attention_bias", Only(False)),
    // Neither transformers nor llama.cpp caps scores of this family.
    ("attn_logit_softcapping", FieldRule::Harmless),
    ("cache_implementation", FieldRule::Harmless),
    ("final_logit_softcapping", Used),
    ("hidden_act", FieldRule::Harmless),
    ("hidden_activation", Only(Text("gelu_pytorch_tanh"))),
    ("layer_types", Used),
    ("query_pre_attn_scalar", Used),
    ("rope_local_base_freq", Used),
    ("sliding_window", Used),
    ("sliding_window_pattern", Used),
];

/// What the models of Gemma have in common; without a list of layers every `pattern`-th sees all tokens, and without the
/// fields scores and logits have these `caps`.
fn gemma(fields: &Fields, layers: usize, pattern: usize, caps: [Option<f64>; 2]) -> Result<Parts> {
    let window = fields.window("sliding_window", Some(4096))?;
    let hidden = fields.size("hidden_size", MOST)? as f64;
    let cap = |name, absent| if fields.has(name) { fields.optional_positive(name) } else { Ok(absent) };
    let scalar = fields.optional_positive("query_pre_attn_scalar")?.unwrap_or(256.0);
    Ok(Parts {
        norms: Norms::Both,
        norms_add_one: true,
        activation: Activation::GeluPytorchTanh,
        windows: windows(fields, layers, window, pattern)?,
        scores_scale: Some(scalar.powf(-0.5)),
        scores_cap: cap("attn_logit_softcapping", caps[0])?,
        logits_cap: cap("final_logit_softcapping", caps[1])?,
        embedding_scale: hidden.sqrt(),
        ..Parts::default()
    })
}
