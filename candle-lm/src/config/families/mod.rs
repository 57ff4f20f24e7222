//! The families of decoders: the fields of each, what absent fields mean, and the parts that follow.

mod deepseek;
mod gemma;
mod glm;
mod llama;
mod minimax;
mod qwen;

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::MOST_LAYERS;
use super::fields::FieldRule::{self, Used};
use super::fields::Fields;
use super::parts::Parts;

/// A kind of model, by the name that `model_type` has for it.
pub(in crate::config) struct Family {
    pub(in crate::config) model_type: &'static str,
    pub(in crate::config) architecture: &'static str,
    /// Fields beyond those of all families, and those that mean something else here.
    pub(in crate::config) fields: &'static [(&'static str, FieldRule)],
    pub(in crate::config) absent: FamilyDefaults,
    /// Reads the parts of a model of so many layers.
    pub(in crate::config) parts: fn(&Fields, usize) -> Result<Parts>,
}

/// What absent fields mean.
#[derive(Clone, Copy)]
pub(in crate::config) struct FamilyDefaults {
    pub(in crate::config) tied: bool,
    pub(in crate::config) head_dim: Option<usize>,
    pub(in crate::config) rope_theta: f64,
    /// The share of each head that has rotary positions.
    pub(in crate::config) rotary_share: f64,
}

impl Family {
    /// The rule that the family has for a field, if it is not that of all families.
    pub(in crate::config) fn rule(&self, field: &str) -> Option<&'static FieldRule> {
        self.fields.iter().find(|(name, _)| *name == field).map(|(_, rule)| rule)
    }

    /// Returns whether the family reads a field that not all families have.
    pub(in crate::config) fn has(&self, field: &str) -> bool {
        matches!(self.rule(field), Some(Used))
    }

    /// Returns whether rotary positions may be scaled by `kind`.
    pub(in crate::config) fn scales_by(&self, kind: &str) -> bool {
        match self.model_type {
            // transformers has no other ones for it.
            "phi3" => ["default", "longrope", "su"].contains(&kind),
            _ => kind != "su",
        }
    }
}

const PLAIN: FamilyDefaults =
    FamilyDefaults { tied: false, head_dim: None, rope_theta: 10_000.0, rotary_share: 1.0 };

/// All families.
pub(in crate::config) fn families() -> impl Iterator<Item = &'static Family> {
    let all: [&[Family]; 6] = [
        &llama::FAMILIES,
        &qwen::FAMILIES,
        &gemma::FAMILIES,
        &glm::FAMILIES,
        &minimax::FAMILIES,
        &deepseek::FAMILIES,
    ];
    all.into_iter().flatten()
}

/// Why a kind of model is not supported, if that is known.
pub(in crate::config) fn refusal(model_type: &Value) -> Option<&'static str> {
    deepseek::REFUSED.iter().find(|(name, _)| model_type == name).map(|(_, reason)| *reason)
}

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

/// The layers that predict further tokens: one without the field.
fn drafts(fields: &Fields) -> Result<usize> {
    match fields.get("num_nextn_predict_layers") {
        Some(count) if *count == json!(0) => Ok(0),
        _ => Ok(fields.optional_size("num_nextn_predict_layers", MOST_LAYERS)?.unwrap_or(1)),
    }
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
