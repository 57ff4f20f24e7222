//! Families whose layers are one mixer or one feed-forward network each: Mamba 2, and NVIDIA's hybrids of it.

use anyhow::{Context, Result, bail, ensure};
use candle_nn::Activation;
use serde_json::{Map, Value, json};

use super::{Family, FamilyDefaults, PLAIN, rename, rename_absent};
use crate::config::experts::Experts;
use crate::config::fields::FieldRule::{self, Harmless, Only, Used};
use crate::config::fields::Plain::{Text, True};
use crate::config::fields::{Fields, joined, shortened};
use crate::config::mamba::{MambaHeads, StateNorm};
use crate::config::mixers::MixerKind;
use crate::config::parts::{Norms, Parts};
use crate::config::tensors::EXPERT_LATENTS;

/// Their rows.
pub(super) static FAMILIES: [Family; 2] = [
    Family {
        model_type: "mamba2",
        architecture: "Mamba2ForCausalLM",
        fields: &MAMBA2,
        absent: PLAIN,
        parts: |fields, layers| {
            let heads = heads(fields, [128, 64])?;
            let expand = fields.optional_size("expand", 1 << 16)?.unwrap_or(2);
            ensure!(
                fields.size("hidden_size", 1 << 30)?.saturating_mul(expand) == heads.inner(),
                "num_heads is {} and head_dim is {}; together they are not expand {expand} times hidden_size",
                heads.count,
                heads.width
            );
            Ok(parts(vec![MixerKind::Mamba(heads); layers]))
        },
    },
    Family {
        model_type: "nemotron_h",
        architecture: "NemotronHForCausalLM",
        fields: &NEMOTRON_H,
        absent: FamilyDefaults { head_dim: Some(128), ..PLAIN },
        parts: |fields, layers| {
            let mamba = MixerKind::Mamba(heads(fields, [128, 64])?);
            let known = [
                ("linear_attention", mamba),
                ("mamba", mamba),
                ("full_attention", MixerKind::Attention),
                ("attention", MixerKind::Attention),
                ("mlp", MixerKind::None),
                ("moe", MixerKind::None),
            ];
            let mixers = fields.mixers(layers, &known)?.unwrap_or_default();
            let kinds = fields.get("layer_types").and_then(Value::as_array);
            let sparse: Vec<bool> = kinds.into_iter().flatten().map(|kind| *kind == "moe").collect();
            let has_experts = sparse.contains(&true);
            ensure!(
                !(has_experts && fields.switch("mlp_bias")?),
                "mlp_bias is true, and only false is supported in models with experts"
            );
            Ok(Parts {
                experts: has_experts.then(|| Experts::nemotron(fields, sparse)).transpose()?,
                rotary: vec![false; layers],
                gated: false,
                activation: Activation::Relu2,
                mlp_bias: fields.switch("mlp_bias")?,
                ..parts(mixers)
            })
        },
    },
];

/// The fields of layers with states.
const STATES: [(&str, FieldRule); 14] = [
    // How many tokens are computed together.
    ("chunk_size", Harmless),
    ("conv_kernel", Used),
    ("expand", Used),
    ("mamba_head_dim", Used),
    ("mamba_num_heads", Used),
    ("n_groups", Used),
    // How 16-bit models round, and how fresh ones begin.
    ("rescale_prenorm_residual", Harmless),
    ("residual_in_fp32", Harmless),
    ("ssm_state_size", Used),
    ("time_step_floor", Harmless),
    ("time_step_max", Harmless),
    // Of NVIDIA's models it is the shortest step, in prompts alone and in transformers alone.
    ("time_step_min", Harmless),
    ("use_bias", Used),
    ("use_conv_bias", Used),
];

const MAMBA2: [(&str, FieldRule); 18] = joined(
    STATES,
    [
        // transformers does not read it.
        ("norm_before_gate", Harmless),
        ("rms_norm", Only(True)),
        ("time_step_limit", Used),
        ("time_step_rank", Harmless),
    ],
);

const NEMOTRON_H: [(&str, FieldRule); 41] = joined(
    STATES,
    [
        ("layer_types", Used),
        ("mamba_hidden_act", Only(Text("silu"))),
        ("mamba_proj_bias", Harmless),
        // States have 32 bits.
        ("mamba_ssm_cache_dtype", Harmless),
        ("mlp_bias", Used),
        ("mlp_hidden_act", Only(Text("relu2"))),
        ("moe_intermediate_size", Used),
        ("moe_latent_size", Used),
        ("moe_shared_expert_intermediate_size", Used),
        // When things are computed, and how many networks there are in one, whose width is said.
        ("moe_shared_expert_overlap", Harmless),
        ("n_group", Used),
        ("n_routed_experts", Used),
        ("n_shared_experts", Harmless),
        // That of layer_norm_epsilon, said twice.
        ("norm_eps", FieldRule::Same("rms_norm_eps")),
        ("norm_topk_prob", Used),
        ("num_experts_per_tok", Used),
        ("num_local_experts", Used),
        ("num_logits_to_keep", Harmless),
        ("num_query_groups", Harmless),
        // Layers that predict further tokens, which are left out.
        ("mtp_layers_block_type", Harmless),
        ("num_nextn_predict_layers", Harmless),
        ("output_router_logits", Harmless),
        ("routed_scaling_factor", Used),
        ("time_step_limit", Used),
        ("time_step_rank", Harmless),
        ("topk_group", Used),
        ("use_mamba_kernels", Harmless),
    ],
);

/// What files call the modules.
static NAMES: [(&str, &str); 17] = [
    ("model.embed_tokens", "model.embeddings"),
    ("model.norm", "model.norm_f"),
    ("mamba.in_proj", "mixer.in_proj"),
    ("mamba.conv1d", "mixer.conv1d"),
    ("mamba.norm", "mixer.norm"),
    ("mamba.out_proj", "mixer.out_proj"),
    ("self_attn.q_proj", "mixer.q_proj"),
    ("self_attn.k_proj", "mixer.k_proj"),
    ("self_attn.v_proj", "mixer.v_proj"),
    ("self_attn.o_proj", "mixer.o_proj"),
    ("mlp.up_proj", "mixer.up_proj"),
    ("mlp.down_proj", "mixer.down_proj"),
    ("mlp.shared_experts.up_proj", "mixer.shared_experts.up_proj"),
    ("mlp.shared_experts.down_proj", "mixer.shared_experts.down_proj"),
    (EXPERT_LATENTS[0], "mixer.fc1_latent_proj"),
    (EXPERT_LATENTS[1], "mixer.fc2_latent_proj"),
    // Rates and steps, which are in no module of the layer.
    ("mamba", "mixer"),
];

fn parts(mixers: Vec<MixerKind>) -> Parts {
    Parts { norms: Norms::One, mixers, names: &NAMES, model_name: "backbone", ..Parts::default() }
}

/// The heads of layers with states; without fields so many of such a width.
fn heads(fields: &Fields, [count, width]: [usize; 2]) -> Result<MambaHeads> {
    let size = |name, absent| Ok::<_, anyhow::Error>(fields.optional_size(name, 1 << 16)?.unwrap_or(absent));
    fields.steps_without_limits()?;
    MambaHeads {
        count: size("mamba_num_heads", count)?,
        width: size("mamba_head_dim", width)?,
        groups: size("n_groups", 8)?,
        state: size("ssm_state_size", 128)?,
        taps: size("conv_kernel", 4)?,
        conv_bias: fields.switch_or("use_conv_bias", true)?,
        proj_bias: fields.switch("use_bias")?,
        norm: StateNorm::BehindGate,
    }
    .checked()
}

/// The fields of a config of Mamba 2, under the names that NVIDIA has for those of states. Attention and feed-forward networks, which no layer
/// has, have the least sizes.
pub(super) fn mamba2(mut fields: Map<String, Value>) -> Map<String, Value> {
    let names = [
        ("head_dim", "mamba_head_dim"),
        ("layer_norm_epsilon", "rms_norm_eps"),
        ("num_heads", "mamba_num_heads"),
        ("state_size", "ssm_state_size"),
    ];
    rename(&mut fields, &names);
    fields.entry("rms_norm_eps").or_insert(json!(1e-5));
    fields.entry("max_position_embeddings").or_insert(json!(1 << 20));
    fields.remove("num_key_value_heads");
    fields.insert("num_attention_heads".into(), json!(1));
    fields.insert("head_dim".into(), json!(2));
    fields.insert("intermediate_size".into(), json!(1));
    fields
}

/// The kinds of layers that letters of a pattern stand for.
const LETTERS: [(char, &str); 4] =
    [('M', "linear_attention"), ('*', "full_attention"), ('-', "mlp"), ('E', "moe")];

/// The fields of a config of NVIDIA's hybrids, with a list of the kinds of layers.
///
/// # Errors
/// If there is no such list.
pub(super) fn nemotron_h(mut fields: Map<String, Value>) -> Result<Map<String, Value>> {
    rename(
        &mut fields,
        &[
            ("layer_norm_epsilon", "rms_norm_eps"),
            ("mamba_conv_bias", "use_conv_bias"),
            ("mamba_d_conv", "conv_kernel"),
            ("mamba_dt_limit", "time_step_limit"),
            ("mamba_expand", "expand"),
            ("mamba_n_groups", "n_groups"),
        ],
    );
    rename_absent(&mut fields, &[("attention_head_dim", "head_dim"), ("layers_block_type", "layer_types")]);
    fields.entry("rms_norm_eps").or_insert(json!(1e-5));
    let pattern = fields.remove("hybrid_override_pattern").filter(|pattern| !pattern.is_null());
    if let (Some(pattern), None) = (&pattern, fields.get("layer_types")) {
        let kind = |letter: char| LETTERS.iter().find(|(known, _)| *known == letter).map(|(_, kind)| *kind);
        let kinds =
            pattern.as_str().and_then(|letters| letters.chars().map(kind).collect::<Option<Vec<_>>>());
        let kinds = kinds.with_context(|| {
            format!("hybrid_override_pattern is {}; expected letters of M, *, - and E", shortened(pattern))
        })?;
        fields.insert("layer_types".into(), json!(kinds));
    }
    // What transformers does not write, and does not read beside the list.
    let Some(Value::Array(kinds)) = fields.get("layer_types") else {
        bail!("there is no layers_block_type, which says what each layer is");
    };
    let count = kinds.len();
    fields.insert("num_hidden_layers".into(), json!(count));
    fields.entry("intermediate_size").or_insert(json!(21504));
    Ok(fields)
}
