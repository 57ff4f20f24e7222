//! Models in GGUF files: the config and the names of tensors that the Hub's files would have.

mod experts;
pub(super) mod export;
mod pre_tokenizer;
pub(super) mod rope;
mod sentencepiece;
pub(super) mod tokenizer;

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use candle_core::quantized::gguf_file::Value as Stored;
use candle_shard::Weights;
use candle_shard::kernels::RopePairs;
use serde_json::{Map, Value, json};

use super::config::Config;
use super::config::tensors::{EXPERTS, ROUTER};
use super::config::unknown::UnknownFields;

/// The metadata of a file.
type Metadata = BTreeMap<String, Stored>;

/// The kinds of models: their names in GGUF and on the Hub, and which elements of a head are turned together.
const ARCHITECTURES: [(&str, &str, RopePairs); 14] = [
    // The rows of queries and keys are permuted so that neighbors are turned together.
    ("llama", "llama", RopePairs::Neighbors),
    ("smollm3", "smollm3", RopePairs::Neighbors),
    ("granite", "granite", RopePairs::Neighbors),
    ("qwen2", "qwen2", RopePairs::Halves),
    ("qwen3", "qwen3", RopePairs::Halves),
    ("qwen3moe", "qwen3_moe", RopePairs::Halves),
    ("gemma2", "gemma2", RopePairs::Halves),
    ("gemma3", "gemma3_text", RopePairs::Halves),
    ("phi3", "phi3", RopePairs::Halves),
    ("olmo2", "olmo2", RopePairs::Halves),
    ("olmoe", "olmoe", RopePairs::Halves),
    ("qwen2moe", "qwen2_moe", RopePairs::Halves),
    ("glm4moe", "glm4_moe", RopePairs::Halves),
    ("minimax-m2", "minimax_m2", RopePairs::Halves),
];

/// The fields of an architecture, and what they are called in a `config.json`; none if they follow from others.
const FIELDS: [(&str, Option<&str>); 32] = [
    ("block_count", Some("num_hidden_layers")),
    ("embedding_length", Some("hidden_size")),
    ("feed_forward_length", Some("intermediate_size")),
    ("context_length", Some("max_position_embeddings")),
    ("vocab_size", None),
    ("attention.head_count", Some("num_attention_heads")),
    ("attention.head_count_kv", Some("num_key_value_heads")),
    ("attention.key_length", Some("head_dim")),
    ("attention.value_length", None),
    ("attention.layer_norm_rms_epsilon", Some("rms_norm_eps")),
    ("attention.causal", Some("is_causal")),
    ("attention.sliding_window", Some("sliding_window")),
    ("attention.sliding_window_pattern", Some("sliding_window_pattern")),
    ("attention.scale", Some("attention_multiplier")),
    ("rope.freq_base", Some("rope_theta")),
    ("rope.freq_base_swa", Some("rope_local_base_freq")),
    ("attn_logit_softcapping", Some("attn_logit_softcapping")),
    ("final_logit_softcapping", Some("final_logit_softcapping")),
    ("embedding_scale", Some("embedding_multiplier")),
    ("residual_scale", Some("residual_multiplier")),
    ("logit_scale", Some("logits_scaling")),
    ("expert_count", Some("num_local_experts")),
    ("expert_used_count", Some("num_experts_per_tok")),
    ("expert_feed_forward_length", Some("moe_intermediate_size")),
    ("expert_weights_norm", Some("norm_topk_prob")),
    ("expert_weights_scale", Some("routed_scaling_factor")),
    ("expert_shared_feed_forward_length", Some("shared_expert_intermediate_size")),
    ("expert_shared_count", Some("n_shared_experts")),
    ("expert_group_count", Some("n_group")),
    ("expert_group_used_count", Some("topk_group")),
    ("leading_dense_block_count", Some("first_k_dense_replace")),
    ("nextn_predict_layers", Some("num_nextn_predict_layers")),
];

/// The names of tensors outside of layers.
const TENSORS: [(&str, &str); 3] = [
    ("token_embd.weight", "model.embed_tokens.weight"),
    ("output_norm.weight", "model.norm.weight"),
    ("output.weight", "lm_head.weight"),
];

/// The names of modules of layers.
const MODULES: [(&str, &str); 23] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_qkv", "self_attn.qkv_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("ffn_gate_inp", ROUTER),
    ("exp_probs_b", ROUTER),
    ("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_experts.up_proj"),
    ("ffn_down_shexp", "mlp.shared_experts.down_proj"),
    ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
    ("ffn_gate_exps", EXPERTS[0]),
    ("ffn_up_exps", EXPERTS[1]),
    ("ffn_down_exps", EXPERTS[2]),
    ("post_attention_norm", "post_attention_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
];

/// Opens a file: the config, without what the keys `ignored` say, and the weights by the names of the Hub. Where it `has_values`, the config has those of small tensors too.
///
/// # Errors
/// If the file is damaged, or its model is not known; the key or the tensor is named.
pub(super) fn open(path: &Path, ignored: &[String], has_values: bool) -> Result<(Config, Weights)> {
    let weights = Weights::open(path)?;
    let metadata =
        weights.metadata().context("is no GGUF file").with_context(|| format!("{}", path.display()))?;
    let config =
        config(metadata, ignored, &weights, has_values).with_context(|| format!("{}", path.display()))?;
    let has_head = weights.names().any(|name| name == "output.weight");
    let kind = metadata
        .get("general.architecture")
        .and_then(|kind| kind.to_string().ok())
        .cloned()
        .unwrap_or_default();
    let weights = weights.rename(|name| renamed(name, &kind))?;
    // A stage with the output layer reads the table by itself.
    let weights =
        if has_head { weights } else { weights.alias("model.embed_tokens.weight", "lm_head.weight")? };
    Ok((config, weights))
}

/// What a `config.json` would say.
fn config(metadata: &Metadata, ignored: &[String], weights: &Weights, has_values: bool) -> Result<Config> {
    let text = |key: &str| metadata.get(key).and_then(|value| value.to_string().ok());
    let kind = text("general.architecture").context("there is no general.architecture")?;
    let known = || ARCHITECTURES.map(|(name, ..)| name).join(", ");
    let found = ARCHITECTURES.iter().find(|(name, ..)| name == kind);
    let &(_, model_type, pairs) = found
        .with_context(|| format!("general.architecture {kind:?} is not supported; supported: {}", known()))?;
    let mut fields = Map::from_iter([("model_type".to_owned(), json!(model_type))]);
    let key_of = |field: &str| {
        let key = FIELDS.iter().find(|(_, name)| *name == Some(field));
        key.map_or(field.to_owned(), |(key, _)| format!("{kind}.{key}"))
    };
    let mut unknown = UnknownFields::of(&key_of);
    for (key, value) in metadata {
        let Some(own) = key.strip_prefix(kind.as_str()).and_then(|key| key.strip_prefix('.')) else {
            continue;
        };
        if rope::KEYS.contains(&own) || experts::KEYS.contains(&own) {
            continue;
        }
        let Some((_, name)) = FIELDS.iter().find(|(field, _)| *field == own) else {
            unknown.judge(key, &plain(value).unwrap_or_else(|| json!(shown(value))));
            continue;
        };
        if let Some(name) = name {
            fields.insert(
                (*name).to_owned(),
                plain(value).with_context(|| format!("{key} is {}", shown(value)))?,
            );
        }
    }
    let own = |key: &str| metadata.get(&format!("{kind}.{key}"));
    let number = |key: &str| own(key).and_then(whole);
    let rows = weights.shape("token_embd.weight")?.first().copied().unwrap_or(0);
    ensure!(
        number("vocab_size").is_none_or(|size| size as usize == rows),
        "{kind}.vocab_size is not the {rows} rows of token_embd.weight"
    );
    fields.insert("vocab_size".into(), json!(rows));
    let has = |name: &str| weights.names().any(|known| known == name);
    fields.insert("tie_word_embeddings".into(), json!(!has("output.weight")));
    if has("blk.0.attn_output.bias") || (kind == "glm4moe" && has("blk.0.attn_q.bias")) {
        fields.insert("attention_bias".into(), json!(true));
    }
    if has("blk.0.ffn_up.bias") {
        fields.insert("mlp_bias".into(), json!(true));
    }
    fields.entry("rope_theta").or_insert(json!(10_000.0));
    rope::fields(kind, metadata, (weights, has_values), &mut fields)?;
    experts::fields(kind, metadata, weights, &mut fields)?;
    let ends: Vec<u64> = ["eos_token_id", "eot_token_id", "eom_token_id"]
        .iter()
        .filter_map(|name| whole(metadata.get(&format!("tokenizer.ggml.{name}"))?))
        .collect();
    fields.insert("eos_token_id".into(), json!(ends));
    fields.extend(
        metadata.get("tokenizer.ggml.bos_token_id").and_then(plain).map(|id| ("bos_token_id".into(), id)),
    );
    if kind.starts_with("gemma") {
        gemma(kind, &mut fields, &number)?;
    }
    let mut config = Config::with_unknown(unknown, fields, ignored)?;
    config.notes.extend(tokenizer::guess(metadata));
    // The norms of Gemma's files have the one in them.
    config.parts.norms_add_one = false;
    config.parts.pairs = pairs;
    rope::read_factors(&mut config, (weights, has_values))?;
    let (dim, turned) = (config.heads().dim, config.rotary_width());
    for (key, width) in [("attention.value_length", dim), ("rope.dimension_count", turned)] {
        ensure!(
            number(key).is_none_or(|n| n as usize == width),
            "{kind}.{key} is not {width}, the width of a head that is {dim} wide, which is not supported"
        );
    }
    Ok(config)
}

/// What files of Gemma leave to the program: scores are divided by the root of a head's width, but in the 27B models.
fn gemma(kind: &str, fields: &mut Map<String, Value>, number: &dyn Fn(&str) -> Option<u64>) -> Result<()> {
    let size = |key: &str| number(key).with_context(|| format!("there is no {kind}.{key}"));
    let is_largest = size("block_count")? == if kind == "gemma2" { 46 } else { 62 };
    let (hidden, heads) = (size("embedding_length")?, size("attention.head_count")?.max(1));
    let scalar = if is_largest { hidden / heads } else { number("attention.key_length").unwrap_or(256) };
    fields.insert("query_pre_attn_scalar".into(), json!(scalar));
    fields.insert("hidden_activation".into(), json!("gelu_pytorch_tanh"));
    // The list of layers with a window, where it is written.
    if let Some(list) = fields.get("sliding_window_pattern").and_then(Value::as_array).cloned() {
        fields.remove("sliding_window_pattern");
        let kind = |sliding: &Value| {
            if *sliding == json!(true) || *sliding == json!(1) {
                "sliding_attention"
            } else {
                "full_attention"
            }
        };
        fields.insert("layer_types".into(), list.iter().map(kind).collect());
    }
    Ok(())
}

/// The name that a tensor has on the Hub, or its own if there is none.
pub(crate) fn renamed(name: &str, kind: &str) -> String {
    if let Some((_, hub)) = TENSORS.iter().find(|(gguf, _)| *gguf == name) {
        return (*hub).to_owned();
    }
    let parts: Vec<&str> = name.split('.').collect();
    if let &["blk", layer, module, expert, "weight"] = &parts[..] {
        return experts::renamed(layer, module, expert).unwrap_or_else(|| name.to_owned());
    }
    let &["blk", layer, module, parameter] = &parts[..] else { return name.to_owned() };
    let has_four = kind.starts_with("gemma");
    let hub = match module {
        "ffn_norm" if has_four => Some("pre_feedforward_layernorm"),
        "ffn_up" if kind == "phi3" => Some("mlp.gate_up_proj"),
        _ => MODULES.iter().find(|(gguf, _)| *gguf == module).map(|(_, hub)| *hub),
    };
    match hub {
        None => name.to_owned(),
        Some(hub) if EXPERTS.contains(&hub) => format!("model.layers.{layer}.{hub}"),
        Some(hub) => {
            let one = kind == "qwen2moe";
            let hub = if one { hub.replace(".shared_experts.", ".shared_expert.") } else { hub.to_owned() };
            format!("model.layers.{layer}.{hub}.{parameter}")
        }
    }
}

/// A whole number of any type.
pub(super) fn whole(value: &Stored) -> Option<u64> {
    plain(value).as_ref().and_then(Value::as_u64)
}

/// A value as JSON has it.
pub(super) fn plain(value: &Stored) -> Option<Value> {
    Some(match value {
        Stored::U8(n) => json!(n),
        Stored::I8(n) => json!(n),
        Stored::U16(n) => json!(n),
        Stored::I16(n) => json!(n),
        Stored::U32(n) => json!(n),
        Stored::I32(n) => json!(n),
        Stored::U64(n) => json!(n),
        Stored::I64(n) => json!(n),
        Stored::F32(x) => json!(f64::from(*x)),
        Stored::F64(x) => json!(x),
        Stored::Bool(is) => json!(is),
        Stored::String(text) => json!(text),
        Stored::Array(list) => list.iter().map(plain).collect::<Option<Value>>()?,
    })
}

/// A value for an error.
fn shown(value: &Stored) -> String {
    let text = plain(value).map_or_else(|| "?".into(), |value| value.to_string());
    text.chars().take(80).collect()
}
