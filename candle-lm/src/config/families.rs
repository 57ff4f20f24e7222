//! The families of decoders: the fields of each, what absent fields mean, and the parts that follow.

use anyhow::{Context, Result, ensure};
use candle_nn::Activation;
use serde_json::Value;

use super::experts::{self, Experts};
use super::fields::FieldRule::{self, Only, Used};
use super::fields::Plain::{False, One, Text, True};
use super::fields::{Fields, shortened};
use super::parts::{Norms, Parts, QkNorm};
use super::rope;

/// A kind of model, by the name that `model_type` has for it.
pub(super) struct Family {
    pub(super) model_type: &'static str,
    pub(super) architecture: &'static str,
    /// Fields beyond those of all families, and those that mean something else here.
    pub(super) fields: &'static [(&'static str, FieldRule)],
    pub(super) absent: FamilyDefaults,
    /// Reads the parts of a model of so many layers.
    pub(super) parts: fn(&Fields, usize) -> Result<Parts>,
}

/// What absent fields mean.
#[derive(Clone, Copy)]
pub(super) struct FamilyDefaults {
    pub(super) tied: bool,
    pub(super) head_dim: Option<usize>,
    pub(super) rope_theta: f64,
}

impl Family {
    /// The rule that the family has for a field, if it is not that of all families.
    pub(super) fn rule(&self, field: &str) -> Option<&'static FieldRule> {
        self.fields.iter().find(|(name, _)| *name == field).map(|(_, rule)| rule)
    }

    /// Returns whether the family reads a field that not all families have.
    pub(super) fn has(&self, field: &str) -> bool {
        matches!(self.rule(field), Some(Used))
    }

    /// Returns whether rotary positions may be scaled by `kind`.
    pub(super) fn scales_by(&self, kind: &str) -> bool {
        match self.model_type {
            // transformers has no other ones for it.
            "phi3" => ["default", "longrope", "su"].contains(&kind),
            _ => kind != "su",
        }
    }
}

const PLAIN: FamilyDefaults = FamilyDefaults { tied: false, head_dim: None, rope_theta: 10_000.0 };

pub(super) static FAMILIES: [Family; 12] = [
    Family {
        model_type: "llama",
        architecture: "LlamaForCausalLM",
        fields: &[("activation", Only(Text("swiglu"))), ("attention_bias", Used), ("mlp_bias", Used)],
        absent: PLAIN,
        parts: biased,
    },
    Family {
        model_type: "mistral",
        architecture: "MistralForCausalLM",
        fields: &[("sliding_window", Used)],
        absent: PLAIN,
        parts: |fields, layers| {
            let window = fields.window("sliding_window", Some(4096))?;
            Ok(Parts { windows: vec![window; layers], ..Parts::default() })
        },
    },
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
        absent: FamilyDefaults { tied: true, head_dim: Some(256), rope_theta: 1_000_000.0 },
        parts: |fields, layers| {
            let pattern = ["sliding_window_pattern", "_sliding_window_pattern"];
            let pattern =
                pattern.iter().find_map(|name| fields.optional_size(name, layers.max(64)).transpose());
            let parts = gemma(fields, layers, pattern.transpose()?.unwrap_or(6), [None; 2])?;
            let theta = fields.optional_positive("rope_local_base_freq")?.unwrap_or(10_000.0);
            let local = rope::read_local(fields, theta)?.unwrap_or((theta, None));
            Ok(Parts { qk_norm: QkNorm::Head, local_rope: Some(local), ..parts })
        },
    },
    Family {
        model_type: "phi3",
        architecture: "Phi3ForCausalLM",
        fields: &[
            // Of all positions, or of none in a window.
            ("full_attn_mod", Only(One)),
            ("original_max_position_embeddings", Used),
            ("partial_rotary_factor", Used),
            ("sliding_window", Used),
        ],
        absent: PLAIN,
        parts: |fields, layers| {
            let window = fields.window("sliding_window", None)?;
            Ok(Parts { fused: true, windows: vec![window; layers], ..Parts::default() })
        },
    },
    Family {
        model_type: "smollm3",
        architecture: "SmolLM3ForCausalLM",
        fields: &[
            ("attention_bias", Used),
            ("layer_types", Used),
            ("max_window_layers", FieldRule::Harmless),
            ("mlp_bias", Used),
            ("no_rope_layer_interval", Used),
            ("no_rope_layers", Used),
            ("use_sliding_window", Only(False)),
        ],
        absent: FamilyDefaults { tied: true, rope_theta: 2_000_000.0, ..PLAIN },
        parts: |fields, layers| {
            full(fields)?;
            let interval = fields.optional_size("no_rope_layer_interval", 4096)?.unwrap_or(4);
            let rotary = match fields.get("no_rope_layers") {
                None => (1..=layers).map(|i| !i.is_multiple_of(interval)).collect(),
                // 1 is for layers that have rotary positions.
                Some(list) => {
                    let one = |value: &Value| value.as_u64().filter(|&n| n < 2).map(|n| n == 1);
                    let read: Option<Vec<bool>> =
                        list.as_array().and_then(|list| list.iter().map(one).collect());
                    let read = read.filter(|read| read.len() == layers);
                    read.with_context(|| {
                        format!("no_rope_layers is {}; want {layers} of 0 or 1", shortened(list))
                    })?
                }
            };
            Ok(Parts { rotary, ..biased(fields, layers)? })
        },
    },
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
        model_type: "mixtral",
        architecture: "MixtralForCausalLM",
        fields: &experts::MIXTRAL_FIELDS,
        absent: FamilyDefaults { rope_theta: 1_000_000.0, ..PLAIN },
        parts: |fields, layers| {
            let window = fields.window("sliding_window", None)?;
            Ok(Parts {
                windows: vec![window; layers],
                experts: Some(Experts::mixtral(fields)?),
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
            let uses = fields.switch("use_sliding_window")?;
            let window = if uses { fields.window("sliding_window", Some(4096))? } else { None };
            let experts = Some(Experts::qwen(fields, layers)?);
            Ok(Parts {
                qk_norm: QkNorm::Head,
                windows: vec![window; layers],
                experts,
                ..biased(fields, layers)?
            })
        },
    },
    Family {
        model_type: "granite",
        architecture: "GraniteForCausalLM",
        fields: &[
            ("attention_bias", Used),
            ("attention_multiplier", Used),
            ("embedding_multiplier", Used),
            ("logits_scaling", Used),
            ("mlp_bias", Used),
            ("residual_multiplier", Used),
        ],
        absent: PLAIN,
        parts: |fields, layers| {
            let factor = |name| Ok::<_, anyhow::Error>(fields.optional_positive(name)?.unwrap_or(1.0));
            Ok(Parts {
                scores_scale: Some(factor("attention_multiplier")?),
                embedding_scale: factor("embedding_multiplier")?,
                branch_scale: factor("residual_multiplier")?,
                logits_divisor: factor("logits_scaling")?,
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
    ("attn_logit_softcapping", Used),
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

/// Biases as the fields say.
fn biased(fields: &Fields, _: usize) -> Result<Parts> {
    let attention = fields.switch("attention_bias")?;
    Ok(Parts {
        qkv_bias: attention,
        output_bias: attention,
        mlp_bias: fields.switch("mlp_bias")?,
        ..Parts::default()
    })
}

/// Refuses layers that do not see all tokens.
fn full(fields: &Fields) -> Result<()> {
    let types = fields.layer_types(usize::MAX)?;
    ensure!(
        types.iter().flatten().all(|is_sliding| !is_sliding),
        "layer_types has sliding_attention, which is not supported here"
    );
    Ok(())
}

/// The windows of Qwen's layers.
fn qwen(fields: &Fields, layers: usize) -> Result<Vec<Option<usize>>> {
    let uses = fields.switch("use_sliding_window")?;
    let window = if uses { fields.window("sliding_window", Some(4096))? } else { None };
    let first = fields.optional_size("max_window_layers", 1 << 20)?.unwrap_or(28);
    let types = fields.layer_types(layers)?;
    let is_sliding = |i: usize| types.as_ref().map_or(i >= first, |types| types[i]);
    if types.is_some() && window.is_none() {
        full(fields)?;
    }
    Ok((0..layers).map(|i| window.filter(|_| is_sliding(i))).collect())
}

/// What the models of Gemma have in common; without a list of layers every `pattern`-th sees all tokens, and without the
/// fields scores and logits have these `caps`.
fn gemma(fields: &Fields, layers: usize, pattern: usize, caps: [Option<f64>; 2]) -> Result<Parts> {
    let window = fields.window("sliding_window", Some(4096))?;
    let types = fields.layer_types(layers)?;
    let is_sliding = |i: usize| types.as_ref().map_or(!(i + 1).is_multiple_of(pattern), |types| types[i]);
    let hidden = fields.size("hidden_size", super::MOST)? as f64;
    let cap = |name, absent| if fields.has(name) { fields.optional_positive(name) } else { Ok(absent) };
    let scalar = fields.optional_positive("query_pre_attn_scalar")?.unwrap_or(256.0);
    Ok(Parts {
        norms: Norms::Both,
        norms_add_one: true,
        activation: Activation::GeluPytorchTanh,
        windows: (0..layers).map(|i| window.filter(|_| is_sliding(i))).collect(),
        scores_scale: Some(scalar.powf(-0.5)),
        scores_cap: cap("attn_logit_softcapping", caps[0])?,
        logits_cap: cap("final_logit_softcapping", caps[1])?,
        embedding_scale: hidden.sqrt(),
        ..Parts::default()
    })
}
