//! The language models of small models for images and texts against what transformers computes, taken down by
//! `benchmarks/wrapper_facts.py`.

use std::collections::{BTreeMap, HashMap};
use std::fs;

use candle_core::{DType, Tensor};
use candle_lm::config::Config;
use candle_lm::files::Files;
use candle_lm::memory::cache_bytes;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::lm::facts::weight;
use crate::lm::families::{Families, assert_logits, families, greedy};

#[derive(Deserialize)]
struct Wrappers {
    prompt: Vec<u32>,
    models: Vec<Wrapper>,
}

#[derive(Deserialize)]
struct Wrapper {
    case: String,
    config: Value,
    /// The shapes of the tensors in the files.
    tensors: BTreeMap<String, Vec<usize>>,
    /// After the first token and after the last one of the prompt.
    logits: [Vec<f32>; 2],
    /// Greedy decoding.
    tokens: Vec<u32>,
}

fn wrappers() -> Wrappers {
    serde_json::from_str(include_str!("wrappers.json")).unwrap()
}

/// Another name that files of the same model may have for a tensor.
fn renamed(name: &str) -> String {
    let parts = ["visual.", "vision_tower.", "multi_modal_projector.", "mm_projector."];
    match name.strip_prefix("language_model.model.") {
        Some(rest) => format!("model.language_model.{rest}"),
        None if parts.iter().any(|part| name.starts_with(part)) => format!("model.{name}"),
        None => match name.strip_prefix("model.language_model.") {
            Some(rest) => format!("language_model.model.{rest}"),
            None => name.replace("language_model.lm_head", "lm_head"),
        },
    }
}

#[test]
fn the_language_model_of_a_model_for_images_computes_the_logits_of_transformers() {
    let Wrappers { prompt, models } = wrappers();
    for Wrapper { case, config, tensors, logits: want, tokens } in models {
        for has_other_names in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
            let named = |name: &str| if has_other_names { renamed(name) } else { name.to_owned() };
            // Released files of mixtures of Qwen 3 VL have the matrices of experts transposed.
            let is_turned =
                |name: &str| has_other_names && case == "qwen3 vl moe" && name.contains(".mlp.experts.");
            let laid = |name: &str, shape: &[usize]| match is_turned(name) {
                true => weight(name, shape).transpose(1, 2).unwrap().contiguous().unwrap(),
                false => weight(name, shape),
            };
            let stored: HashMap<String, Tensor> =
                tensors.iter().map(|(name, shape)| (named(name), laid(name, shape))).collect();
            candle_core::safetensors::save(&stored, folder.path().join("model.safetensors")).unwrap();
            let files = Files::open(folder.path()).unwrap();
            assert!(files.unmet.iter().any(|note| note.contains("images")), "{case}: {:?}", files.unmet);
            assert_logits(folder.path(), &prompt, &want, &case);
            for mesh in [[1, 1], [2, 1], [2, 2]] {
                assert_eq!(greedy(folder.path(), &prompt, tokens.len(), mesh), tokens, "{case} {mesh:?}");
            }
        }
    }
}

#[test]
fn layers_that_draft_tokens_are_left_out_and_others_are_not() {
    let Wrappers { prompt, models } = wrappers();
    let model = models.into_iter().find(|model| model.case == "qwen3.5").unwrap();
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("config.json"), model.config.to_string()).unwrap();
    let mut stored: HashMap<String, Tensor> =
        model.tensors.iter().map(|(name, shape)| (name.clone(), weight(name, shape))).collect();
    let mut save = |name: &str| {
        stored.insert(name.to_owned(), weight(name, &[4, 4]));
        candle_core::safetensors::save(&stored, folder.path().join("model.safetensors")).unwrap();
    };
    save("mtp.layers.0.mlp.up_proj.weight");
    assert_logits(folder.path(), &prompt, &model.logits, "drafts");
    save("model.language_model.layers.0.linear_attn.other.weight");
    let said = format!("{:#}", Files::open(folder.path()).unwrap_err());
    assert!(said.contains("model.layers.0.linear_attn.other.weight"), "{said}");
}

#[test]
fn layers_of_ernie_that_draft_tokens_are_left_out() {
    let Families { prompt, models } = families();
    let model = models.into_iter().find(|model| model.case == "ernie moe").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut stored = crate::lm::families::write(folder.path(), &model.config);
    for name in ["model.mtp_block.0.self_attn.q_proj.weight", "model.mtp_emb_norm.0.weight"] {
        stored.insert(name.to_owned(), weight(name, &[4, 4]));
    }
    candle_core::safetensors::save(&stored, folder.path().join("model.safetensors")).unwrap();
    assert_logits(folder.path(), &prompt, &model.logits, "drafts of ERNIE");
}

/// The config of a model whose fields are not inside of another, as older files have it.
fn flat(mut config: Value) -> Value {
    let text = config.as_object_mut().unwrap().remove("text_config").unwrap();
    for (name, value) in text.as_object().unwrap() {
        match name.as_str() {
            "model_type" | "layer_types" => {}
            "rope_parameters" => {
                config["rope_theta"] = value["rope_theta"].clone();
                config["rope_scaling"] = json!({"type": "mrope", "mrope_section": value["mrope_section"]});
            }
            _ => config[name] = value.clone(),
        }
    }
    config
}

#[test]
fn older_files_have_the_fields_of_the_text_outside() {
    let Wrappers { prompt, models } = wrappers();
    let model = models.into_iter().find(|model| model.case == "qwen2.5 vl").unwrap();
    for kind in ["qwen2_5_vl", "qwen2_vl"] {
        let mut config = flat(model.config.clone());
        config["model_type"] = json!(kind);
        config["architectures"] = json!([if kind == "qwen2_vl" {
            "Qwen2VLForConditionalGeneration"
        } else {
            "Qwen2_5_VLForConditionalGeneration"
        }]);
        config["vision_token_id"] = json!(34);
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        let stored: HashMap<String, Tensor> =
            model.tensors.iter().map(|(name, shape)| (name.clone(), weight(name, shape))).collect();
        candle_core::safetensors::save(&stored, folder.path().join("model.safetensors")).unwrap();
        assert_eq!(greedy(folder.path(), &prompt, model.tokens.len(), [2, 1]), model.tokens, "{kind}");
    }
}

#[test]
fn what_both_parts_of_a_config_say_is_merged_as_in_transformers() {
    let text = || {
        json!({
            "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
            "vocab_size": 99, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "eos_token_id": null, "tie_word_embeddings": true,
        })
    };
    let whole = |text: Value| {
        let fields = json!({
            "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "tie_word_embeddings": false,
            "eos_token_id": [5, 6], "text_config": text,
        });
        Config::parse(&fields.to_string()).unwrap()
    };
    let config = whole(text());
    assert_eq!(
        (config.ends(), config.tie_word_embeddings, config.rope_theta),
        (&[5, 6][..], true, 1_000_000.0)
    );
    let mut other = text();
    (other["rope_theta"], other["eos_token_id"]) = (json!(500.0), json!(7));
    let config = whole(other);
    assert_eq!((config.ends(), config.rope_theta), (&[5, 6][..], 500.0));
}

#[test]
fn fields_that_gemma_3_leaves_out_are_those_of_transformers() {
    let text = json!({
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    });
    let whole = json!({
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255_999, "eoi_token_index": 256_000,
        "eos_token_id": [1, 106], "image_token_index": 262_144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
        "model_type": "gemma3", "text_config": text, "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    });
    let config = Config::parse(&whole.to_string()).unwrap();
    let heads = config.heads();
    assert_eq!([config.vocab_size, heads.query, heads.key_value, heads.dim], [262_208, 8, 4, 256]);
    assert_eq!(
        (config.family, config.ends(), config.tie_word_embeddings),
        ("gemma3_text", &[1, 106][..], true)
    );
    assert!(config.has_images);
    let with = |name: &str, value: Value| {
        let mut whole = whole.clone();
        whole[name] = value;
        format!("{:#}", Config::parse(&whole.to_string()).unwrap_err())
    };
    assert!(with("architectures", json!(["Gemma4"])).contains("Gemma4"));
    assert!(
        with("text_config", json!({"model_type": "llama"})).contains("text_config has model_type \"llama\"")
    );
    assert!(with("text_config", json!(3)).contains("text_config is 3"));
    assert!(with("bidirectional_layers", json!(2)).contains("bidirectional_layers"));
}

#[test]
fn configs_of_gemma_4_are_understood() {
    let text = json!({
        "attention_bias": false, "attention_k_eq_v": true, "enable_moe_block": false, "expert_intermediate_size": null,
        "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 5376, "hidden_size_per_layer_input": 0, "intermediate_size": 21504, "max_position_embeddings": 262_144,
        "model_type": "gemma4_text", "num_attention_heads": 32, "num_global_key_value_heads": 4, "num_hidden_layers": 60,
        "num_key_value_heads": 16, "num_kv_shared_layers": 0, "rms_norm_eps": 1e-6, "sliding_window": 1024,
        "use_bidirectional_attention": "vision", "use_double_wide_mlp": false, "vocab_size": 262_144,
        "vocab_size_per_layer_input": 262_144,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
        },
    });
    let whole = json!({
        "architectures": ["Gemma4ForConditionalGeneration"], "audio_config": null, "audio_token_id": 258_881,
        "boa_token_id": 256_000, "boi_token_id": 255_999, "eoa_token_index": 258_883, "eoi_token_id": 258_882,
        "eos_token_id": [1, 106], "image_token_id": 258_880, "model_type": "gemma4", "text_config": text,
        "tie_word_embeddings": true, "video_token_id": 258_884, "vision_config": {"model_type": "gemma4_vision"},
        "vision_soft_tokens_per_image": 280,
    });
    let config = Config::parse(&whole.to_string()).unwrap();
    let of = |layer: usize| {
        let heads = config.heads_of(layer);
        (heads.query, heads.key_value, heads.dim, config.parts.window(layer), config.parts.has_values(layer))
    };
    // Every sixth layer has no window, nor values of its own.
    assert_eq!((of(4), of(5)), ((32, 16, 256, Some(1024), true), (32, 4, 512, None, false)));
    assert_eq!(
        (config.family, config.ends(), config.parts.logits_cap, config.has_images),
        ("gemma4_text", &[1, 106][..], Some(30.0), true)
    );
    let bytes = |room| cache_bytes(&config, DType::BF16, [1, room], [1, 1, 1]);
    assert_eq!(bytes(1000), (10 * 8 + 50 * 16) * 1024 * 1000);
    assert_eq!(bytes(4096), 10 * 8 * 1024 * 4096 + 50 * 16 * 1024 * 1024);
    let with = |name: &str, value: Value| {
        let mut whole = whole.clone();
        whole["text_config"][name] = value;
        format!("{:#}", Config::parse(&whole.to_string()).unwrap_err())
    };
    assert!(with("num_kv_shared_layers", json!(60)).contains("num_kv_shared_layers is 60"));
    assert!(with("num_global_key_value_heads", json!(5)).contains("num_global_key_value_heads 5"));
}

#[test]
fn configs_of_the_smaller_gemma_4_are_understood() {
    let types: Vec<&str> = (1..=35)
        .map(|layer: usize| if layer.is_multiple_of(5) { "full_attention" } else { "sliding_attention" })
        .collect();
    let text = json!({
        "attention_k_eq_v": false, "enable_moe_block": false, "final_logit_softcapping": 30.0, "global_head_dim": 512,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1536, "hidden_size_per_layer_input": 256,
        "intermediate_size": 6144, "layer_types": types, "max_position_embeddings": 131_072, "model_type": "gemma4_text",
        "num_attention_heads": 8, "num_global_key_value_heads": null, "num_hidden_layers": 35, "num_key_value_heads": 1,
        "num_kv_shared_layers": 20, "rms_norm_eps": 1e-6, "sliding_window": 512, "use_double_wide_mlp": true,
        "vocab_size": 262_144, "vocab_size_per_layer_input": 262_144,
    });
    let whole = json!({
        "architectures": ["Gemma4ForConditionalGeneration"], "audio_config": {"model_type": "gemma4_audio"},
        "audio_token_id": 258_881, "eos_token_id": [1, 106], "image_token_id": 258_880, "model_type": "gemma4",
        "text_config": text, "tie_word_embeddings": true, "vision_config": {"model_type": "gemma4_vision"},
    });
    let config = Config::parse(&whole.to_string()).unwrap();
    let parts = &config.parts;
    assert_eq!(
        (parts.key_source(14), parts.key_source(15), parts.key_source(34)),
        (None, Some(13), Some(14))
    );
    assert_eq!(
        (parts.is_key_source(12), parts.is_key_source(13), parts.is_key_source(14)),
        (false, true, true)
    );
    assert_eq!((config.inner_of(14), config.inner_of(15)), (6144, 12288));
    let shapes: BTreeMap<String, Vec<usize>> = config.tensors().into_iter().collect();
    assert_eq!(shapes["model.embed_tokens_per_layer.weight"], [262_144, 35 * 256]);
    assert_eq!(shapes["model.layers.34.self_attn.q_proj.weight"], [8 * 512, 1536]);
    assert!(!shapes.contains_key("model.layers.15.self_attn.k_proj.weight"));
    // Half of them are the embeddings of layers.
    assert_eq!(config.parameters(), 4_628_569_379);
    // Three layers without a window and 12 with one keep something; a stage by itself keeps copies.
    let bytes = |stages| cache_bytes(&config, DType::BF16, [1, 4096], [1, stages, 1]);
    assert_eq!(bytes(1), 2 * 2 * (3 * 512 * 4096 + 12 * 256 * 512));
    assert_eq!(bytes(2), 2 * 2 * (7 * 512 * 4096 + 28 * 256 * 512));
}
