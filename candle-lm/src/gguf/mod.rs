//! Models in GGUF files: the config and the names of tensors that the Hub's files would have.

mod delta_net;
mod experts;
pub(super) mod export;
mod gemma4;
mod latent;
mod llama4;
mod mamba;
mod names;
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
use super::config::unknown::UnknownFields;
pub(crate) use names::{has_gates, renamed};

use names::CONV;

/// The metadata of a file.
type Metadata = BTreeMap<String, Stored>;

/// The kinds of models: their names in GGUF and on the Hub, and whether the rows of queries and keys are permuted so that neighbors are
/// turned together.
const ARCHITECTURES: [(&str, &str, bool); 51] = [
    ("llama", "llama", true),
    // Newer converters write Mistral's models so; those whose queries grow with their positions come last.
    ("mistral3", "mistral", true),
    ("mistral3", "ministral3", true),
    ("smollm3", "smollm3", true),
    (llama4::KIND, "llama4_text", false),
    ("granite", "granite", true),
    ("granitemoe", "granitemoe", true),
    ("qwen2", "qwen2", false),
    ("qwen3", "qwen3", false),
    // The language models of models for images.
    ("qwen2vl", "qwen2", false),
    ("qwen3vl", "qwen3", false),
    ("qwen3moe", "qwen3_moe", false),
    ("gemma", "gemma", false),
    ("gemma2", "gemma2", false),
    ("gemma3", "gemma3_text", false),
    ("phi3", "phi3", false),
    ("olmo2", "olmo2", false),
    // One with windows.
    ("olmo2", "olmo3", false),
    ("seed_oss", "seed_oss", false),
    ("exaone4", "exaone4", false),
    (experts::EXAONE, "exaone_moe", false),
    ("hunyuan-dense", "hunyuan_v1_dense", false),
    ("hunyuan-moe", "hunyuan_v1_moe", false),
    ("ernie4_5", "ernie4_5", false),
    (experts::ERNIE, "ernie4_5_moe", false),
    ("chatglm", "glm", false),
    ("glm4", "glm4", false),
    ("glm4moe", "glm4_moe", false),
    ("minimax-m2", "minimax_m2", false),
    ("command-r", "cohere", false),
    ("cohere2", "cohere2", false),
    ("nemotron", "nemotron", false),
    ("arcee", "arcee", true),
    ("stablelm", "stablelm", false),
    ("starcoder2", "starcoder2", false),
    ("lfm2", "lfm2", false),
    ("lfm2moe", "lfm2_moe", false),
    ("olmoe", "olmoe", false),
    ("qwen2moe", "qwen2_moe", false),
    ("gpt-oss", "gpt_oss", false),
    (latent::DEEPSEEK, "deepseek_v3", false),
    (latent::MISTRAL, "mistral4", false),
    ("granitehybrid", "granitemoehybrid", true),
    (mamba::FALCON, "falcon_h1", false),
    ("mamba2", "mamba2", false),
    ("nemotron_h", "nemotron_h", true),
    (mamba::NEMOTRON_MIXTURE, "nemotron_h", true),
    ("qwen35", "qwen3_5_text", false),
    ("qwen35moe", "qwen3_5_moe_text", false),
    ("qwen3next", "qwen3_next", false),
    (gemma4::KIND, "gemma4_text", false),
];

/// The fields of an architecture, and what they are called in a `config.json`; none if they follow from others.
const FIELDS: [(&str, Option<&str>); 44] = [
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
    ("attention.layer_norm_epsilon", Some("layer_norm_eps")),
    ("attention.causal", Some("is_causal")),
    ("attention.sliding_window", Some("sliding_window")),
    ("attention.sliding_window_pattern", Some("sliding_window_pattern")),
    ("attention.scale", Some("attention_multiplier")),
    ("rope.freq_base", Some("rope_theta")),
    // llama.cpp looks for a second norm in its place.
    ("use_parallel_residual", None),
    // How positions of images are shared out, and where images go in. A text has the same position in all shares.
    ("rope.dimension_sections", None),
    ("n_deepstack_layers", None),
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
    ("interleave_moe_layer_step", Some("interleave_moe_layer_step")),
    ("moe_latent_size", Some("moe_latent_size")),
    ("nextn_predict_layers", Some("num_nextn_predict_layers")),
    ("shortconv.l_cache", Some("conv_L_cache")),
    ("ssm.conv_kernel", Some("conv_kernel")),
    ("ssm.group_count", Some("n_groups")),
    ("ssm.inner_size", Some("ssm_inner_size")),
    ("ssm.state_size", Some("ssm_state_size")),
    ("ssm.time_step_rank", Some("mamba_num_heads")),
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
    let kind = architecture(metadata).cloned().unwrap_or_default();
    let has_gates = has_gates(weights.names());
    let mut weights = weights.rename(|name| renamed(name, &config, has_gates))?;
    let taps = |name: &&str| name.ends_with(&format!(".{CONV}.weight"));
    for name in weights.names().filter(taps).map(str::to_owned).collect::<Vec<_>>() {
        if weights.shape(&name)?.len() == 2 {
            weights = weights.unsqueeze(&name, 1)?;
        }
    }
    let weights = mamba::shaped(latent::joined(experts::apart(weights)?)?)?;
    let weights = delta_net::shaped(&kind, weights, &config)?;
    // A stage with the output layer reads the table by itself.
    let weights =
        if has_head { weights } else { weights.alias("model.embed_tokens.weight", "lm_head.weight")? };
    Ok((config, weights))
}

/// What a file calls its kind of model.
fn architecture(metadata: &Metadata) -> Option<&String> {
    metadata.get("general.architecture")?.to_string().ok()
}

/// What a `config.json` would say.
fn config(metadata: &Metadata, ignored: &[String], weights: &Weights, has_values: bool) -> Result<Config> {
    let kind = architecture(metadata).context("there is no general.architecture")?;
    let known = || ARCHITECTURES.map(|(name, ..)| name).join(", ");
    let own = |key: &str| metadata.get(&format!("{kind}.{key}"));
    let number = |key: &str| own(key).and_then(whole);
    let mut found = ARCHITECTURES.iter().filter(|(name, ..)| name == kind);
    let is_last =
        ["attention.sliding_window", "attention.temperature_scale"].iter().any(|key| own(key).is_some());
    let found = if is_last { found.next_back() } else { found.next() };
    let &(_, model_type, is_permuted) = found
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
        let is_latent = latent::is_kind(kind) && latent::KEYS.contains(&own);
        let is_delta = delta_net::is_kind(kind) && delta_net::KEYS.contains(&own);
        let is_gemma4 = kind == gemma4::KIND && gemma4::KEYS.contains(&own);
        if is_latent || is_delta || is_gemma4 || rope::KEYS.contains(&own) || experts::KEYS.contains(&own) {
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
    let rows = weights.shape("token_embd.weight")?.first().copied().unwrap_or(0);
    ensure!(
        number("vocab_size").is_none_or(|size| size as usize == rows),
        "{kind}.vocab_size is not the {rows} rows of token_embd.weight"
    );
    fields.insert("vocab_size".into(), json!(rows));
    let has = |name: &str| weights.names().any(|known| known == name);
    fields.insert("tie_word_embeddings".into(), json!(!has("output.weight")));
    if ["seed_oss", "chatglm", "glm4", "glm4moe", "gpt-oss"].contains(&kind.as_str()) {
        fields.insert("attention_bias".into(), json!(has("blk.0.attn_q.bias")));
    } else if has("blk.0.attn_output.bias") {
        fields.insert("attention_bias".into(), json!(true));
    }
    if weights.names().any(|name| name.starts_with("blk.") && name.ends_with(".ffn_up.bias")) {
        fields.insert("mlp_bias".into(), json!(true));
    }
    fields.entry("rope_theta").or_insert(json!(10_000.0));
    if let (Some(width), Some(heads)) = (number("embedding_length"), number("attention.head_count")) {
        fields.entry("head_dim").or_insert(json!(width / heads.max(1)));
    }
    layer_types(&mut fields);
    // What families call the same otherwise.
    for (kinds, was, is) in [
        (&["command-r", "cohere2"][..], "logits_scaling", "logit_scale"),
        (&["nemotron"], "layer_norm_eps", "norm_eps"),
        (&["starcoder2"], "layer_norm_eps", "norm_epsilon"),
        (&["starcoder2"], "mlp_bias", "use_bias"),
        (&["granitemoe"], "shared_expert_intermediate_size", "shared_intermediate_size"),
    ] {
        if kinds.contains(&kind.as_str())
            && let Some(value) = fields.remove(was)
        {
            fields.insert(is.to_owned(), value);
        }
    }
    if ["exaone4", experts::EXAONE, "mistral3"].contains(&kind.as_str()) {
        // A file without a window has none, unlike a config.
        fields.entry("sliding_window").or_insert(Value::Null);
    }
    if ["granite", "granitemoe"].contains(&kind.as_str()) {
        granite(kind, &mut fields)?;
    }
    rope::fields(kind, metadata, (weights, has_values), &mut fields)?;
    if delta_net::is_kind(kind) {
        delta_net::fields(kind, metadata, weights, &mut fields)?;
    }
    if kind == gemma4::KIND {
        gemma4::fields(metadata, weights, &mut fields)?;
    }
    if kind == llama4::KIND {
        llama4::fields(&mut fields)?;
    }
    match latent::is_kind(kind) {
        true => latent::fields(kind, metadata, weights, &mut fields)?,
        false => experts::fields(kind, metadata, weights, &mut fields)?,
    }
    let ends: Vec<u64> = ["eos_token_id", "eot_token_id", "eom_token_id"]
        .iter()
        .filter_map(|name| whole(metadata.get(&format!("tokenizer.ggml.{name}"))?))
        .collect();
    fields.insert("eos_token_id".into(), json!(ends));
    fields.extend(
        metadata.get("tokenizer.ggml.bos_token_id").and_then(plain).map(|id| ("bos_token_id".into(), id)),
    );
    if kind == "lfm2" {
        fields.insert("block_auto_adjust_ff_dim".into(), json!(false));
    }
    if kind.starts_with("lfm2") {
        lfm2(kind, &mut fields)?;
    }
    if mamba::KINDS.contains(&kind.as_str()) {
        mamba::fields(kind, metadata, weights, &mut fields)?;
    }
    if kind == "starcoder2" {
        fields.remove("attention_bias");
        fields.entry("use_bias").or_insert(json!(false));
    }
    if kind == "stablelm" {
        fields.insert("use_parallel_residual".into(), json!(!has("blk.0.ffn_norm.weight")));
        fields.insert("use_qkv_bias".into(), json!(has("blk.0.attn_q.bias")));
    }
    if ["gemma2", "gemma3"].contains(&kind.as_str()) {
        gemma(kind, &mut fields, &number)?;
    }
    let mut config = Config::with_unknown(unknown, fields, ignored)?;
    config.notes.extend(tokenizer::guess(metadata));
    // The norms of Gemma's files have the one in them.
    config.parts.norms_add_one = false;
    config.parts.has_rates = mamba::KINDS.contains(&kind.as_str());
    delta_net::configure(kind, weights, &mut config);
    if kind == mamba::NEMOTRON_MIXTURE {
        config.parts.draft_layers = experts::draft_layers(weights, config.num_hidden_layers);
    }
    if is_permuted {
        (config.parts.pairs, config.parts.permuted) = (RopePairs::Neighbors, true);
    }
    rope::read_factors(&mut config, (weights, has_values))?;
    // llama.cpp takes this key as a switch in files of Granite.
    if ["granite", "granitemoe"].contains(&kind.as_str())
        && own("rope.scaling.finetuned").and_then(plain) == Some(json!(false))
    {
        config.parts.rotary = vec![false; config.num_hidden_layers];
    }
    let dim = config.parts.full_heads.unwrap_or(config.heads()).dim;
    let turned = config.rotary_width();
    let value = config.parts.latent().is_none().then_some(("attention.value_length", dim));
    let is_turned = (0..config.num_hidden_layers).any(|layer| config.parts.is_rotary(layer));
    let rotary = is_turned.then_some(("rope.dimension_count", turned));
    for (key, width) in value.into_iter().chain(rotary) {
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
    Ok(())
}

/// What converters write into files of Granite 4 whose layers all have attention: keys of layers that are not there, and a number of key
/// heads for each layer.
fn granite(kind: &str, fields: &mut Map<String, Value>) -> Result<()> {
    if let Some(Value::Array(heads)) = fields.get("num_key_value_heads")
        && let Some(count) = one_of(kind, KEY_HEADS, heads.iter())?
    {
        fields.insert("num_key_value_heads".into(), count);
    }
    for name in ["conv_kernel", "ssm_inner_size", "mamba_num_heads", "n_groups", "ssm_state_size"] {
        fields.remove(name);
    }
    if !fields.contains_key("num_local_experts") {
        fields.remove("shared_expert_intermediate_size");
        fields.remove("shared_intermediate_size");
    }
    Ok(())
}

/// A whole number of the fields of a kind of model.
///
/// # Errors
/// If there is none.
fn number(kind: &str, fields: &Map<String, Value>, name: &str) -> Result<u64> {
    let number = fields.get(name).and_then(Value::as_u64);
    number.with_context(|| format!("there is no number for {name} of {kind}"))
}

/// The width of all heads of layers with states, which no `config.json` has, and that of one.
///
/// # Errors
/// If a number is missing, or the heads do not share the width.
fn state_widths(kind: &str, fields: &mut Map<String, Value>) -> Result<[u64; 2]> {
    let [inner, heads] = ["ssm_inner_size", "mamba_num_heads"].map(|name| number(kind, fields, name));
    let (inner, heads) = (inner?, heads?);
    ensure!(
        heads > 0 && inner.is_multiple_of(heads),
        "{kind}.ssm.time_step_rank {heads} does not divide {kind}.ssm.inner_size {inner}"
    );
    fields.remove("ssm_inner_size");
    Ok([inner, inner / heads])
}

/// What errors call the numbers of key heads.
const KEY_HEADS: &str = "numbers of key heads";

/// The number that layers of this kind have, which is said for each of them; `None` for an empty list.
///
/// # Errors
/// If some layers have another one.
fn one_of<'a>(kind: &str, what: &str, mut list: impl Iterator<Item = &'a Value>) -> Result<Option<Value>> {
    let Some(first) = list.next() else { return Ok(None) };
    ensure!(list.all(|other| other == first), "{kind}: layers have unlike {what}, which is not supported");
    Ok(Some(first.clone()))
}

/// The list of layers with a window, where it is written.
fn layer_types(fields: &mut Map<String, Value>) {
    let Some(list) = fields.get("sliding_window_pattern").and_then(Value::as_array) else { return };
    let kind = |sliding: &Value| {
        if *sliding == json!(true) || *sliding == json!(1) { "sliding_attention" } else { "full_attention" }
    };
    let types = list.iter().map(kind).collect();
    fields.remove("sliding_window_pattern");
    fields.insert("layer_types".into(), types);
}

/// What files of LFM2 say of layers: those without key heads are convolutions.
fn lfm2(kind: &str, fields: &mut Map<String, Value>) -> Result<()> {
    let heads = fields.get("num_key_value_heads").cloned().unwrap_or_default();
    let Value::Array(heads) = heads else { return Ok(()) };
    let count = one_of(kind, KEY_HEADS, heads.iter().filter(|count| **count != json!(0)))?;
    fields.insert("num_key_value_heads".into(), count.unwrap_or(json!(1)));
    let kind = |count: &Value| if *count == json!(0) { "conv" } else { "full_attention" };
    fields.insert("layer_types".into(), heads.iter().map(kind).collect());
    Ok(())
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
