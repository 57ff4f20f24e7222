//! The families of IBM with factors of embeddings, branches, scores and logits.

use anyhow::{Result, bail};
use serde_json::{Map, Value, json};

use super::{Family, PLAIN, biased, rename};
use crate::config::experts::{Experts, ROUTER};
use crate::config::fields::FieldRule::{self, Harmless, Only, Used};
use crate::config::fields::Plain::Text;
use crate::config::fields::{Fields, joined};
use crate::config::mamba::{MAMBA_FIELDS, MambaHeads};
use crate::config::mixers::MixerKind;
use crate::config::parts::{FUSED_GATE, FUSED_SHARED, Parts};

/// Their rows.
pub(super) static FAMILIES: [Family; 4] = [
    Family {
        model_type: "granite",
        architecture: "GraniteForCausalLM",
        fields: &GRANITE,
        absent: PLAIN,
        parts: with_factors,
    },
    Family {
        model_type: "granitemoe",
        architecture: "GraniteMoeForCausalLM",
        fields: &MIXTURE,
        absent: PLAIN,
        parts: mixture,
    },
    // The same model beside a network for all tokens.
    Family {
        model_type: "granitemoeshared",
        architecture: "GraniteMoeSharedForCausalLM",
        fields: &SHARED_MIXTURE,
        absent: PLAIN,
        parts: |fields, layers| {
            let parts = mixture(fields, layers)?;
            let is_shared = parts.experts.as_ref().is_some_and(|experts| experts.shared > 0);
            let fused: &[&str] = if is_shared { &[FUSED_SHARED] } else { &[] };
            Ok(Parts { fused, names: &SHARED_NAMES, ..parts })
        },
    },
    Family {
        model_type: "granitemoehybrid",
        architecture: "GraniteMoeHybridForCausalLM",
        fields: &HYBRID,
        absent: PLAIN,
        parts: |fields, layers| {
            let mamba = MixerKind::Mamba(heads(fields)?);
            let known = [
                ("mamba", mamba),
                ("linear_attention", mamba),
                ("attention", MixerKind::Attention),
                ("full_attention", MixerKind::Attention),
            ];
            let mixers = fields.mixers(layers, &known)?.unwrap_or_else(|| vec![mamba; layers]);
            let is_rotary = match fields.get("position_embedding_type") {
                None => false,
                Some(kind) if *kind == "nope" => false,
                Some(kind) if *kind == "rope" => true,
                Some(kind) => {
                    bail!("position_embedding_type is {kind}; expected \"rope\", \"nope\" or null")
                }
            };
            let has_experts = fields.get("num_local_experts") != Some(&json!(0));
            let (fused, names): (&[_], &[_]) = match has_experts {
                true => (&[FUSED_SHARED], &SHARED_NAMES),
                false => (&[FUSED_GATE], &NAMES),
            };
            Ok(Parts {
                mixers,
                rotary: vec![is_rotary; layers],
                fused,
                names,
                experts: has_experts.then(|| Experts::granite(fields)).transpose()?,
                ..with_factors(fields, layers)?
            })
        },
    },
];

const GRANITE: [(&str, FieldRule); 6] = [
    ("attention_bias", Used),
    ("attention_multiplier", Used),
    ("embedding_multiplier", Used),
    ("logits_scaling", Used),
    ("mlp_bias", Used),
    ("residual_multiplier", Used),
];

const MIXTURE: [(&str, FieldRule); 10] = joined(GRANITE, ROUTER);

const SHARED_MIXTURE: [(&str, FieldRule); 11] = joined(MIXTURE, [("shared_intermediate_size", Used)]);

const HYBRID: [(&str, FieldRule); 26] = joined(
    GRANITE,
    joined::<9, 11, 20>(
        MAMBA_FIELDS,
        [
            ("init_method", Harmless),
            ("layer_types", Used),
            ("layers_block_type", Used),
            ("mamba_proj_bias", Used),
            ("normalization_function", Only(Text("rmsnorm"))),
            ("num_experts_per_tok", Used),
            ("num_local_experts", Used),
            ("output_router_logits", Used),
            ("position_embedding_type", Used),
            ("router_aux_loss_coef", Used),
            ("shared_intermediate_size", Used),
        ],
    ),
);

/// What files call the modules.
static NAMES: [(&str, &str); 2] =
    [(FUSED_GATE, "shared_mlp.input_linear"), ("mlp.down_proj", "shared_mlp.output_linear")];

/// The same of a network that all tokens use beside their experts.
static SHARED_NAMES: [(&str, &str); 2] =
    [(FUSED_SHARED, "shared_mlp.input_linear"), ("mlp.shared_experts.down_proj", "shared_mlp.output_linear")];

/// The parts of a model with experts in all layers.
fn mixture(fields: &Fields, layers: usize) -> Result<Parts> {
    Ok(Parts { experts: Some(Experts::granite(fields)?), ..with_factors(fields, layers)? })
}

/// The parts of a model with the four factors.
fn with_factors(fields: &Fields, layers: usize) -> Result<Parts> {
    let factor = |name| Ok::<_, anyhow::Error>(fields.optional_positive(name)?.unwrap_or(1.0));
    Ok(Parts {
        scores_scale: Some(factor("attention_multiplier")?),
        embedding_scale: factor("embedding_multiplier")?,
        branch_scale: factor("residual_multiplier")?,
        logits_divisor: factor("logits_scaling")?,
        ..biased(fields, layers)?
    })
}

/// The heads of layers with states, which together are some times as wide as the hidden states.
fn heads(fields: &Fields) -> Result<MambaHeads> {
    let expand = fields.optional_size("mamba_expand", 1 << 16)?.unwrap_or(2);
    let inner = fields.size("hidden_size", 1 << 30)?.saturating_mul(expand);
    fields.mamba_heads(inner, &format!("mamba_expand {expand} times hidden_size"))
}

/// The fields of a config; without experts those of feed-forward networks have the names of all families.
pub(super) fn plain(mut fields: Map<String, Value>) -> Map<String, Value> {
    if fields.get("num_local_experts") == Some(&json!(0)) {
        let width = fields.remove("shared_intermediate_size").filter(|width| !width.is_null());
        fields.insert("intermediate_size".into(), width.unwrap_or(json!(1024)));
    } else {
        fields.entry("shared_intermediate_size").or_insert(json!(1024));
    }
    rename(&mut fields, &[("layers_block_type", "layer_types")]);
    fields
}
