//! The families of decoders: the fields of each, what absent fields mean, and the parts that follow.

mod cohere;
mod deepseek;
mod ernie;
mod exaone;
mod falcon;
mod gemma;
mod gemma4;
mod glm;
mod granite;
mod hunyuan;
mod lfm2;
mod llama;
mod llama4;
mod mamba;
mod minimax;
mod olmo;
mod openai;
mod qwen;
mod qwen3_5;
mod singles;

use anyhow::{Result, ensure};
use serde_json::{Map, Value, json};

use super::MOST_LAYERS;
use super::fields::FieldRule::{self, Used};
use super::fields::Fields;
use super::parts::Parts;
use super::rope;

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

    /// Returns what the field is called that keeps norms from dividing by zero.
    pub(in crate::config) fn eps(&self) -> &'static str {
        let names = ["layer_norm_eps", "norm_eps", "norm_epsilon"];
        names.into_iter().find(|name| self.has(name)).unwrap_or("rms_norm_eps")
    }

    /// Returns whether rotary positions may be scaled by `kind`.
    pub(in crate::config) fn scales_by(&self, kind: &str) -> bool {
        match self.model_type {
            // transformers has no other ones for it.
            "phi3" => ["default", "longrope", "su"].contains(&kind),
            "hunyuan_v1_dense" | "hunyuan_v1_moe" => !["su", rope::PROPORTIONAL].contains(&kind),
            "gemma4_text" => ["default", rope::PROPORTIONAL].contains(&kind),
            _ => !["su", rope::BASE_STRETCH, rope::PROPORTIONAL].contains(&kind),
        }
    }

    /// The fields that it has beside those of each kind of scaling.
    pub(in crate::config) fn of_rope(&self) -> &'static [&'static str] {
        match self.model_type {
            // The longest sequence is said outside too, and that counts.
            "ministral3" | "mistral4" => &["llama_4_scaling_beta", "max_position_embeddings"],
            _ => &[],
        }
    }

    /// Returns whether layers with a window have rotary positions of their own.
    pub(in crate::config) fn has_local_rope(&self) -> bool {
        ["gemma3_text", "gemma4_text", "olmo3"].contains(&self.model_type)
    }
}

const PLAIN: FamilyDefaults =
    FamilyDefaults { tied: false, head_dim: None, rope_theta: 10_000.0, rotary_share: 1.0 };

/// All families.
pub(in crate::config) fn families() -> impl Iterator<Item = &'static Family> {
    let makers = [
        &llama::FAMILIES[..],
        &llama4::FAMILIES,
        &mamba::FAMILIES,
        &qwen::FAMILIES,
        &gemma::FAMILIES,
        &gemma4::FAMILIES,
        &olmo::FAMILIES,
        &glm::FAMILIES,
        &granite::FAMILIES,
        &hunyuan::FAMILIES,
        &cohere::FAMILIES,
        &deepseek::FAMILIES,
        &ernie::FAMILIES,
        &exaone::FAMILIES,
        &falcon::FAMILIES,
        &minimax::FAMILIES,
        &openai::FAMILIES,
        &lfm2::FAMILIES,
        &qwen3_5::FAMILIES,
        &singles::FAMILIES,
    ];
    makers.into_iter().flatten()
}

/// The fields of a config, where a family has other names for them or computes some of others.
///
/// # Errors
/// If a field says something that is not known.
pub(in crate::config) fn plain(fields: Map<String, Value>) -> Result<Map<String, Value>> {
    match fields.get("model_type").and_then(Value::as_str) {
        Some("ernie4_5_moe") => Ok(ernie::plain(fields)),
        Some("exaone_moe") => Ok(exaone::plain(fields)),
        Some("falcon_h1") => Ok(falcon::plain(fields)),
        Some("gemma4_text") => gemma4::plain(fields),
        Some("gpt_oss") => Ok(openai::plain(fields)),
        Some("granitemoehybrid") => Ok(granite::plain(fields)),
        Some("hunyuan_v1_moe") => hunyuan::plain(fields),
        Some("lfm2" | "lfm2_moe") => lfm2::plain(fields),
        Some("llama4_text") => llama4::plain(fields),
        Some("mamba2") => Ok(mamba::mamba2(fields)),
        Some("nemotron_h") => mamba::nemotron_h(fields),
        _ => Ok(fields),
    }
}

/// Why a kind of model is not supported, if that is known.
pub(in crate::config) fn refusal(model_type: &Value) -> Option<&'static str> {
    deepseek::REFUSED.iter().find(|(name, _)| model_type == name).map(|(_, reason)| *reason)
}

/// Gives fields other names. They replace what has these names, as transformers does where the second name of a pair is its own, or one that it
/// does not read.
fn rename(fields: &mut Map<String, Value>, names: &[(&str, &str)]) {
    for (was, is) in names {
        if let Some(value) = fields.remove(*was).filter(|value| !value.is_null()) {
            fields.insert((*is).into(), value);
        }
    }
}

/// Gives fields other names, but where these are there: transformers sets them last (`attribute_map`).
fn rename_absent(fields: &mut Map<String, Value>, names: &[(&str, &str)]) {
    for (was, is) in names {
        let value = fields.remove(*was).filter(|value| !value.is_null());
        if let (Some(value), None | Some(Value::Null)) = (value, fields.get(*is)) {
            fields.insert((*is).into(), value);
        }
    }
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

/// The windows of layers: `window` for those that slide. Without a list of layers these are all but every `pattern`-th.
fn windows(
    fields: &Fields,
    layers: usize,
    window: Option<usize>,
    pattern: usize,
) -> Result<Vec<Option<usize>>> {
    let types = fields.layer_types(layers)?;
    let is_sliding = |i: usize| types.as_ref().map_or(!(i + 1).is_multiple_of(pattern), |types| types[i]);
    Ok((0..layers).map(|i| window.filter(|_| is_sliding(i))).collect())
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
