//! The names of tensors: those of a file, and those of the Hub.

use super::{delta_net, experts, gemma4, mamba};
use crate::config::Config;
use crate::config::parts::{FUSED_GATE, FUSED_QKV};
use crate::config::tensors::{EXPERT_LATENTS, EXPERTS, ROUTER};
use crate::expert_files::GATE_UP;

/// The name that a tensor has on the Hub, or its own if there is none, in a file that [has gates](has_gates) or not.
pub(crate) fn renamed(name: &str, config: &Config, has_gates: bool) -> String {
    if let Some((_, hub)) = TENSORS.iter().find(|(gguf, _)| *gguf == name) {
        return (*hub).to_owned();
    }
    if let Some(name) = gemma4::of_model(name) {
        return name;
    }
    let parts: Vec<&str> = name.split('.').collect();
    if let ["blk", layer, rest @ ..] = &parts[..]
        && let Some(name) = delta_net::renamed(layer, rest, config)
            .or_else(|| mamba::renamed(layer, rest))
            .or_else(|| gemma4::renamed(layer, rest))
    {
        return name;
    }
    if let &["blk", layer, "shortconv", module, "weight"] = &parts[..] {
        return format!("model.layers.{layer}.conv.{module}.weight");
    }
    if let &["blk", layer, "attn_sinks", "weight"] = &parts[..] {
        return format!("model.layers.{layer}.self_attn.sinks");
    }
    if let &["blk", layer, module, expert, "weight"] = &parts[..] {
        return experts::renamed(layer, module, expert).unwrap_or_else(|| name.to_owned());
    }
    let &["blk", layer, module, parameter] = &parts[..] else { return name.to_owned() };
    let parts = &config.parts;
    let place = |names: &[&str]| names.iter().position(|gguf| *gguf == module);
    let hub = match (place(&NORMS), place(&QK_NORMS)) {
        // Some files call the norm before the feed-forward layers by its name in files of the Hub.
        (Some(at), _) => parts.norms.names().into_iter().skip(at).flatten().next(),
        (_, Some(at)) => {
            return format!("model.layers.{layer}.self_attn.{}.{parameter}", parts.qk_norm.names()[at]);
        }
        _ if module == "ffn_up" && parts.fused.contains(&FUSED_GATE) && !has_gates => Some(FUSED_GATE),
        _ => MODULES.iter().find(|(gguf, _)| *gguf == module).map(|(_, hub)| *hub),
    };
    match hub {
        None => name.to_owned(),
        Some(hub) if EXPERTS.contains(&hub) || hub == GATE_UP => {
            let bias = if parameter == "bias" { "_bias" } else { "" };
            format!("model.layers.{layer}.{hub}{bias}")
        }
        Some(hub) => {
            let shared = parts.experts.as_ref().map_or(SHARED_EXPERTS, |experts| experts.names.shared[0]);
            let hub = hub.replace(SHARED_EXPERTS, shared);
            format!("model.layers.{layer}.{hub}.{parameter}")
        }
    }
}

/// Whether a file of these tensors has gates of feed-forward networks by themselves, and not in one with their ups.
pub(crate) fn has_gates<'a>(mut names: impl Iterator<Item = &'a str>) -> bool {
    names.any(|name| name.contains(".ffn_gate."))
}

/// The names of tensors outside of layers.
pub(super) const TENSORS: [(&str, &str); 5] = [
    ("token_embd.weight", "model.embed_tokens.weight"),
    ("output_norm.weight", "model.norm.weight"),
    ("output_norm.bias", "model.norm.bias"),
    // The last norm of LFM2.
    ("token_embd_norm.weight", "model.norm.weight"),
    ("output.weight", "lm_head.weight"),
];

/// The names of modules of layers.
pub(super) const MODULES: [(&str, &str); 35] = [
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_qkv", FUSED_QKV),
    ("attn_q_a", "self_attn.q_a_proj"),
    ("attn_q_a_norm", "self_attn.q_a_layernorm"),
    ("attn_q_b", "self_attn.q_b_proj"),
    ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
    ("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
    ("attn_kv_b", "self_attn.kv_b_proj"),
    ("attn_k_b", "self_attn.k_b_proj"),
    ("attn_v_b", "self_attn.v_b_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("ffn_gate_inp", ROUTER),
    ("exp_probs_b", ROUTER),
    ("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_experts.up_proj"),
    ("ffn_down_shexp", "mlp.shared_experts.down_proj"),
    ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
    ("ffn_latent_down", EXPERT_LATENTS[0]),
    ("ffn_latent_up", EXPERT_LATENTS[1]),
    ("ffn_gate_exps", EXPERTS[0]),
    ("ffn_up_exps", EXPERTS[1]),
    ("ffn_down_exps", EXPERTS[2]),
    ("ffn_gate_up_exps", GATE_UP),
    ("shortconv.in_proj", "conv.in_proj"),
    ("shortconv.conv", CONV),
    ("shortconv.out_proj", "conv.out_proj"),
    ("ssm_in", "mamba.in_proj"),
    ("ssm_conv1d", "mamba.conv1d"),
    ("ssm_norm", "mamba.norm"),
    ("ssm_out", "mamba.out_proj"),
];

/// The norms of a layer, in the order of [`Norms::names`](crate::config::parts::Norms::names).
pub(super) const NORMS: [&str; 4] = ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"];

/// The norms of queries and keys.
pub(super) const QK_NORMS: [&str; 2] = ["attn_q_norm", "attn_k_norm"];

/// The network that all tokens use beside their experts, which some files of the Hub call otherwise.
const SHARED_EXPERTS: &str = "mlp.shared_experts";

/// The taps of a short convolution, which files have without the dim of inputs of a channel.
pub(super) const CONV: &str = "conv.conv";
