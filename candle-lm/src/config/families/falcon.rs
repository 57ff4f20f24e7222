//! The families of Falcon.

use anyhow::{Context, Result};
use serde_json::{Map, Value};

use super::{Family, PLAIN, biased, rename};
use crate::config::fields::FieldRule::{self, Harmless, Only, Used};
use crate::config::fields::Plain::{False, True};
use crate::config::fields::{Fields, joined, positive, shortened};
use crate::config::mamba::{MAMBA_FIELDS, MambaHeads, StateNorm};
use crate::config::mixers::MixerKind;
use crate::config::parts::{Multipliers, Parts};

/// Their rows.
pub(super) static FAMILIES: [Family; 1] = [Family {
    model_type: "falcon_h1",
    architecture: "FalconH1ForCausalLM",
    fields: &HYBRID,
    absent: PLAIN,
    parts: |fields, layers| {
        let both = MixerKind::Both(heads(fields)?);
        let mixers = fields.mixers(layers, &[("hybrid", both)])?.unwrap_or_else(|| vec![both; layers]);
        let factor = |name| Ok::<_, anyhow::Error>(fields.optional_positive(name)?.unwrap_or(1.0));
        let [gate, down] = factors(fields, "mlp_multipliers")?;
        // Biases would be added behind the first factor, and before the others.
        let of_states = factor("ssm_in_multiplier")?;
        Ok(Parts {
            mixers,
            // That of keys.
            scores_scale: Some(factor("key_multiplier")? / (head_dim(fields)? as f64).sqrt()),
            embedding_scale: factor("embedding_multiplier")?,
            logits_divisor: 1.0 / factor("lm_head_multiplier")?,
            factors: Multipliers {
                attention_in: factor("attention_in_multiplier")?,
                attention_out: factor("attention_out_multiplier")?,
                states: factors(fields, "ssm_multipliers")?.map(|factor: f64| of_states * factor),
                states_out: factor("ssm_out_multiplier")?,
                gate,
                down,
            },
            names: &NAMES,
            ..biased(fields, layers)?
        })
    },
}];

const HYBRID: [(&str, FieldRule); 36] = joined(
    MAMBA_FIELDS,
    [
        ("attention_bias", Used),
        ("attention_in_multiplier", Used),
        ("attention_out_multiplier", Used),
        ("embedding_multiplier", Used),
        ("key_multiplier", Used),
        ("layer_types", Used),
        ("lm_head_multiplier", Used),
        ("mamba_d_ssm", Used),
        ("mamba_norm_before_gate", Used),
        ("mamba_proj_bias", Only(False)),
        ("mamba_rms_norm", Used),
        ("mamba_use_mlp", Only(True)),
        ("mlp_bias", Used),
        // What transformers does not read.
        ("mlp_expansion_factor", Harmless),
        ("mlp_multipliers", Used),
        ("num_logits_to_keep", Harmless),
        ("projectors_bias", Only(False)),
        ("ssm_in_multiplier", Used),
        ("ssm_multipliers", Used),
        ("ssm_out_multiplier", Used),
        // How fresh models begin.
        ("time_step_floor", Harmless),
        ("time_step_max", Harmless),
        ("time_step_min", Harmless),
        ("time_step_rank", Harmless),
        ("rescale_prenorm_residual", Harmless),
        ("residual_in_fp32", Harmless),
        ("use_mamba_kernels", Harmless),
    ],
);

/// What files call the modules.
static NAMES: [(&str, &str); 5] = [
    ("model.norm", "model.final_layernorm"),
    ("mlp.gate_proj", "feed_forward.gate_proj"),
    ("mlp.up_proj", "feed_forward.up_proj"),
    ("mlp.down_proj", "feed_forward.down_proj"),
    ("post_attention_layernorm", "pre_ff_layernorm"),
];

/// The width of a head of attention.
fn head_dim(fields: &Fields) -> Result<usize> {
    let (hidden, heads) =
        (fields.size("hidden_size", 1 << 30)?, fields.size("num_attention_heads", 1 << 30)?);
    Ok(fields.optional_size("head_dim", 1 << 30)?.unwrap_or(hidden / heads).max(1))
}

/// A list of so many factors; ones without the field.
fn factors<const N: usize>(fields: &Fields, name: &str) -> Result<[f64; N]> {
    let Some(list) = fields.get(name) else { return Ok([1.0; N]) };
    let said = || format!("{name} is {}; expected {N} numbers that are more than 0", shortened(list));
    let read = list.as_array().with_context(said)?.iter().map(|value| positive(name, value));
    <[f64; N]>::try_from(read.collect::<Result<Vec<_>>>()?).ok().with_context(said)
}

/// The heads of layers with states.
fn heads(fields: &Fields) -> Result<MambaHeads> {
    let inner = match fields.has("mamba_d_ssm") && fields.get("mamba_d_ssm").is_none() {
        true => {
            let expand = fields.optional_size("mamba_expand", 1 << 16)?.unwrap_or(2);
            fields.size("hidden_size", 1 << 30)?.saturating_mul(expand)
        }
        false => fields.optional_size("mamba_d_ssm", 1 << 30)?.unwrap_or(1024),
    };
    let norm = match (fields.switch("mamba_rms_norm")?, fields.switch_or("mamba_norm_before_gate", true)?) {
        (false, _) => StateNorm::None,
        (true, true) => StateNorm::BeforeGate,
        (true, false) => StateNorm::BehindGate,
    };
    Ok(MambaHeads { norm, ..fields.mamba_heads(inner, &format!("the {inner} of mamba_d_ssm"))? })
}

/// The fields of a config; the kinds of layers have the name that other families have for them.
pub(super) fn plain(mut fields: Map<String, Value>) -> Map<String, Value> {
    rename(&mut fields, &[("layers_block_type", "layer_types")]);
    fields
}
