//! Configs and files of models with latent attention.

use std::fs::File;

use candle_core::quantized::gguf_file::{self, Value as Stored};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, IndexOp, Tensor};
use candle_lm::config::Config;
use candle_lm::config::parts::LatentWidths;
use candle_lm::files::Files;
use candle_lm::memory::cache_bytes;
use candle_shard::Weights;
use candle_shard::nn::Scores;
use serde_json::{Value, json};
use test_utils::{Scratch, values};

use crate::lm::facts::weight;
use crate::lm::families::{families, write};

fn fields(case: &str) -> Value {
    families().models.into_iter().find(|model| model.case == case).unwrap().config
}

/// A config with other fields; null removes one.
fn with(mut base: Value, changed: &Value) -> Value {
    let fields = base.as_object_mut().unwrap();
    for (name, value) in changed.as_object().unwrap() {
        match value {
            Value::Null => drop(fields.remove(name)),
            _ => drop(fields.insert(name.clone(), value.clone())),
        }
    }
    base
}

fn parsed(fields: &Value) -> Config {
    Config::parse(&fields.to_string()).unwrap()
}

/// The config of DeepSeek R1.
fn largest() -> Value {
    let text = r#"{
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "bos_token_id": 0, "eos_token_id": 1,
        "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02,
        "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
        "norm_topk_prob": true, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
        "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000, "routed_scaling_factor": 2.5,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn"
        },
        "quantization_config": {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]
        },
        "scoring_func": "sigmoid", "tie_word_embeddings": false, "topk_group": 4, "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16", "transformers_version": "4.46.3", "use_cache": true, "v_head_dim": 128, "vocab_size": 129280
    }"#;
    serde_json::from_str(text).unwrap()
}

#[test]
fn configs_of_the_hub_are_understood() {
    let config = parsed(&largest());
    let widths = LatentWidths { query: Some(1536), rank: 512, own: 128, rotary: 64, value: 128 };
    assert_eq!((config.parts.latent(), config.parts.draft_layers), (Some(widths), 1));
    // 671 billion, of which a token uses 37.
    let active: usize = config.stored().iter().map(|(name, shape)| config.active(name, shape)).sum();
    assert_eq!((config.parameters() / 1_000_000_000, active / 1_000_000_000), (671, 37));
    let scale = config.parts.scores_scale.unwrap();
    assert!((scale - (0.1 * 40f64.ln() + 1.0).powi(2) / 192f64.sqrt()).abs() < 1e-12, "{scale}");
    // 61 layers of 576 numbers, on each of 8 ranks.
    assert_eq!(cache_bytes(&config, DType::BF16, [1, 1], [1, 1, 1]), 61 * 576 * 2);
    assert_eq!(cache_bytes(&config, DType::BF16, [3, 100], [8, 1, 1]), 61 * 576 * 2 * 8 * 300);
    assert_eq!(cache_bytes(&config, DType::F32, [1, 100], [2, 1, 3]), 61 * 576 * 4 * 2 * 34);

    let kimi = json!({
        "model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "n_routed_experts": 384, "num_attention_heads": 64,
        "num_key_value_heads": 64, "routed_scaling_factor": 2.827, "aux_loss_alpha": 0.001, "seq_aux": true,
        "num_nextn_predict_layers": 0,
    });
    let kimi = parsed(&with(largest(), &kimi));
    assert_eq!(kimi.parts.latent(), config.parts.latent());
    let (experts, other) = (kimi.parts.experts.unwrap(), config.parts.experts.unwrap());
    assert_eq!((experts.groups, experts.scores, experts.layers), (None, Scores::Sigmoid, other.layers));

    let lite = json!({
        "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "aux_loss_alpha": 0.001, "seq_aux": true,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax",
        "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": false, "num_experts_per_tok": 6,
        "q_lora_rank": null, "num_hidden_layers": 27, "num_nextn_predict_layers": null,
    });
    let lite = parsed(&with(largest(), &lite));
    let experts = lite.parts.experts.as_ref().unwrap();
    assert_eq!((experts.scores, experts.normalize, experts.has_bias), (Scores::Softmax, false, false));
    assert_eq!((lite.parts.latent().unwrap().query, experts.shared), (None, 2 * 2048));
}

#[test]
fn what_is_not_understood_is_refused_by_name() {
    let small = fields("deepseek v3 mixture");
    let cases = [
        (json!({"model_type": "deepseek_v32"}), "sparse attention"),
        (json!({"model_type": "glm_moe_dsa"}), "sparse attention"),
        (json!({"model_type": "deepseek_v4"}), "compressed keys"),
        (json!({"kv_lora_rank": null}), "there is no kv_lora_rank"),
        (json!({"n_group": null}), "there is no n_group"),
        (json!({"first_k_dense_replace": null}), "there is no first_k_dense_replace"),
        (json!({"qk_rope_head_dim": 3}), "3 of it have rotary positions"),
        (json!({"num_key_value_heads": 1}), "num_key_value_heads is 1"),
        (json!({"scoring_func": "softmax"}), "scoring_func is \"softmax\""),
        (json!({"topk_method": "greedy"}), "topk_method is \"greedy\""),
        (json!({"moe_layer_freq": 2}), "moe_layer_freq is 2"),
        (json!({"index_topk": 2048}), "index_topk (2048)"),
    ];
    for (changed, want) in cases {
        let said = format!("{:#}", Config::parse(&with(small.clone(), &changed).to_string()).unwrap_err());
        assert!(said.contains(want), "{said}: want {want}");
    }
    let grouped = fields("deepseek v2 mixture");
    for (changed, want) in [
        (json!({"topk_method": "noaux_tc"}), "topk_method is \"noaux_tc\""),
        (json!({"norm_topk_prob": true}), "norm_topk_prob is true"),
        (json!({"rope_interleave": false}), "rope_interleave is false"),
    ] {
        let said = format!("{:#}", Config::parse(&with(grouped.clone(), &changed).to_string()).unwrap_err());
        assert!(said.contains(want), "{said}: want {want}");
    }
}

#[test]
fn layers_that_predict_further_tokens_are_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let mut tensors = write(folder.path(), &fields("deepseek v3 mixture"));
    tensors.insert("model.layers.2.eh_proj.weight".into(), weight("eh_proj", &[36, 72]));
    candle_core::safetensors::save(&tensors, folder.path().join("model.safetensors")).unwrap();
    let files = Files::open(folder.path()).unwrap();
    assert!(files.unmet.iter().any(|note| note.contains("predict further tokens")), "{:?}", files.unmet);
    assert!(files.weights().names().all(|name| !name.contains("layers.2.")));
}

#[test]
fn keys_and_values_that_files_have_apart_are_one_weight() {
    let folder = Scratch::new("latent");
    let path = folder.path("model.gguf");
    let (heads, latent, key, value) = (3, 64, 32, 5);
    let both = values(&[heads, key + value, latent], 5, DType::F32);
    let keys = both.narrow(1, 0, key).unwrap().transpose(1, 2).unwrap().contiguous().unwrap();
    let of_values = both.narrow(1, key, value).unwrap().contiguous().unwrap();
    for dtype in [GgmlDType::F32, GgmlDType::BF16, GgmlDType::Q8_0] {
        let [k, v] = [&keys, &of_values].map(|x| QTensor::quantize(x, dtype).unwrap());
        let stored = |x: &QTensor| x.dequantize(&Device::Cpu).unwrap();
        let whole = Tensor::cat(&[stored(&k).transpose(1, 2).unwrap(), stored(&v)], 1).unwrap();
        let whole = whole.reshape((heads * (key + value), latent)).unwrap();
        let written = &mut File::create(&path).unwrap();
        let architecture = Stored::String("deepseek2".into());
        gguf_file::write(written, &[("general.architecture", &architecture)], &[("k", &k), ("v", &v)])
            .unwrap();
        let open = || Weights::open(&path).unwrap();
        let weights = open().join_latent("k", "v", "up").unwrap();
        assert_eq!(weights.names().collect::<Vec<_>>(), ["up.weight"]);
        assert_eq!(weights.shape("up.weight").unwrap(), [heads * (key + value), latent]);
        let rows = heads * (key + value);
        for (rows, columns) in [(0..rows, 0..latent), (30..40, 3..7), (36..38, 0..latent), (70..rows, 63..64)]
        {
            let got =
                weights.read_block("up.weight", &[rows.clone(), columns.clone()], &Device::Cpu).unwrap();
            let want = whole.i((rows.clone(), columns.clone())).unwrap();
            assert_eq!(got.dims(), want.dims());
            let flat = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(flat(&got), flat(&want.contiguous().unwrap()), "{dtype:?} {rows:?} {columns:?}");
        }
        // One head of three.
        let one = open().join_latent("k", "v", "up").unwrap();
        one.read_block("up.weight", &[key + value..2 * (key + value), 0..latent], &Device::Cpu).unwrap();
        assert_eq!(one.bytes_read() * 3, one.stored_as("up.weight").unwrap().1);
        for (keys, values, to, want) in [
            ("v", "k", "up", "expected [heads, latent, key]"),
            ("k", "k", "up", "expected [heads, latent, key]"),
            ("k", "w", "up", "is not there"),
        ] {
            let said = open().join_latent(keys, values, to).unwrap_err().to_string();
            assert!(said.contains(want), "{said}: want {want}");
        }
        let taken = open().rename(|name| if name == "k" { "up.weight".into() } else { name.into() }).unwrap();
        let taken =
            taken.alias("up.weight", "k").unwrap().join_latent("k", "v", "up").unwrap_err().to_string();
        assert!(taken.contains("both in parts and as a weight"), "{taken}");
    }
}
