//! Layers of Mamba 2 as llama.cpp's converters write them.

use anyhow::{Context, Result};
use candle_core::quantized::gguf_file::Value as Stored;
use candle_core::{Device, Tensor};
use candle_shard::nn::Heads;

use crate::config::Config;
use crate::config::mamba::{MambaHeads, StateNorm};
use crate::config::mixers::MixerKind;
use crate::config::parts::{Multipliers, Parts};
use crate::gguf::mamba::{FALCON, NEMOTRON_MIXTURE};

/// Vectors of a layer that have names of their own in files, and these names.
const VECTORS: [(&str, &str); 3] = [("A_log", "ssm_a"), ("D", "ssm_d"), ("dt_bias", "ssm_dt.bias")];

/// Keys that files without attention do not have.
const OF_ATTENTION: [&str; 5] = [
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base",
];

/// The heads of the layers that have some.
fn heads(config: &Config) -> Option<MambaHeads> {
    config.parts.mixers.iter().find_map(|mixer| mixer.mamba())
}

/// What llama.cpp has not implemented for layers with states.
pub(super) fn lacks(config: &Config, kind: &str) -> Vec<&'static str> {
    let Some(heads) = heads(config) else { return Vec::new() };
    let mut lacks = Vec::new();
    let mut need = |has: bool, what: &'static str| lacks.extend((!has).then_some(what));
    need(!heads.proj_bias, "biases of the projections of states");
    need(heads.norm != StateNorm::BeforeGate, "a norm of states before gates");
    let Parts { embedding_scale, logits_divisor, .. } = config.parts;
    need(
        kind != FALCON || !config.tie_word_embeddings || embedding_scale * logits_divisor == 1.0,
        "an output layer that is the table with another factor",
    );
    lacks
}

/// The config of the model whose weights have the factors of the parts in them, as files of such hybrids have.
pub(super) fn folded(config: &Config) -> Config {
    let is_falcon = config.parts.mixers.iter().any(|mixer| matches!(mixer, MixerKind::Both(_)));
    let mut folded = config.clone();
    if is_falcon {
        let root = (config.heads().dim as f64).sqrt();
        folded.parts = Parts {
            factors: Multipliers::default(),
            scores_scale: Some(1.0 / root),
            embedding_scale: 1.0,
            logits_divisor: 1.0,
            ..folded.parts
        };
    }
    folded
}

/// The factor of a tensor in a file of a hybrid whose parts have factors. Biases are added behind the factor of what a part gets.
fn factor(config: &Config, name: &str) -> f64 {
    let Parts { factors, embedding_scale, logits_divisor, scores_scale, .. } = &config.parts;
    let Multipliers { attention_in, attention_out, states_out, gate, down, .. } = factors;
    let Heads { dim, .. } = config.heads();
    let of_input = if name.ends_with(".bias") { 1.0 } else { *attention_in };
    match () {
        () if name == "lm_head.weight" => 1.0 / logits_divisor,
        () if name == "model.embed_tokens.weight" => *embedding_scale,
        () if name.contains("mlp.gate_proj") => *gate,
        () if name.contains("mlp.down_proj") => *down,
        () if name.contains("k_proj") => scores_scale.unwrap_or(1.0) * (dim as f64).sqrt() * of_input,
        () if name.contains("q_proj") || name.contains("v_proj") => of_input,
        () if name.contains("o_proj") => *attention_out,
        () if name.contains("mamba.out_proj") => *states_out,
        () => 1.0,
    }
}

/// A tensor in the shape and with the factors that files have, by its name on the Hub.
pub(super) fn written(config: &Config, kind: &str, name: &str, x: Tensor) -> Result<Tensor> {
    let Some(heads) = heads(config) else { return Ok(x) };
    let x = match name.rsplit_once(".mamba.").map(|(_, own)| own) {
        Some("A_log") if config.parts.has_rates => x.unsqueeze(1)?,
        Some("A_log") => x.exp()?.neg()?.unsqueeze(1)?,
        Some("D") => x.unsqueeze(1)?,
        Some("conv1d.weight") => x.squeeze(1)?,
        Some("norm.weight") => x.reshape((heads.groups, ()))?,
        Some("in_proj.weight") if kind == FALCON => {
            let rows = heads.inputs().into_iter().zip(config.parts.factors.states);
            let rows: Vec<f32> = rows.flat_map(|((_, rows), factor)| vec![factor as f32; rows]).collect();
            x.broadcast_mul(&Tensor::new(rows, &Device::Cpu)?.unsqueeze(1)?)?
        }
        _ => x,
    };
    match if kind == FALCON { factor(config, name) } else { 1.0 } {
        1.0 => Ok(x),
        factor => Ok((x * factor)?),
    }
}

/// The name that a tensor of a layer has in files, if it is none of a module.
pub(super) fn renamed(layer: &str, rest: &str, kind: &str) -> Option<String> {
    if kind == FALCON && rest == "post_attention_layernorm.weight" {
        return Some(format!("blk.{layer}.ffn_norm"));
    }
    let own = rest.strip_prefix("mamba.")?;
    let (_, gguf) = VECTORS.iter().find(|(hub, _)| *hub == own)?;
    Some(format!("blk.{layer}.{gguf}"))
}

/// Whether a tensor is stored as floats because llama.cpp computes with it as it is.
pub(super) fn is_float(name: &str) -> bool {
    [".mamba.conv1d.weight", ".mamba.norm.weight", ".mamba.A_log", ".mamba.D"]
        .iter()
        .any(|end| name.ends_with(end))
}

/// Changes the keys of an architecture to those of a model with such layers.
///
/// # Errors
/// If the model has none.
pub(super) fn fields(config: &Config, kind: &str, own: &mut Vec<(&'static str, Stored)>) -> Result<()> {
    let heads = heads(config).context("no layer has states")?;
    let number = |n: usize| Stored::U32(u32::try_from(n).unwrap_or(u32::MAX));
    own.extend([
        ("ssm.conv_kernel", number(heads.taps)),
        ("ssm.state_size", number(heads.state)),
        ("ssm.group_count", number(heads.groups)),
        ("ssm.inner_size", number(heads.inner())),
        ("ssm.time_step_rank", number(heads.count)),
    ]);
    let of_layers = |of: &dyn Fn(usize) -> usize| {
        Stored::Array((0..config.num_hidden_layers).map(|layer| Stored::I32(of(layer) as i32)).collect())
    };
    let mut set = |key: &'static str, value: Option<Stored>| {
        own.retain(|(known, _)| *known != key);
        own.extend(value.map(|value| (key, value)));
    };
    let attends = |layer: usize| config.parts.mixer(layer).is_attention();
    match kind {
        FALCON => {}
        "mamba2" => {
            for key in OF_ATTENTION {
                set(key, None);
            }
            set("attention.head_count", Some(number(0)));
            set("feed_forward_length", Some(number(0)));
        }
        _ => {
            let keys = config.heads().key_value;
            set("attention.head_count_kv", Some(of_layers(&|layer| if attends(layer) { keys } else { 0 })));
        }
    }
    if kind.starts_with("nemotron_h") {
        let inner = |layer: usize| match (config.parts.has_feed_forward(layer), config.parts.experts(layer)) {
            (false, _) => 0,
            (true, Some(experts)) => experts.hidden,
            (true, None) => config.intermediate_size,
        };
        set("feed_forward_length", Some(of_layers(&inner)));
        // llama.cpp does not open files without it, and does not use it.
        set("attention.layer_norm_epsilon", Some(Stored::F32(config.rms_norm_eps as f32)));
    }
    if let (NEMOTRON_MIXTURE, Some(experts)) = (kind, &config.parts.experts) {
        set("expert_shared_feed_forward_length", Some(number(experts.shared)));
        set("expert_shared_count", Some(number(1)));
        set("moe_latent_size", experts.latent.map(number));
    }
    if kind == "granitehybrid" {
        // What llama.cpp takes for granted: all networks of experts are as wide as the others, and weights are normalized.
        for key in ["expert_feed_forward_length", "expert_weights_norm"] {
            set(key, None);
        }
        // llama.cpp takes it as a switch of rotary positions.
        set("rope.scaling.finetuned", Some(Stored::Bool(config.parts.is_rotary(0))));
        let shared = config.parts.experts.as_ref().map_or(config.intermediate_size, |experts| experts.shared);
        set("expert_shared_feed_forward_length", Some(number(shared)));
    }
    Ok(())
}
