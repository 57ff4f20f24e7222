//! The families of Qwen that have the gated delta rule beside attention.

use anyhow::{Result, ensure};

use super::{Family, FamilyDefaults, PLAIN, biased};
use crate::config::experts::Experts;
use crate::config::fields::FieldRule::{self, Harmless, Only, Used};
use crate::config::fields::Plain::{Text, True};
use crate::config::fields::{Fields, joined};
use crate::config::mixers::{DeltaHeads, MixerKind};
use crate::config::parts::{Parts, QkNorm};
use crate::config::{MOST, MOST_LAYERS};

/// Their rows.
pub(super) static FAMILIES: [Family; 3] = [
    Family {
        model_type: "qwen3_5_text",
        architecture: "Qwen3_5ForCausalLM",
        fields: &QWEN3_5,
        absent: ABSENT,
        parts: |fields, layers| hybrid(fields, layers, false),
    },
    Family {
        model_type: "qwen3_5_moe_text",
        architecture: "Qwen3_5MoeForCausalLM",
        fields: &QWEN3_5_MOE,
        absent: ABSENT,
        parts: |fields, layers| {
            Ok(Parts { experts: mixture(fields, layers, [256, 8])?, ..hybrid(fields, layers, false)? })
        },
    },
    Family {
        model_type: "qwen3_next",
        architecture: "Qwen3NextForCausalLM",
        fields: &QWEN3_NEXT,
        absent: ABSENT,
        parts: |fields, layers| {
            Ok(Parts { experts: mixture(fields, layers, [512, 10])?, ..hybrid(fields, layers, true)? })
        },
    },
];

const ABSENT: FamilyDefaults = FamilyDefaults { head_dim: Some(256), rotary_share: 0.25, ..PLAIN };

const QWEN3_5: [(&str, FieldRule); 17] = HYBRID;

/// The fields of all of them.
const HYBRID: [(&str, FieldRule); 17] = [
    ("attention_bias", Used),
    // What both always do.
    ("attn_output_gate", Only(True)),
    ("full_attention_interval", Used),
    ("layer_types", Used),
    ("linear_conv_kernel_dim", Used),
    ("linear_key_head_dim", Used),
    ("linear_num_key_heads", Used),
    ("linear_num_value_heads", Used),
    ("linear_value_head_dim", Used),
    // States have 32 bits.
    ("mamba_ssm_dtype", Only(Text("float32"))),
    // A text has the same position in all shares.
    ("mrope_interleaved", Harmless),
    ("mrope_section", Harmless),
    // Layers that draft tokens.
    ("mtp_num_hidden_layers", Harmless),
    ("mtp_use_dedicated_embeddings", Harmless),
    // Another name of SiLU, by which the delta rule's outputs are gated.
    ("output_gate_type", Only(Text("swish"))),
    ("partial_rotary_factor", Used),
    ("use_qk_norm", Only(True)),
];

const QWEN3_5_MOE: [(&str, FieldRule); 23] = joined(HYBRID, MIXTURE);

const QWEN3_NEXT: [(&str, FieldRule); 26] =
    joined(QWEN3_5_MOE, [("decoder_sparse_step", Used), ("mlp_only_layers", Used), ("norm_topk_prob", Used)]);

/// The fields of mixtures.
const MIXTURE: [(&str, FieldRule); 6] = [
    ("moe_intermediate_size", Used),
    ("num_experts", Used),
    ("num_experts_per_tok", Used),
    ("output_router_logits", Used),
    ("router_aux_loss_coef", Used),
    ("shared_expert_intermediate_size", Used),
];

/// The experts, if a layer has some: without fields so many, of which a token uses some.
fn mixture(fields: &Fields, layers: usize, absent: [usize; 2]) -> Result<Option<Experts>> {
    let experts = Experts::qwen3_next(fields, layers, absent)?;
    Ok((0..layers).any(|layer| experts.are_in(layer)).then_some(experts))
}

/// The parts of a model whose layers are named by `layer_types`, or of which every fourth has attention.
fn hybrid(fields: &Fields, layers: usize, by_key_head: bool) -> Result<Parts> {
    let size = |name, absent| Ok::<_, anyhow::Error>(fields.optional_size(name, 1 << 16)?.unwrap_or(absent));
    let heads = DeltaHeads {
        key: size("linear_num_key_heads", 16)?,
        value: size("linear_num_value_heads", 32)?,
        key_dim: size("linear_key_head_dim", 128)?,
        value_dim: size("linear_value_head_dim", 128)?,
        taps: size("linear_conv_kernel_dim", 4)?,
        by_key_head,
    };
    ensure!(
        heads.value.is_multiple_of(heads.key) && heads.channels().iter().all(|channels| *channels <= MOST),
        "linear_num_key_heads {} does not divide linear_num_value_heads {}, or heads are too many",
        heads.key,
        heads.value
    );
    let delta = MixerKind::DeltaNet(heads);
    let interval = fields.optional_size("full_attention_interval", MOST_LAYERS)?.unwrap_or(4);
    let known = [("linear_attention", delta), ("full_attention", MixerKind::Attention)];
    let by_interval =
        |layer: usize| if layer.is_multiple_of(interval) { MixerKind::Attention } else { delta };
    let mixers = fields.mixers(layers, &known)?.unwrap_or_else(|| (1..=layers).map(by_interval).collect());
    Ok(Parts {
        norms_add_one: true,
        qk_norm: QkNorm::Head,
        gated_attention: true,
        mixers,
        ..biased(fields, layers)?
    })
}
