//! GGUF files of all families against the Hub's files of the same models.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use candle_core::quantized::gguf_file::{self, Value as Stored};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use candle_lm::config::experts::StackLayout;
use candle_lm::config::mixers::MixerKind;
use candle_lm::config::parts::LatentWidths;
use candle_lm::config::{Config, ExpertStack, RopeScaling};
use candle_lm::files::Files;
use candle_shard::nn::Scores;
use serde_json::{Value, json};
use test_utils::on_ranks;

use crate::lm::facts::weight;
use crate::lm::families::{Families, Family, families, greedy, logits, stored};
use crate::lm::ropes::{Ropes, after, ropes};

/// Names in GGUF files, and on the Hub.
const MODULES: [(&str, &str); 69] = [
    ("token_embd", "model.embed_tokens"),
    ("per_layer_token_embd", "model.embed_tokens_per_layer"),
    ("per_layer_model_proj", "model.per_layer_model_projection"),
    ("per_layer_proj_norm", "model.per_layer_projection_norm"),
    ("inp_gate", "per_layer_input_gate"),
    ("proj", "per_layer_projection"),
    ("post_norm", "post_per_layer_input_norm"),
    ("output_norm", "model.norm"),
    ("output", "lm_head"),
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_qkv", "self_attn.qkv_proj"),
    ("attn_q_a", "self_attn.q_a_proj"),
    ("attn_q_a_norm", "self_attn.q_a_layernorm"),
    ("attn_q_b", "self_attn.q_b_proj"),
    ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
    ("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
    ("attn_kv_b", "self_attn.kv_b_proj"),
    ("attn_k_b", "self_attn.k_b_proj"),
    ("attn_v_b", "self_attn.v_b_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_sinks", "self_attn.sinks"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("attn_q_norm", "self_attn.query_layernorm"),
    ("attn_k_norm", "self_attn.key_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_up", "mlp.gate_up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("ffn_gate_inp", "mlp.router"),
    ("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_experts.up_proj"),
    ("ffn_down_shexp", "mlp.shared_experts.down_proj"),
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
    ("ffn_gate_shexp", "mlp.shared_mlp.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_mlp.up_proj"),
    ("ffn_down_shexp", "mlp.shared_mlp.down_proj"),
    ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
    ("ffn_latent_down", "mlp.fc1_latent_proj"),
    ("ffn_latent_up", "mlp.fc2_latent_proj"),
    ("ffn_gate_exps", "mlp.experts.gate_proj"),
    ("ffn_up_exps", "mlp.experts.up_proj"),
    ("ffn_down_exps", "mlp.experts.down_proj"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
    ("post_attention_norm", "post_self_attn_layernorm"),
    ("post_ffw_norm", "post_mlp_layernorm"),
    ("shortconv.in_proj", "conv.in_proj"),
    ("shortconv.conv", "conv.conv"),
    ("shortconv.out_proj", "conv.out_proj"),
    ("ssm_in", "mamba.in_proj"),
    ("ssm_conv1d", "mamba.conv1d"),
    ("ssm_norm", "mamba.norm"),
    ("ssm_out", "mamba.out_proj"),
    ("attn_qkv", "linear_attn.in_proj_qkv"),
    ("attn_gate", "linear_attn.in_proj_z"),
    ("ssm_beta", "linear_attn.in_proj_b"),
    ("ssm_alpha", "linear_attn.in_proj_a"),
    ("ssm_ba", "linear_attn.in_proj_ba"),
    ("ssm_conv1d", "linear_attn.conv1d"),
    ("ssm_norm", "linear_attn.norm"),
    ("ssm_out", "linear_attn.out_proj"),
    ("post_ffw_norm_1", "post_feedforward_layernorm_1"),
    ("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
    ("post_ffw_norm_2", "post_feedforward_layernorm_2"),
];

/// The kinds with layers of the gated delta rule.
const DELTA: [&str; 3] = ["qwen35", "qwen35moe", "qwen3next"];

fn named(name: &str, has_four: bool, kind: &str) -> String {
    if let Some(layer) = name.strip_suffix(".layer_scalar") {
        return format!("{}.layer_output_scale.weight", layer.replace("model.layers", "blk"));
    }
    let (module, parameter) = name.rsplit_once('.').unwrap();
    // A vector of a module that has no other tensor, and the bias of logits.
    let (module, parameter) = if parameter == "sinks" { (name, "weight") } else { (module, parameter) };
    let is_logit_bias = parameter == "logit_bias";
    let parameter = if is_logit_bias { "bias" } else { parameter };
    let layer = module.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
    let inner = layer.map_or(module, |(_, inner)| inner);
    if inner == "linear_attn.in_proj_qkvz" {
        return format!("blk.{}.ssm_in.{parameter}", layer.unwrap().0);
    }
    // What layers with states have beside modules.
    if let (Some((layer, "mamba" | "linear_attn")), Some((_, gguf))) = (
        layer,
        [("A_log", "a"), ("D", "d"), ("dt_bias", "dt.bias")].into_iter().find(|(own, _)| *own == parameter),
    ) {
        return format!("blk.{layer}.ssm_{gguf}");
    }
    if let (Some((layer, _)), Some((_, gguf))) = (
        layer,
        [("mlp.router.scale", "ffn_gate_inp.scale"), ("mlp.router.per_expert_scale", "ffn_down_exps.scale")]
            .into_iter()
            .find(|(own, _)| name.ends_with(&format!(".{own}"))),
    ) {
        return format!("blk.{layer}.{gguf}");
    }
    let gguf = match inner {
        "model.norm" if kind.starts_with("lfm2") => "token_embd_norm",
        "pre_feedforward_layernorm" => "ffn_norm",
        "norm" => "attn_norm",
        "mlp.router" if parameter == "bias" && !is_logit_bias => "exp_probs_b",
        "post_attention_layernorm"
            if has_four
                || DELTA.contains(&kind)
                || ["olmo2", "exaone4", "seed_oss", "glm4moe", "gpt-oss"].contains(&kind) =>
        {
            "post_attention_norm"
        }
        "post_attention_layernorm" => "ffn_norm",
        _ => MODULES.iter().find(|(_, hub)| *hub == inner).unwrap_or_else(|| panic!("{name}")).0,
    };
    if let (Some((layer, _)), "falcon-h1", "ffn_norm") = (layer, kind, gguf) {
        return format!("blk.{layer}.ffn_norm");
    }
    layer.map_or(format!("{gguf}.{parameter}"), |(layer, _)| format!("blk.{layer}.{gguf}.{parameter}"))
}

/// Rows of heads in the order of llama.cpp's converter: pairs that are turned together become neighbors.
fn permuted(tensor: &Tensor, heads: usize) -> Tensor {
    let mut dims = tensor.dims().to_vec();
    let rows = dims.remove(0);
    let shape = [&[heads, 2, rows / heads / 2][..], &dims].concat();
    tensor.reshape(shape).unwrap().transpose(1, 2).unwrap().reshape(tensor.shape()).unwrap()
}

/// The tensors of a model, with experts stacked as a converter does.
fn converted(config: &Config) -> HashMap<String, Tensor> {
    let mut tensors = stored(config);
    // What files of the Hub have in one under other names, of which a converter leaves that of Mamba 2 in one.
    for (name, parts) in config.fused() {
        let stored_name = config.stored_name(&name);
        if stored_name == name {
            continue;
        }
        let whole = tensors.remove(&stored_name).unwrap();
        if name.contains(".mamba.") {
            tensors.insert(name, whole);
            continue;
        }
        let mut start = 0;
        for (part, rows) in parts {
            let rows_of = whole.narrow(0, start, rows).unwrap();
            tensors.insert(part, rows_of.force_contiguous().unwrap());
            start += rows;
        }
    }
    for stack in config.stacks() {
        let ExpertStack { name, parts, layout, .. } = &stack;
        let mut whole = tensors.remove(name).unwrap();
        if stack.is_transposed() {
            whole = whole.transpose(1, 2).unwrap().contiguous().unwrap();
        }
        let rows = whole.dims()[1] / parts.len();
        for (at, part) in (0u32..).zip(parts) {
            let rows: Vec<u32> = match layout {
                StackLayout::Interleaved => {
                    (0..rows as u32).map(|row| row * parts.len() as u32 + at).collect()
                }
                StackLayout::Rows | StackLayout::Columns => {
                    (at * rows as u32..(at + 1) * rows as u32).collect()
                }
            };
            let rows = whole.index_select(&Tensor::new(rows, &Device::Cpu).unwrap(), 1).unwrap();
            let name = part.strip_suffix("_bias").map(|module| format!("{module}.bias"));
            tensors.insert(name.unwrap_or_else(|| format!("{part}.weight")), rows);
        }
    }
    for (name, _) in config.tensors() {
        if let Some(parts) = config.unstacked(&name) {
            let parts: Vec<Tensor> = parts.iter().map(|part| tensors.remove(part).unwrap()).collect();
            tensors.insert(format!("{name}.weight"), Tensor::stack(&parts, 0).unwrap());
        } else if let Some(router) = tensors.remove(&config.stored_name(&name)) {
            tensors.insert(name, router);
        }
    }
    tensors
}

/// The keys, turned around, and the values of all heads, which newer converters write apart.
fn apart(config: &Config, tensors: &mut HashMap<String, Tensor>) {
    let Some(LatentWidths { rank, own, value, .. }) = config.parts.latent() else { return };
    for layer in 0..config.num_hidden_layers {
        let name = |part: &str| format!("model.layers.{layer}.self_attn.{part}.weight");
        let both = tensors.remove(&name("kv_b_proj")).unwrap();
        let both = both.reshape((config.num_attention_heads, own + value, rank)).unwrap();
        let [keys, values] = [(0, own), (own, value)].map(|(first, len)| both.narrow(1, first, len).unwrap());
        tensors.insert(name("k_b_proj"), keys.transpose(1, 2).unwrap());
        tensors.insert(name("v_b_proj"), values);
    }
}

/// The tensors of layers with the gated delta rule: projections by themselves, but in `old` files, and with value heads in turns but in
/// files of Qwen 3 Next.
fn delta(config: &Config, kind: &str, old: bool, tensors: &mut HashMap<String, Tensor>) {
    for layer in 0..config.num_hidden_layers {
        let MixerKind::DeltaNet(heads) = config.parts.mixer(layer) else { continue };
        let name = |part: &str| format!("model.layers.{layer}.linear_attn.{part}");
        let ([keys, _], values) = (heads.channels(), heads.values());
        if heads.by_key_head && old {
            continue;
        }
        if heads.by_key_head {
            let whole = tensors.remove(&name("in_proj_qkvz.weight")).unwrap();
            let all = values * heads.value_dim;
            let by_head = whole.reshape((heads.key, 2 * heads.key_dim + 2 * all, ())).unwrap();
            let part = |first: usize, rows: usize| {
                by_head.narrow(1, first, rows).unwrap().contiguous().unwrap().flatten(0, 1).unwrap()
            };
            let [q, k] = [part(0, heads.key_dim), part(heads.key_dim, heads.key_dim)];
            let [v, z] = [part(2 * heads.key_dim, all), part(2 * heads.key_dim + all, all)];
            tensors.insert(name("in_proj_qkv.weight"), Tensor::cat(&[q, k, v], 0).unwrap());
            tensors.insert(name("in_proj_z.weight"), z);
            continue;
        }
        let tiled = |x: &Tensor, dim: usize, width: usize| {
            let mut shape = x.dims().to_vec();
            shape.splice(dim..=dim, [heads.key, values, width]);
            let turned = x.reshape(shape).unwrap().transpose(dim, dim + 1).unwrap().contiguous().unwrap();
            turned.reshape(x.shape()).unwrap()
        };
        for (part, dim, first, width) in [
            ("in_proj_qkv.weight", 0, 2 * keys, heads.value_dim),
            ("conv1d.weight", 0, 2 * keys, heads.value_dim),
            ("in_proj_z.weight", 0, 0, heads.value_dim),
            ("in_proj_b.weight", 0, 0, 1),
            ("in_proj_a.weight", 0, 0, 1),
            ("A_log", 0, 0, 1),
            ("dt_bias", 0, 0, 1),
            ("out_proj.weight", 1, 0, heads.value_dim),
        ] {
            let whole = tensors.remove(&name(part)).unwrap();
            let len = whole.dims()[dim] - first;
            let turned = tiled(&whole.narrow(dim, first, len).unwrap().contiguous().unwrap(), dim, width);
            let parts = [whole.narrow(dim, 0, first).unwrap(), turned];
            let whole = if first == 0 { parts[1].clone() } else { Tensor::cat(&parts, dim).unwrap() };
            tensors.insert(name(part), whole);
        }
    }
    assert!(kind != "qwen3next" || tensors.keys().all(|name| !name.ends_with("in_proj_b.weight")));
}

/// Multiplies the weights of Falcon by the factors of what they make, as a converter does.
fn with_factors(fields: &Value, config: &Config, tensors: &mut HashMap<String, Tensor>) {
    let factor = |name: &str| fields[format!("{name}_multiplier")].as_f64().unwrap();
    let of_list = |name: &str, at: usize| fields[format!("{name}_multipliers")][at].as_f64().unwrap();
    let heads = config.parts.mixer(0).mamba().unwrap();
    let rows = heads.inputs().into_iter().enumerate();
    let rows: Vec<f32> = rows.flat_map(|(at, (_, rows))| vec![of_list("ssm", at) as f32; rows]).collect();
    let rows = Tensor::new(rows, &Device::Cpu).unwrap().unsqueeze(1).unwrap();
    for (name, tensor) in tensors.iter_mut() {
        let all = match () {
            () if name.contains("mlp.down_proj") => of_list("mlp", 1),
            () if name.contains("mlp.gate_proj") => of_list("mlp", 0),
            () if name.contains("k_proj") => factor("key") * factor("attention_in"),
            () if name.contains("q_proj") || name.contains("v_proj") => factor("attention_in"),
            () if name.contains("o_proj") => factor("attention_out"),
            () if name.contains("mamba.out_proj") => factor("ssm_out"),
            () if name.contains("mamba.in_proj") => {
                *tensor = tensor.broadcast_mul(&rows).unwrap();
                factor("ssm_in")
            }
            () if name == "lm_head.weight" => factor("lm_head"),
            () if name == "model.embed_tokens.weight" => factor("embedding"),
            () => 1.0,
        };
        *tensor = (&*tensor * all).unwrap();
    }
}

/// Writes the model of a config as a converter does; matrices whose rows are whole blocks become `dtype`.
pub(crate) fn write(path: &Path, fields: &Value, dtype: GgmlDType) {
    write_as(path, fields, dtype, false);
}

/// Writes the model of a config as a converter does, or as an `old` one did.
fn write_as(path: &Path, fields: &Value, dtype: GgmlDType, old: bool) {
    let config = Config::parse(&fields.to_string()).unwrap();
    let model_type = fields["model_type"].as_str().unwrap();
    let kind = match model_type {
        "mistral" | "mixtral" => "llama",
        "gemma3_text" => "gemma3",
        "gemma4_text" => "gemma4",
        "qwen2_moe" => "qwen2moe",
        "qwen3_moe" => "qwen3moe",
        "glm4_moe" => "glm4moe",
        "minimax_m2" => "minimax-m2",
        "gpt_oss" => "gpt-oss",
        "granitemoeshared" => "granitemoe",
        "lfm2_moe" => "lfm2moe",
        "llama4_text" => "llama4",
        "olmo3" => "olmo2",
        "hunyuan_v1_dense" => "hunyuan-dense",
        "hunyuan_v1_moe" => "hunyuan-moe",
        "glm" => "chatglm",
        "ministral3" => "mistral3",
        "cohere" => "command-r",
        "deepseek_v3" | "deepseek_v2" | "glm4_moe_lite" => "deepseek2",
        "granitemoehybrid" => "granitehybrid",
        "qwen3_5_text" => "qwen35",
        "qwen3_5_moe_text" => "qwen35moe",
        "qwen3_next" => "qwen3next",
        "ernie4_5_moe" => "ernie4_5-moe",
        "exaone_moe" => "exaone-moe",
        "falcon_h1" => "falcon-h1",
        "nemotron_h" if config.parts.experts.is_some() => "nemotron_h_moe",
        other => other,
    };
    let (is_gemma, is_permuted) = (
        ["gemma2", "gemma3", "gemma4"].contains(&kind),
        ["llama", "smollm3", "granite", "granitemoe", "granitehybrid", "mistral3", "arcee"].contains(&kind)
            || kind.starts_with("nemotron_h"),
    );
    let heads = config.heads();
    let mut tensors: HashMap<String, QTensor> = HashMap::new();
    let mut all = converted(&config);
    if !old {
        apart(&config, &mut all);
    }
    delta(&config, kind, old, &mut all);
    if kind == "falcon-h1" {
        with_factors(fields, &config, &mut all);
    }
    for (name, tensor) in all {
        let tensor = match &name {
            name if config.parts.norms_add_one
                && name.ends_with("norm.weight")
                && !name.contains("linear_attn") =>
            {
                (tensor + 1.0).unwrap()
            }
            name if name.contains("conv.conv") || name.ends_with(".conv1d.weight") => {
                tensor.squeeze(1).unwrap()
            }
            name if name.ends_with(".linear_attn.A_log") => tensor.exp().unwrap().neg().unwrap(),
            name if name.ends_with(".A_log") => tensor.exp().unwrap().neg().unwrap().unsqueeze(1).unwrap(),
            name if name.ends_with(".mamba.D") => tensor.unsqueeze(1).unwrap(),
            name if name.ends_with(".mamba.norm.weight") => by_groups(&config, &tensor),
            // A converter leaves out dims of 1.
            name if name.contains("shared_expert_gate") || name.ends_with(".mlp.router.bias") => {
                tensor.flatten_all().unwrap()
            }
            name if is_permuted && name.contains("q_proj") => permuted(&tensor, heads.query),
            name if is_permuted && name.contains("k_proj") => permuted(&tensor, heads.key_value),
            _ => tensor,
        };
        let is_float = [".conv1d.weight", ".mamba.norm.weight"].iter().any(|end| name.ends_with(end));
        let in_blocks = !is_float
            && tensor.rank() > 1
            && tensor.dims()[tensor.rank() - 1].is_multiple_of(dtype.block_size());
        let dtype = if in_blocks { dtype } else { GgmlDType::F32 };
        tensors.insert(
            named(&name, is_gemma, kind),
            QTensor::quantize(&tensor.contiguous().unwrap(), dtype).unwrap(),
        );
    }
    let size = |field: &str| Stored::U32(fields[field].as_u64().unwrap() as u32);
    let mut metadata = vec![
        ("block_count", Stored::U32(config.num_hidden_layers as u32)),
        ("embedding_length", size("hidden_size")),
        ("feed_forward_length", Stored::U32(config.intermediate_size as u32)),
        ("context_length", size("max_position_embeddings")),
        ("attention.head_count", Stored::U32(config.num_attention_heads as u32)),
        ("attention.head_count_kv", Stored::U32(heads.key_value as u32)),
        ("attention.key_length", Stored::U32(heads.dim as u32)),
        ("attention.value_length", Stored::U32(heads.dim as u32)),
        (
            if ["command-r", "cohere2", "nemotron", "stablelm", "starcoder2"].contains(&kind) {
                "attention.layer_norm_epsilon"
            } else {
                "attention.layer_norm_rms_epsilon"
            },
            Stored::F32(config.rms_norm_eps as f32),
        ),
        ("rope.dimension_count", Stored::U32((heads.dim as f64 * config.parts.rotary_share) as u32)),
        ("rope.freq_base", Stored::F32(config.rope_theta as f32)),
    ];
    if let Some(widths) = config.parts.latent() {
        latent(widths, fields, &mut metadata, old);
    }
    rope(&config, &mut metadata, &mut tensors);
    if kind == "gemma4" {
        gemma4(&config, &mut metadata, &mut tensors);
    }
    if let Some(experts) = &config.parts.experts {
        metadata.push(("expert_count", Stored::U32(experts.count as u32)));
        metadata.push(("expert_used_count", Stored::U32(experts.chosen as u32)));
        if ["glm4moe", "minimax-m2"].contains(&kind) {
            metadata.push(("expert_gating_func", Stored::U32(2)));
            metadata.push(("expert_feed_forward_length", Stored::U32(experts.hidden as u32)));
        }
        if ["deepseek2", "mistral4"].contains(&kind) {
            let is_sigmoid = experts.scores == Scores::Sigmoid;
            // Files of DeepSeek 2 did not say it.
            metadata.extend(is_sigmoid.then_some(("expert_gating_func", Stored::U32(2))));
            let dense = (0..config.num_hidden_layers).take_while(|&layer| !experts.are_in(layer)).count();
            metadata.extend([
                ("leading_dense_block_count", Stored::U32(dense as u32)),
                ("expert_feed_forward_length", Stored::U32(experts.hidden as u32)),
                ("expert_shared_count", size("n_shared_experts")),
                ("expert_weights_scale", Stored::F32(experts.scale as f32)),
                ("expert_weights_norm", Stored::Bool(experts.normalize)),
            ]);
            metadata.extend(experts.groups.iter().flat_map(|groups| {
                [
                    ("expert_group_count", Stored::U32(groups.count as u32)),
                    ("expert_group_used_count", Stored::U32(groups.chosen as u32)),
                ]
            }));
        }
        if kind == "glm4moe" {
            // One more layer than the model has, which predicts further tokens.
            metadata[0] = ("block_count", Stored::U32(config.num_hidden_layers as u32 + 1));
            let table = QTensor::quantize(&weight("eh_proj", &[4, 8]), GgmlDType::F32).unwrap();
            tensors.insert(format!("blk.{}.nextn.eh_proj.weight", config.num_hidden_layers), table);
            metadata.push(("nextn_predict_layers", Stored::U32(1)));
            metadata.push(("leading_dense_block_count", size("first_k_dense_replace")));
            metadata.push(("expert_shared_count", size("n_shared_experts")));
            metadata.push(("expert_weights_scale", Stored::F32(experts.scale as f32)));
            metadata.push(("expert_weights_norm", Stored::Bool(experts.normalize)));
            metadata.push(("expert_group_count", size("n_group")));
            metadata.push(("expert_group_used_count", size("topk_group")));
        }
        if kind == "exaone-moe" {
            let dense = (0..config.num_hidden_layers).take_while(|&layer| !experts.are_in(layer)).count();
            metadata.extend([
                ("expert_feed_forward_length", Stored::U32(experts.hidden as u32)),
                ("expert_shared_count", size("num_shared_experts")),
                ("expert_shared_feed_forward_length", Stored::U32(experts.shared as u32)),
                ("expert_weights_scale", Stored::F32(experts.scale as f32)),
                ("expert_weights_norm", Stored::Bool(experts.normalize)),
                ("expert_group_count", size("n_group")),
                ("expert_group_used_count", size("topk_group")),
                ("leading_dense_block_count", Stored::U32(dense as u32)),
                ("nextn_predict_layers", Stored::U32(0)),
            ]);
        }
        if kind == "lfm2moe" {
            metadata.push(("expert_gating_func", Stored::U32(2)));
            metadata.push(("expert_feed_forward_length", Stored::U32(experts.hidden as u32)));
            metadata.push(("leading_dense_block_count", size("num_dense_layers")));
        }
        if experts.shared > 0 && kind == "granitemoe" {
            metadata.push(("expert_shared_feed_forward_length", Stored::U32(experts.shared as u32)));
        }
        if kind == "hunyuan-moe" {
            metadata.push(("expert_shared_count", Stored::U32(1)));
            metadata.push(("expert_shared_feed_forward_length", Stored::U32(experts.shared as u32)));
        }
        if kind == "ernie4_5-moe" {
            metadata.extend([
                ("leading_dense_block_count", size("moe_layer_start_index")),
                ("interleave_moe_layer_step", size("moe_layer_interval")),
                ("expert_feed_forward_length", Stored::U32(experts.hidden as u32)),
                ("expert_shared_count", size("moe_num_shared_experts")),
            ]);
            let shared = Stored::U32(experts.shared as u32);
            metadata.extend((experts.shared > 0).then_some(("expert_shared_feed_forward_length", shared)));
        }
        if kind == "llama4" {
            metadata.push(("interleave_moe_layer_step", size("interleave_moe_layer_step")));
        }
        if ["gpt-oss", "llama4", "hunyuan-moe"].contains(&kind) {
            metadata.push(("expert_feed_forward_length", Stored::U32(experts.hidden as u32)));
        }
        if kind == "qwen2moe" {
            metadata.push(("expert_feed_forward_length", Stored::U32(experts.hidden as u32)));
            metadata.push(("expert_shared_feed_forward_length", Stored::U32(experts.shared as u32)));
        }
        if DELTA.contains(&kind) {
            metadata.push(("expert_feed_forward_length", Stored::U32(experts.hidden as u32)));
            metadata.push(("expert_shared_feed_forward_length", Stored::U32(experts.shared as u32)));
        }
        if kind == "gemma4" {
            metadata.push(("expert_feed_forward_length", Stored::U32(experts.hidden as u32)));
        }
        if kind == "qwen3moe" {
            metadata.push(("expert_feed_forward_length", Stored::U32(experts.hidden as u32)));
            // Without the key all readers divide by the sum.
            metadata.extend((!experts.normalize).then_some(("expert_weights_norm", Stored::Bool(false))));
        }
    }
    if kind.starts_with("lfm2") {
        metadata.push(("shortconv.l_cache", size("conv_L_cache")));
        let of_keys = heads.key_value as i32;
        let heads = |kind: &Value| Stored::I32(if kind == "conv" { 0 } else { of_keys });
        let heads = fields["layer_types"].as_array().unwrap().iter().map(heads).collect();
        metadata.retain(|(key, _)| *key != "attention.head_count_kv");
        metadata.push(("attention.head_count_kv", Stored::Array(heads)));
    }
    if is_gemma || fields["layer_types"].to_string().contains("sliding") {
        metadata.push(("attention.sliding_window", size("sliding_window")));
        let list = fields["layer_types"]
            .as_array()
            .unwrap()
            .iter()
            .map(|kind| Stored::Bool(kind == "sliding_attention"));
        // llama.cpp knows the pattern of gpt-oss.
        metadata.extend(
            (kind != "gpt-oss").then(|| ("attention.sliding_window_pattern", Stored::Array(list.collect()))),
        );
        for (key, field) in [
            ("attn_logit_softcapping", "attn_logit_softcapping"),
            ("final_logit_softcapping", "final_logit_softcapping"),
        ] {
            metadata.extend(fields[field].as_f64().map(|cap| (key, Stored::F32(cap as f32))));
        }
    }
    if kind == "gemma3" {
        metadata.push(("rope.scaling.type", Stored::String("linear".into())));
        metadata.push(("rope.scaling.factor", Stored::F32(8.0)));
        metadata.push(("rope.freq_base_swa", Stored::F32(10_000.0)));
    }
    if kind.starts_with("hunyuan") {
        metadata.push(("rope.scaling.type", Stored::String("none".into())));
        metadata.push(("rope.scaling.factor", Stored::F32(1.0)));
        metadata.push(("rope.scaling.original_context_length", Stored::U32(1 << 18)));
    }
    metadata.extend(fields["logit_scale"].as_f64().map(|scale| ("logit_scale", Stored::F32(scale as f32))));
    if kind == "mistral4" && config.parts.temperature.is_some() {
        metadata.push(("attention.temperature_scale", Stored::F32(0.5)));
    }
    if kind == "mistral3" {
        metadata.push(("rope.scaling.yarn_log_multiplier", Stored::F32(1.0)));
        metadata.push(("attention.temperature_scale", Stored::F32(0.5)));
    }
    if model_type == "olmo3" {
        // What llama.cpp computes by itself.
        metadata.push(("rope.scaling.yarn_attn_factor", Stored::F32(0.1 * 4f32.ln() + 1.0)));
    }
    states(kind, &config, &mut metadata);
    if kind == "nemotron_h_moe" {
        nemotron(&config, &mut metadata, &mut tensors);
    }
    if DELTA.contains(&kind) {
        delta_states(kind, &config, &mut metadata);
        // One more layer than the model has, which predicts further tokens.
        metadata[0] = ("block_count", Stored::U32(config.num_hidden_layers as u32 + 1));
        metadata.push(("nextn_predict_layers", Stored::U32(1)));
        for name in ["nextn.eh_proj", "attn_q", "post_attention_norm"] {
            let table = QTensor::quantize(&weight(name, &[4, 8]), GgmlDType::F32).unwrap();
            tensors.insert(format!("blk.{}.{name}.weight", config.num_hidden_layers), table);
        }
    }
    if kind.starts_with("granite") {
        let names = [
            ("attention.scale", "attention_multiplier"),
            ("embedding_scale", "embedding_multiplier"),
            ("residual_scale", "residual_multiplier"),
            ("logit_scale", "logits_scaling"),
        ];
        metadata.extend(names.map(|(key, field)| (key, Stored::F32(fields[field].as_f64().unwrap() as f32))));
    }
    let mut all = vec![("general.architecture".to_owned(), Stored::String(kind.into()))];
    all.extend(metadata.into_iter().map(|(key, value)| (format!("{kind}.{key}"), value)));
    let tensors: Vec<(&str, &QTensor)> =
        tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let all: Vec<(&str, &Stored)> = all.iter().map(|(key, value)| (key.as_str(), value)).collect();
    gguf_file::write(&mut fs::File::create(path).unwrap(), &all, &tensors).unwrap();
}

/// The weights of the norms of groups in a matrix.
fn by_groups(config: &Config, tensor: &Tensor) -> Tensor {
    let groups = config.parts.mixers.iter().find_map(|mixer| mixer.mamba()).map(|heads| heads.groups);
    tensor.reshape((groups.unwrap(), ())).unwrap()
}

/// What a converter writes of layers of Mamba 2.
fn states(kind: &str, config: &Config, metadata: &mut Vec<(&str, Stored)>) {
    let Some(heads) = config.parts.mixers.iter().find_map(|mixer| mixer.mamba()) else { return };
    let number = |n: usize| Stored::U32(n as u32);
    metadata.extend([
        ("ssm.conv_kernel", number(heads.taps)),
        ("ssm.state_size", number(heads.state)),
        ("ssm.group_count", number(heads.groups)),
        ("ssm.inner_size", number(heads.inner())),
        ("ssm.time_step_rank", number(heads.count)),
    ]);
    if kind == "mamba2" {
        let absent = ["attention.head_count_kv", "attention.key_length", "attention.value_length"];
        let is_there = |key: &str| !absent.contains(&key) && !key.starts_with("rope.");
        metadata.retain(|(key, _)| is_there(key));
        for (key, value) in metadata.iter_mut() {
            if ["attention.head_count", "feed_forward_length"].contains(key) {
                *value = number(0);
            }
        }
        return;
    }
    if kind == "falcon-h1" {
        return;
    }
    let of_layers = |of: &dyn Fn(MixerKind) -> usize| {
        Stored::Array(config.parts.mixers.iter().map(|mixer| Stored::I32(of(*mixer) as i32)).collect())
    };
    let keys = of_layers(&|mixer| if mixer == MixerKind::Attention { config.heads().key_value } else { 0 });
    let inner = of_layers(&|mixer| if mixer == MixerKind::None { config.intermediate_size } else { 0 });
    metadata.retain(|(key, _)| *key != "attention.head_count_kv");
    metadata.push(("attention.head_count_kv", keys));
    if kind.starts_with("nemotron_h") {
        metadata.retain(|(key, _)| *key != "feed_forward_length");
        metadata.push(("feed_forward_length", inner));
        metadata.push(("attention.layer_norm_epsilon", Stored::F32(config.rms_norm_eps as f32)));
    } else {
        let shared = config.parts.experts.as_ref().map_or(config.intermediate_size, |experts| experts.shared);
        metadata.push(("rope.scaling.finetuned", Stored::Bool(config.parts.is_rotary(0))));
        metadata.push(("expert_shared_feed_forward_length", number(shared)));
    }
}

/// What a converter writes of experts of NVIDIA's hybrids, and one more layer than the model has, which predicts further tokens.
fn nemotron(config: &Config, metadata: &mut Vec<(&str, Stored)>, tensors: &mut HashMap<String, QTensor>) {
    let experts = config.parts.experts.as_ref().unwrap();
    let number = |n: usize| Stored::U32(n as u32);
    metadata.extend([
        ("expert_feed_forward_length", number(experts.hidden)),
        ("expert_shared_feed_forward_length", number(experts.shared)),
        ("expert_shared_count", number(1)),
        ("expert_weights_norm", Stored::Bool(experts.normalize)),
        ("expert_weights_scale", Stored::F32(experts.scale as f32)),
        ("expert_group_count", number(experts.groups.map_or(1, |groups| groups.count))),
        ("nextn_predict_layers", number(1)),
    ]);
    metadata.extend(experts.groups.map(|groups| ("expert_group_used_count", number(groups.chosen))));
    metadata.extend(experts.latent.map(|width| ("moe_latent_size", number(width))));
    let inner = |layer: usize| match (config.parts.mixer(layer), experts.are_in(layer)) {
        (MixerKind::None, true) => experts.hidden,
        (MixerKind::None, false) => config.intermediate_size,
        _ => 0,
    };
    let keys = |layer: usize| match config.parts.mixer(layer) {
        MixerKind::Attention => config.heads().key_value,
        _ => 0,
    };
    let layers = 0..config.num_hidden_layers;
    let list = |of: Vec<usize>| Stored::Array(of.into_iter().map(|n| Stored::I32(n as i32)).collect());
    let own = ["block_count", "attention.head_count_kv", "feed_forward_length"];
    metadata.retain(|(key, _)| !own.contains(key));
    metadata.push(("block_count", number(layers.len() + 1)));
    let of_draft = |of: usize| std::iter::once(of);
    let keys = layers.clone().map(keys).chain(of_draft(config.heads().key_value)).collect();
    metadata.push(("attention.head_count_kv", list(keys)));
    let inner = layers.clone().map(inner).chain(of_draft(experts.hidden)).collect();
    metadata.push(("feed_forward_length", list(inner)));
    for name in ["nextn.eh_proj", "attn_q", "ffn_gate_inp"] {
        let table = QTensor::quantize(&weight(name, &[4, 8]), GgmlDType::F32).unwrap();
        tensors.insert(format!("blk.{}.{name}.weight", layers.end), table);
    }
}

/// What a converter writes of two widths of heads.
fn gemma4(config: &Config, metadata: &mut Vec<(&str, Stored)>, tensors: &mut HashMap<String, QTensor>) {
    let (full, local) = (config.parts.full_heads.unwrap(), config.heads());
    let sharing: Vec<usize> =
        (0..config.num_hidden_layers).filter(|&layer| config.parts.key_source(layer).is_some()).collect();
    // Files have the keys that a layer does not use.
    for layer in &sharing {
        for name in ["attn_k", "attn_k_norm"] {
            let unused = QTensor::quantize(&weight(name, &[4, 8]), GgmlDType::F32).unwrap();
            tensors.insert(format!("blk.{layer}.{name}.weight"), unused);
        }
    }
    let replaced = [
        "attention.key_length",
        "attention.value_length",
        "attention.head_count_kv",
        "rope.dimension_count",
        "feed_forward_length",
    ];
    metadata.retain(|(key, _)| !replaced.contains(key));
    for (key, dim) in [
        ("attention.key_length", full.dim),
        ("attention.value_length", full.dim),
        ("rope.dimension_count", full.dim),
        ("attention.key_length_swa", local.dim),
        ("attention.value_length_swa", local.dim),
        ("rope.dimension_count_swa", local.dim),
        ("attention.shared_kv_layers", sharing.len()),
        ("embedding_length_per_layer_input", config.parts.layer_embeddings.map_or(0, |sizes| sizes.width)),
    ] {
        metadata.push((key, Stored::U32(dim as u32)));
    }
    let heads =
        (0..config.num_hidden_layers).map(|layer| Stored::I32(config.heads_of(layer).key_value as i32));
    metadata.push(("attention.head_count_kv", Stored::Array(heads.collect())));
    let widths = (0..config.num_hidden_layers).map(|layer| Stored::I32(config.inner_of(layer) as i32));
    metadata.push(("feed_forward_length", Stored::Array(widths.collect())));
    metadata.push(("rope.freq_base_swa", Stored::F32(config.parts.local_rope.as_ref().unwrap().0 as f32)));
}

/// What a converter writes of layers with the gated delta rule.
fn delta_states(kind: &str, config: &Config, metadata: &mut Vec<(&str, Stored)>) {
    let number = |n: usize| Stored::U32(n as u32);
    let heads = config.parts.mixers.iter().find_map(|mixer| match mixer {
        MixerKind::DeltaNet(heads) => Some(*heads),
        _ => None,
    });
    let heads = heads.unwrap();
    let interval = config.parts.mixers.iter().position(|mixer| *mixer == MixerKind::Attention).unwrap() + 1;
    metadata.extend([
        ("ssm.conv_kernel", number(heads.taps)),
        ("ssm.state_size", number(heads.key_dim)),
        ("ssm.group_count", number(heads.key)),
        ("ssm.inner_size", number(heads.value * heads.value_dim)),
        ("ssm.time_step_rank", number(heads.value)),
        ("full_attention_interval", number(interval)),
    ]);
    let sections = [1, 1, 0, 0].map(Stored::I32).to_vec();
    metadata.extend((kind != "qwen3next").then_some(("rope.dimension_sections", Stored::Array(sections))));
}

/// What a converter writes of latent attention.
fn latent(widths: LatentWidths, fields: &Value, metadata: &mut Vec<(&str, Stored)>, old: bool) {
    let LatentWidths { query, rank, own, rotary, value } = widths;
    let number = |n: usize| Stored::U32(n as u32);
    let replaced = ["attention.key_length", "attention.value_length", "rope.dimension_count"];
    metadata.retain(|(key, _)| !replaced.contains(key) && (old || *key != "attention.head_count_kv"));
    metadata.push(("rope.dimension_count", number(rotary)));
    metadata.push(("attention.kv_lora_rank", number(rank)));
    metadata.extend(query.map(|rank| ("attention.q_lora_rank", number(rank))));
    match old {
        true => metadata.extend([
            ("attention.key_length", number(own + rotary)),
            ("attention.value_length", number(value)),
        ]),
        // One head of latents.
        false => metadata.extend([
            ("attention.head_count_kv", number(1)),
            ("attention.key_length", number(rank + rotary)),
            ("attention.value_length", number(rank)),
            ("attention.key_length_mla", number(own + rotary)),
            ("attention.value_length_mla", number(value)),
        ]),
    }
    let share = fields["rope_parameters"]["mscale_all_dim"].as_f64();
    metadata.extend(share.map(|share| ("rope.scaling.yarn_log_multiplier", Stored::F32(0.1 * share as f32))));
}

/// What a converter writes of scaled rotary positions, except that of Gemma 3.
fn rope(config: &Config, metadata: &mut Vec<(&str, Stored)>, tensors: &mut HashMap<String, QTensor>) {
    let mut add = |name: &str, values: Vec<f64>| {
        let values: Vec<f32> = values.into_iter().map(|value| value as f32).collect();
        let tensor = Tensor::new(values, &Device::Cpu).unwrap();
        tensors.insert(name.into(), QTensor::quantize(&tensor, GgmlDType::F32).unwrap());
    };
    let number = |value: f64| Stored::F32(value as f32);
    match config.rope_scaling.clone() {
        Some(RopeScaling::Yarn { factor, original_max_position_embeddings: learned, .. }) => {
            metadata.extend([
                ("rope.scaling.type", Stored::String("yarn".into())),
                ("rope.scaling.factor", number(factor)),
                ("rope.scaling.original_context_length", Stored::U32(learned as u32)),
            ]);
        }
        Some(RopeScaling::Longrope {
            short_factor,
            long_factor,
            attention_factor,
            original_max_position_embeddings: learned,
        }) => {
            add("rope_factors_short.weight", short_factor);
            add("rope_factors_long.weight", long_factor);
            metadata.push(("rope.scaling.attn_factor", number(attention_factor)));
            metadata.push(("rope.scaling.original_context_length", Stored::U32(learned as u32)));
        }
        Some(RopeScaling::Factors(factors)) => add("rope_freqs.weight", factors),
        Some(RopeScaling::Llama3 {
            factor,
            low_freq_factor: low,
            high_freq_factor: high,
            original_max_position_embeddings: learned,
        }) => {
            let dim = config.heads().dim;
            let stretched = |i: usize| {
                let wavelength = std::f64::consts::TAU * config.rope_theta.powf(2.0 * i as f64 / dim as f64);
                let kept = ((learned as f64 / wavelength - low) / (high - low)).clamp(0.0, 1.0);
                1.0 / ((1.0 - kept) / factor + kept)
            };
            add("rope_freqs.weight", (0..dim / 2).map(stretched).collect());
        }
        _ => {}
    }
}

#[test]
fn scaled_rotary_positions_of_gguf_files_are_those_of_the_folder() {
    let Ropes { prompt, models } = ropes();
    let config = |case: &str| models.iter().find(|rope| rope.case == case).unwrap().config.clone();
    let mut llama3 = config("yarn");
    llama3["rope_parameters"] = config("llama3")["rope_parameters"].clone();
    let cases = [
        ("yarn", config("yarn")),
        ("llama3", llama3),
        ("longrope", config("longrope of phi3")),
        ("longrope of a share", config("longrope of a share")),
        ("a share", config("a share")),
    ];
    for (case, config) in cases {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.gguf");
        write(&file, &config, GgmlDType::F32);
        crate::lm::families::write(folder.path(), &config);
        for length in [5, prompt.len()] {
            let (path, file, prompt) = (folder.path().to_owned(), file.clone(), prompt[..length].to_vec());
            on_ranks(2, case, move |ctx| -> anyhow::Result<()> {
                let (got, want) = (after(ctx, &file, &prompt)?, after(ctx, &path, &prompt)?);
                for (got, want) in got.iter().zip(&want) {
                    assert!((got - want).abs() < 1e-4, "{case}, {length} tokens: {got} instead of {want}");
                }
                Ok(())
            });
        }
    }
}

/// The families whose files can say what their configs say here.
pub(crate) fn convertible() -> (Vec<u32>, Vec<Family>) {
    let Families { prompt, models } = families();
    // A window in every layer, a mean of heads that no file has, and a pattern that files leave to the program.
    let unlike = [
        "mistral",
        "qwen2 with windows",
        "llama with biases",
        "smollm3",
        "mixtral with windows",
        "qwen3 moe with raw weights",
        "seed oss with other biases",
        "ernie with biases",
        // Positions of halves, and a factor of cosines.
        "deepseek v3 with scaled scores",
        "mistral4 without latents of queries",
        // Files of it are not read.
        "helium",
        // A pattern of windows that llama.cpp does not have.
        "gpt oss without biases",
        // Chunks of other lengths than llama.cpp has, and layers with and without positions in another order.
        "llama4",
        "llama4 with two experts",
        // A norm before the gates, and a table that would be multiplied by two factors.
        "falcon h1 with groups",
        // Weights that are not normalized, and windows that files do not say.
        "lfm2 moe with raw weights",
        "starcoder2 with windows",
    ];
    let fits = |config: &mut Value| {
        config["intermediate_size"] = json!(64);
        if config.get("intermediate_size_mlp").is_some() {
            config["intermediate_size_mlp"] = json!(64);
        }
        if config.get("shared_intermediate_size").is_some() {
            config["shared_intermediate_size"] = json!(64);
        }
        for name in ["moe_intermediate_size", "moe_shared_expert_intermediate_size"] {
            if let Some(hidden) = config.get_mut(name) {
                *hidden = json!(64);
            }
        }
        if config["model_type"] == "ernie4_5_moe" {
            // What files do not say, and a router would choose other experts for what blocks round off.
            config["moe_norm_min"] = json!(1e-12);
            config["moe_k"] = config["moe_num_experts"].clone();
            // Each layer adds to what blocks round off.
            config["num_hidden_layers"] = json!(3);
        }
        if config["moe_latent_size"].is_number() {
            config["moe_latent_size"] = json!(32);
        }
        if config["model_type"] == "mistral4" {
            config["rope_parameters"].as_object_mut().unwrap().remove("partial_rotary_factor");
            // A router would choose other experts for what blocks round off.
            config["num_experts_per_tok"] = config["n_routed_experts"].clone();
            config["topk_group"] = config["n_group"].clone();
        }
        if config.get("linear_num_key_heads").is_some() {
            // Blocks are of two value heads.
            (config["linear_value_head_dim"], config["hidden_size"]) = (json!(16), json!(64));
            config["attention_bias"] = json!(false);
            if config.get("num_experts").is_some() {
                config["num_experts_per_tok"] = config["num_experts"].clone();
                config["shared_expert_intermediate_size"] = json!(64);
                // Else some norms multiply what blocks round off.
                config["rms_norm_eps"] = json!(8.0);
            }
        }
        if config["model_type"] == "gemma4_text" && config["enable_moe_block"] == json!(true) {
            config["top_k_experts"] = config["num_experts"].clone();
        }
        if config["model_type"] == "llama4_text" {
            // A router would choose other experts for what blocks round off.
            config["num_experts_per_tok"] = config["num_local_experts"].clone();
        }
        if config["model_type"] == "exaone_moe" {
            // A router would choose other experts for what blocks round off.
            config["num_experts_per_tok"] = config["num_experts"].clone();
            config["topk_group"] = config["n_group"].clone();
        }
        if config["model_type"] == "lfm2_moe" {
            // Convolutions multiply what blocks round off, and a router would choose other experts.
            config["num_experts_per_tok"] = config["num_experts"].clone();
        }
        if config["model_type"] == "granitemoehybrid" && config["num_local_experts"] != json!(0) {
            config["num_experts_per_tok"] = config["num_local_experts"].clone();
        }
        if config.get("swiglu_limit").is_some() {
            // What llama.cpp computes.
            (config["swiglu_limit"], config["swiglu_alpha"]) = (json!(7.0), json!(1.702));
        }
        if config.get("kv_lora_rank").is_some() {
            config["hidden_size"] = json!(64);
            for name in ["kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "v_head_dim"] {
                if !config[name].is_null() {
                    config[name] = json!(32);
                }
            }
        }
        if let Some(scalar) = config.get_mut("query_pre_attn_scalar") {
            *scalar = json!(16);
        }
    };
    let models = models.into_iter().filter(|model| !unlike.contains(&model.case.as_str()));
    (
        prompt,
        models
            .map(|mut model| {
                fits(&mut model.config);
                model
            })
            .collect(),
    )
}

#[test]
fn a_gguf_file_computes_what_the_folder_computes() {
    let (prompt, models) = convertible();
    for Family { case, config, .. } in models {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.gguf");
        write(&file, &config, GgmlDType::F32);
        crate::lm::families::write(folder.path(), &config);
        for ranks in 1..=3 {
            let (path, file, prompt, case) =
                (folder.path().to_owned(), file.clone(), prompt.clone(), case.clone());
            on_ranks(ranks, &case.clone(), move |ctx| -> anyhow::Result<()> {
                let (got, want) = (logits(ctx, &file, &prompt, false)?, logits(ctx, &path, &prompt, false)?);
                for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
                    assert!(
                        (got - want).abs() < 1e-4,
                        "{case} on {}: {got} instead of {want}",
                        ctx.world_size()
                    );
                }
                Ok(())
            });
        }
    }
}

#[test]
fn projections_of_key_heads_in_one_tensor_are_those_that_are_apart() {
    let (prompt, models) = convertible();
    let folder = tempfile::tempdir().unwrap();
    let [old, new] = ["old.gguf", "new.gguf"].map(|name| folder.path().join(name));
    for Family { case, config, .. } in
        models.into_iter().filter(|model| model.config["model_type"] == "qwen3_next")
    {
        write_as(&old, &config, GgmlDType::F32, true);
        write_as(&new, &config, GgmlDType::F32, false);
        let has = |file: &Path, end: &str| {
            Files::open(file).unwrap().weights().names().any(|name| name.ends_with(end))
        };
        assert!(has(&old, "in_proj_qkvz.weight") && has(&new, "in_proj_z.weight"), "{case}");
        for ranks in 1..=3 {
            let (old, new, prompt, case) = (old.clone(), new.clone(), prompt.clone(), case.clone());
            on_ranks(ranks, &case.clone(), move |ctx| -> anyhow::Result<()> {
                let (got, want) = (logits(ctx, &old, &prompt, false)?, logits(ctx, &new, &prompt, false)?);
                for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
                    assert!(
                        (got - want).abs() < 1e-4,
                        "{case} on {}: {got} instead of {want}",
                        ctx.world_size()
                    );
                }
                Ok(())
            });
        }
    }
}

/// Writes a file whose gates and ups of all experts of a layer are one tensor, as a converter does if it is asked to.
pub(crate) fn write_together(from: &Path, to: &Path) -> usize {
    let mut reader = fs::File::open(from).unwrap();
    let content = gguf_file::Content::read(&mut reader).unwrap();
    let mut read = |name: &str| content.tensor(&mut reader, name, &Device::Cpu).unwrap();
    let (mut tensors, mut count): (Vec<(String, QTensor)>, usize) = (Vec::new(), 0);
    for name in content.tensor_infos.keys().filter(|name| !name.contains(".ffn_up_exps.")) {
        let tensor = read(name);
        if !name.contains(".ffn_gate_exps.") {
            tensors.push((name.clone(), tensor));
            continue;
        }
        let up = read(&name.replace("ffn_gate_exps", "ffn_up_exps"));
        let [gate, up] = [&tensor, &up].map(|tensor| tensor.dequantize(&Device::Cpu).unwrap());
        let dtype = if name.ends_with(".bias") { GgmlDType::F32 } else { tensor.dtype() };
        let both = QTensor::quantize(&Tensor::cat(&[gate, up], 1).unwrap(), dtype).unwrap();
        tensors.push((name.replace("ffn_gate_exps", "ffn_gate_up_exps"), both));
        count += 1;
    }
    let metadata: Vec<(&str, &Stored)> =
        content.metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
    let tensors: Vec<(&str, &QTensor)> =
        tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    gguf_file::write(&mut fs::File::create(to).unwrap(), &metadata, &tensors).unwrap();
    count
}

#[test]
fn gates_and_ups_of_experts_in_one_tensor_are_those_that_are_apart() {
    let (prompt, models) = convertible();
    let folder = tempfile::tempdir().unwrap();
    let [apart, together] = ["apart.gguf", "together.gguf"].map(|name| folder.path().join(name));
    let mut cases = Vec::new();
    for Family { case, config, .. } in models {
        for dtype in [GgmlDType::F32, GgmlDType::Q8_0] {
            write(&apart, &config, dtype);
            if write_together(&apart, &together) == 0 {
                continue;
            }
            cases.push(case.clone());
            for ranks in 1..=2 {
                let (apart, together) = (apart.clone(), together.clone());
                let (prompt, case) = (prompt.clone(), case.clone());
                on_ranks(ranks, &case.clone(), move |ctx| -> anyhow::Result<()> {
                    let (got, want) =
                        (logits(ctx, &together, &prompt, false)?, logits(ctx, &apart, &prompt, false)?);
                    assert_eq!(got, want, "{case} of {dtype:?} on {}", ctx.world_size());
                    Ok(())
                });
            }
        }
    }
    for case in ["gpt oss", "granite moe", "qwen3.5 moe", "qwen3 moe", "mixtral"] {
        assert!(cases.iter().any(|known| known == case), "{case} is not among {cases:?}");
    }
}

#[test]
fn keys_and_values_of_latents_in_one_tensor_are_those_that_are_apart() {
    let (prompt, models) = convertible();
    let folder = tempfile::tempdir().unwrap();
    let [old, new] = ["old.gguf", "new.gguf"].map(|name| folder.path().join(name));
    for Family { case, config, .. } in
        models.into_iter().filter(|model| !model.config["kv_lora_rank"].is_null())
    {
        write_as(&old, &config, GgmlDType::F32, true);
        write_as(&new, &config, GgmlDType::F32, false);
        for ranks in 1..=3 {
            let (old, new, prompt, case) = (old.clone(), new.clone(), prompt.clone(), case.clone());
            on_ranks(ranks, &case.clone(), move |ctx| -> anyhow::Result<()> {
                let (got, want) = (logits(ctx, &old, &prompt, false)?, logits(ctx, &new, &prompt, false)?);
                assert_eq!(got, want, "{case} on {}", ctx.world_size());
                Ok(())
            });
        }
    }
}

#[test]
fn quantized_products_are_near_those_of_the_floats_and_equal_on_every_mesh() {
    let (prompt, models) = convertible();
    for Family { case, config, .. } in models {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.gguf");
        write(&file, &config, GgmlDType::Q8_0);
        let alone = {
            let (file, prompt) = (file.clone(), prompt.clone());
            on_ranks(1, &case, move |ctx| logits(ctx, &file, &prompt, false)).remove(0)
        };
        for ranks in 1..=3 {
            let (file, prompt, case, alone) = (file.clone(), prompt.clone(), case.clone(), alone.clone());
            on_ranks(ranks, &case.clone(), move |ctx| -> anyhow::Result<()> {
                let of_floats = logits(ctx, &file, &prompt, true)?;
                let of_blocks = logits(ctx, &file, &prompt, false)?;
                let most = of_floats.iter().flatten().fold(0f32, |most, x| most.max(x.abs()));
                let near = |got: &[Vec<f32>], want: &[Vec<f32>], share: f32| {
                    let furthest =
                        got.iter().flatten().zip(want.iter().flatten()).map(|(a, b)| (a - b).abs());
                    let furthest = furthest.fold(0f32, f32::max);
                    assert!(furthest <= share * most, "{case} on {}: {furthest} of {most}", ctx.world_size());
                };
                near(&of_blocks, &of_floats, 0.08);
                near(&of_blocks, &alone, 0.04);
                Ok(())
            });
        }
        let want = greedy(&file, &prompt, 4, [1, 1]);
        assert_eq!(greedy(&file, &prompt, 4, [2, 2]), want, "{case}");
    }
}

/// Writes a file with the floats that the blocks of another one stand for.
fn write_floats(from: &Path, to: &Path) {
    let mut reader = fs::File::open(from).unwrap();
    let content = gguf_file::Content::read(&mut reader).unwrap();
    let metadata: Vec<(&str, &Stored)> =
        content.metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
    let tensors: Vec<(&str, QTensor)> = content
        .tensor_infos
        .keys()
        .map(|name| {
            let tensor = content.tensor(&mut reader, name, &Device::Cpu).unwrap();
            let floats = tensor.dequantize(&Device::Cpu).unwrap();
            (name.as_str(), QTensor::quantize(&floats, GgmlDType::F32).unwrap())
        })
        .collect();
    let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(name, tensor)| (*name, tensor)).collect();
    gguf_file::write(&mut fs::File::create(to).unwrap(), &metadata, &tensors).unwrap();
}

#[test]
fn blocks_of_every_family_are_the_floats_that_they_stand_for() {
    let (prompt, models) = convertible();
    let folder = tempfile::tempdir().unwrap();
    let [blocks, floats] = ["blocks.gguf", "floats.gguf"].map(|name| folder.path().join(name));
    for Family { case, config, .. } in models {
        for (dtype, ranks) in [(GgmlDType::Q4_0, 2), (GgmlDType::Q8_0, 3)] {
            write(&blocks, &config, dtype);
            write_floats(&blocks, &floats);
            let (blocks, floats, prompt) = (blocks.clone(), floats.clone(), prompt.clone());
            on_ranks(ranks, &case.clone(), move |ctx| -> anyhow::Result<()> {
                let (got, want) =
                    (logits(ctx, &blocks, &prompt, true)?, logits(ctx, &floats, &prompt, true)?);
                for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
                    assert!((got - want).abs() <= 1e-4, "{dtype:?} on {ranks}: {got} instead of {want}");
                }
                Ok(())
            });
        }
    }
}

#[test]
fn the_language_model_of_a_model_for_images_is_read_by_its_own_name() {
    let (prompt, models) = convertible();
    for (case, kind, other) in [("qwen2", "qwen2", "qwen2vl"), ("qwen3", "qwen3", "qwen3vl")] {
        let config = &models.iter().find(|model| model.case == case).unwrap().config;
        let folder = tempfile::tempdir().unwrap();
        let [plain, file] = ["plain.gguf", "file.gguf"].map(|name| folder.path().join(name));
        write(&plain, config, GgmlDType::F32);
        let mut reader = fs::File::open(&plain).unwrap();
        let content = gguf_file::Content::read(&mut reader).unwrap();
        let prefix = format!("{kind}.");
        let mut metadata: Vec<(String, Stored)> = content
            .metadata
            .iter()
            .map(|(key, value)| (key.replacen(&prefix, &format!("{other}."), 1), value.clone()))
            .collect();
        metadata.retain(|(key, _)| key != "general.architecture");
        let sections = [1, 1, 2, 0].map(Stored::I32).to_vec();
        metadata.push(("general.architecture".into(), Stored::String(other.into())));
        metadata.push((format!("{other}.rope.dimension_sections"), Stored::Array(sections)));
        metadata.push((format!("{other}.n_deepstack_layers"), Stored::U32(1)));
        let tensors: Vec<(&String, QTensor)> = content
            .tensor_infos
            .keys()
            .map(|name| (name, content.tensor(&mut reader, name, &Device::Cpu).unwrap()))
            .collect();
        let tensors: Vec<(&str, &QTensor)> =
            tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        let metadata: Vec<(&str, &Stored)> =
            metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
        gguf_file::write(&mut fs::File::create(&file).unwrap(), &metadata, &tensors).unwrap();
        assert_eq!(greedy(&file, &prompt, 4, [2, 1]), greedy(&plain, &prompt, 4, [1, 1]), "{case}");
    }
}

/// Writes a file as older converters did: a tensor for each expert.
fn write_apart(from: &Path, to: &Path) {
    let mut reader = fs::File::open(from).unwrap();
    let content = gguf_file::Content::read(&mut reader).unwrap();
    let mut tensors: Vec<(String, QTensor)> = Vec::new();
    for name in content.tensor_infos.keys() {
        let tensor = content.tensor(&mut reader, name, &Device::Cpu).unwrap();
        let Some((module, _)) = name.split_once("_exps.") else {
            tensors.push((name.clone(), tensor));
            continue;
        };
        let stack = tensor.dequantize(&Device::Cpu).unwrap();
        tensors.extend((0..stack.dims()[0]).map(|expert| {
            let one =
                QTensor::quantize(&stack.get(expert).unwrap().force_contiguous().unwrap(), tensor.dtype())
                    .unwrap();
            (format!("{module}.{expert}.weight"), one)
        }));
    }
    let metadata: Vec<(&str, &Stored)> =
        content.metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
    let tensors: Vec<(&str, &QTensor)> =
        tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    gguf_file::write(&mut fs::File::create(to).unwrap(), &metadata, &tensors).unwrap();
}

#[test]
fn experts_that_lie_apart_are_those_that_are_stacked() {
    let (prompt, models) = convertible();
    let config = models.into_iter().find(|model| model.case == "mixtral").unwrap().config;
    let folder = tempfile::tempdir().unwrap();
    let [stacked, apart] = ["stacked.gguf", "apart.gguf"].map(|name| folder.path().join(name));
    for dtype in [GgmlDType::F32, GgmlDType::Q8_0] {
        write(&stacked, &config, dtype);
        write_apart(&stacked, &apart);
        assert!(
            Files::open(&apart).unwrap().weights().names().any(|name| name.ends_with("mlp.experts.up_proj"))
        );
        for ranks in 1..=2 {
            let (stacked, apart, prompt) = (stacked.clone(), apart.clone(), prompt.clone());
            on_ranks(ranks, "apart", move |ctx| -> anyhow::Result<()> {
                let (got, want) =
                    (logits(ctx, &apart, &prompt, false)?, logits(ctx, &stacked, &prompt, false)?);
                for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
                    assert!((got - want).abs() < 1e-4, "{dtype:?} on {ranks}: {got} instead of {want}");
                }
                Ok(())
            });
        }
    }
}

#[test]
fn keys_and_tensors_without_a_place_are_refused_by_name() {
    let (_, models) = convertible();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    write(&file, &models[0].config, GgmlDType::F32);
    Files::open(&file).unwrap();
    let change = |key: Option<(&str, Stored)>, tensor: Option<&str>| {
        let mut reader = fs::File::open(&file).unwrap();
        let content = gguf_file::Content::read(&mut reader).unwrap();
        let mut metadata: Vec<(&str, &Stored)> =
            content.metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
        if let Some((key, value)) = &key {
            metadata.retain(|(known, _)| known != key);
            metadata.push((key, value));
        }
        let read =
            |name: &String| content.tensor(&mut fs::File::open(&file).unwrap(), name, &Device::Cpu).unwrap();
        let mut tensors: Vec<(String, QTensor)> =
            content.tensor_infos.keys().map(|name| (name.clone(), read(name))).collect();
        tensors.extend(tensor.map(|name| (name.to_owned(), read(&"output_norm.weight".to_owned()))));
        let tensors: Vec<(&str, &QTensor)> =
            tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        let changed = folder.path().join("changed.gguf");
        gguf_file::write(&mut fs::File::create(&changed).unwrap(), &metadata, &tensors).unwrap();
        format!("{:#}", Files::open(&changed).unwrap_err())
    };
    let text = |text: &str| Stored::String(text.into());
    let cases = [
        (Some(("general.architecture", text("mamba"))), None, "\"mamba\" is not supported"),
        (
            Some(("llama.expert_count", Stored::U32(8))),
            None,
            "model.layers.0.block_sparse_moe.experts.0.w1.weight",
        ),
        (Some(("llama.expert_gating_func", Stored::U32(2))), None, "llama.expert_gating_func is 2"),
        (Some(("llama.expert_shared_count", Stored::U32(1))), None, "llama.expert_shared_count is 1"),
        (Some(("llama.rope.scaling.type", text("axial"))), None, "\"axial\""),
        (Some(("llama.rope.scaling.factor", Stored::F32(2.0))), None, "llama.rope.scaling.factor"),
        (
            Some(("llama.rope.scaling.yarn_ext_factor", Stored::F32(2.0))),
            None,
            "llama.rope.scaling.yarn_ext_factor",
        ),
        (
            Some(("llama.rope.scaling.yarn_beta_fast", Stored::F32(2.0))),
            None,
            "llama.rope.scaling.yarn_beta_fast",
        ),
        (Some(("llama.block_count", Stored::U32(3))), None, "model.layers.2"),
        (Some(("llama.block_count", Stored::U32(1 << 30))), None, "num_hidden_layers is 1073741824"),
        (Some(("llama.attention.head_count", Stored::F32(2.5))), None, "num_attention_heads is 2.5"),
        (Some(("llama.vocab_size", Stored::U32(9))), None, "llama.vocab_size"),
        (None, Some("rope_freqs.weight"), "rope_freqs.weight"),
        (None, Some("blk.0.ffn_gate_inp.weight"), "model.layers.0.mlp.router.weight"),
    ];
    for (key, tensor, want) in cases {
        let said = change(key, tensor);
        assert!(said.contains(want), "{said}, want {want:?}");
    }
}
