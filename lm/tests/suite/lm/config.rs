//! Which folders are models that can be run, and what is said of the others.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use candle_core::{DType, Device, Tensor, safetensors};
use candle_lm::config::{Config, RopeScaling};
use candle_lm::files::Files;
use candle_lm::random_model;
use candle_shard::nn::ExpertGate;
use serde_json::{Value, json};

use crate::lm::config as small;
use crate::lm::facts::facts;

/// The config with these fields instead; null takes one away.
fn with(base: &Value, changes: &Value) -> String {
    let mut fields = base.as_object().unwrap().clone();
    for (name, value) in changes.as_object().unwrap() {
        match value {
            Value::Null => drop(fields.remove(name)),
            value => drop(fields.insert(name.clone(), value.clone())),
        }
    }
    Value::Object(fields).to_string()
}

fn refused(text: &str) -> String {
    format!("{:#}", Config::parse(text).expect_err(text))
}

#[test]
fn models_of_other_kinds_and_fields_that_nobody_reads_are_refused_by_name() {
    let facts = facts();
    let [new, old] = &facts.models[0].configs;
    let cases = [
        (json!({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}), "model_type \"mamba\""),
        (json!({"model_type": "qwen2_audio"}), "model_type \"qwen2_audio\""),
        (json!({"model_type": "qwen3"}), "architectures [\"LlamaForCausalLM\"]"),
        (json!({"model_type": null}), "no model_type"),
        (json!({"architectures": ["LlamaForSequenceClassification"]}), "LlamaForSequenceClassification"),
        (json!({"clip_qkv": 8.0}), "clip_qkv (8.0)"),
        (json!({"layer_types": ["sliding_attention"]}), "layer_types"),
        (json!({"quantization_config": {"bits": 4}}), "quantization_config"),
        (json!({"attention_bias": 1}), "attention_bias is 1"),
        (json!({"mlp_bias": "yes"}), "mlp_bias is \"yes\""),
        (json!({"hidden_act": "gelu"}), "hidden_act is \"gelu\""),
        (json!({"sliding_window": 4096}), "sliding_window is 4096"),
        (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor is 0.5"),
        (json!({"hidden_activation": "gelu"}), "hidden_activation (\"gelu\")"),
        (json!({"residual_multiplier": 0.5}), "residual_multiplier (0.5)"),
        (json!({"num_nextn_predict_layers": 1}), "num_nextn_predict_layers (1)"),
        (json!({"is_causal": false}), "is_causal is false"),
        (json!({"use_rope": false}), "use_rope (false)"),
        (json!({"normalize_queries": false}), "normalize_queries (false)"),
        (json!({"scoring_func": "sigmoid"}), "scoring_func (\"sigmoid\")"),
        (json!({"path_dropout": true}), "path_dropout (true)"),
        (json!({"layer_ids": [0, 1]}), "layer_ids ([0,1])"),
        (json!({"num_experts": 1}), "num_experts (1)"),
        (json!({"turn_id": 0.5}), "turn_id (0.5)"),
    ];
    for (changes, want) in cases {
        for base in [new, old] {
            let said = refused(&with(base, &changes));
            assert!(said.contains(want), "{said}, want {want:?}");
        }
    }
    for base in [new, old] {
        let unsaid = json!({"unsloth_version": "2025.1", "rope_interleaved": false, "problem_type": null});
        let mut fields: serde_json::Map<String, Value> = base.as_object().unwrap().clone();
        fields.extend(unsaid.as_object().unwrap().clone());
        assert_eq!(
            Config::parse(&Value::Object(fields).to_string()).unwrap(),
            Config::parse(&base.to_string()).unwrap()
        );
    }
}

/// What files of the Hub have that changes nothing.
#[test]
fn fields_that_change_nothing_are_notes_and_all_others_are_named_at_once() {
    let facts = facts();
    let [_, base] = &facts.models[0].configs;
    let plain = Config::parse(&base.to_string()).unwrap();
    assert_eq!(plain.notes, [""; 0]);
    let silent = json!({
        "unsloth_fixed": true, "unsloth_version": "2025.1", "activation": "swiglu", "torchscript": false, "num_beams": 4,
        "do_sample": true, "tokenizer_class": "LlamaTokenizer", "task_specific_params": {"a": 1}, "_commit_hash": "0a",
        "dual_chunk_attention_config": {"chunk_size": 262_144}, "is_causal": true, "use_sliding_window": false,
        "max_window_layers": 28,
    });
    assert_eq!(Config::parse(&with(base, &silent)).unwrap(), plain);
    let noted = [
        (json!({"attention_dropout": 0.1}), "attention_dropout 0.1"),
        (json!({"embd_pdrop": 0.5}), "embd_pdrop 0.5"),
        (json!({"lm_head_bias": false}), "lm_head_bias false"),
        (json!({"shared_expert_intermediate_size": 0}), "shared_expert_intermediate_size 0"),
        (json!({"interpolate_factor": 1}), "interpolate_factor 1"),
        (json!({"mup_scale": 1.0}), "mup_scale 1.0"),
        (json!({"pruned_heads": {}}), "pruned_heads {}"),
        (json!({"remote_layers": []}), "remote_layers []"),
        (json!({"made_by": "a tool"}), "made_by \"a tool\""),
        // What names tokens, also one that is not there.
        (json!({"im_start_id": 4}), "im_start_id 4"),
        (json!({"pad_id": -1}), "pad_id -1"),
        (json!({"media_token_ids": [5, 6]}), "media_token_ids [5,6]"),
        (json!({"attention_softmax_in_fp32": true}), "attention_softmax_in_fp32 true"),
        (json!({"num_experts": 0}), "num_experts 0"),
        (json!({"layer_types": ["full_attention", "full_attention"]}), "layer_types"),
    ];
    for (changes, want) in noted {
        let mut read = Config::parse(&with(base, &changes)).unwrap();
        assert!(read.notes.len() == 1 && read.notes[0].contains(want), "{:?}, want {want:?}", read.notes);
        read.notes.clear();
        assert_eq!(read, plain);
    }

    assert!(
        refused(&with(base, &json!({"layer_types": ["full_attention", "chunked_attention"]})))
            .contains("layer_types")
    );
    let wrong = json!({"clip_qkv": 8.0, "mup_scale": 2.0, "pruned_heads": {"1": [2]}, "sparse": true, "is_encoder_decoder": true});
    let text = with(base, &wrong);
    let said = refused(&text);
    let names = ["clip_qkv", "is_encoder_decoder", "mup_scale", "pruned_heads", "sparse"];
    assert!(
        names.iter().all(|name| said.contains(name) && said.contains(&format!("--ignore-field {name}"))),
        "{said}"
    );
    let ignoring = |names: &[&str]| {
        let names: Vec<String> = names.iter().map(|&name| name.into()).collect();
        Config::from_fields(serde_json::from_str(&text).unwrap(), &names)
            .map_err(|error| format!("{error:#}"))
    };
    let mut brave = ignoring(&names).unwrap();
    assert!(
        brave.notes.len() == names.len() && brave.notes.iter().all(|note| note.contains("is ignored")),
        "{brave:?}"
    );
    brave.notes.clear();
    assert_eq!(brave, plain);
    let said = ignoring(&names[1..]).unwrap_err();
    assert!(said.contains("clip_qkv") && !said.contains("mup_scale"), "{said}");
    let said = ignoring(&["clip_qkv", "hidden_size", "nothing"]).unwrap_err();
    assert!(said.contains("--ignore-field hidden_size, nothing"), "{said}");
}

/// DeepSeek-R1-0528-Qwen3-8B has the first one, and the long Llamas of NousResearch the second.
#[test]
fn fields_of_yarn_that_transformers_does_not_read_are_notes() {
    let facts = facts();
    let [_, base] = &facts.models[0].configs;
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32});
    let scaled = |scaling: &Value| with(base, &json!({"rope_parameters": null, "rope_scaling": scaling}));
    let plain = Config::parse(&scaled(&yarn)).unwrap();
    for (field, value) in [("attn_factor", json!(0.878)), ("finetuned", json!(true))] {
        let mut scaling = yarn.clone();
        scaling[field] = value.clone();
        let mut read = Config::parse(&scaled(&scaling)).unwrap();
        let note = format!("rope_scaling: {field} {value} is not used");
        assert!(read.notes.iter().any(|told| told.starts_with(&note)), "{:?}", read.notes);
        read.notes.clone_from(&plain.notes);
        assert_eq!(read, plain);
        let linear = json!({"rope_type": "linear", "factor": 4.0, field: value});
        assert!(refused(&scaled(&linear)).contains(field));
    }
}

/// MLX has the codes of weights under a name of its own, beside that of all others or alone.
#[test]
fn codes_of_mlx_have_two_names() {
    let facts = facts();
    let [_, base] = &facts.models[0].configs;
    let codes = json!({"bits": 4, "group_size": 64});
    let parsed = |changes: Value| Config::parse(&with(base, &changes)).unwrap();
    let want = parsed(json!({"quantization_config": codes}));
    assert_eq!(want.quantization.as_ref(), Some(&codes));
    assert_eq!(parsed(json!({"quantization": codes})), want);
    assert_eq!(parsed(json!({"quantization": codes, "quantization_config": codes})), want);
    let unlike = json!({"quantization": codes, "quantization_config": {"bits": 8, "group_size": 64}});
    assert!(refused(&with(base, &unlike)).contains("quantization ("));
    for of_module in [false, true] {
        let mut said = json!({"bits": 4, "group_size": 32, "mode": "mxfp4"});
        let place = if of_module { &mut said["lm_head"]["mode"] } else { &mut said["mode"] };
        *place = json!("nf4");
        assert!(refused(&with(base, &json!({"quantization": said}))).contains("mode \"nf4\""));
    }
}

/// The base that transformers has for a family counts where a file has none, as that of Llama 2 does not.
#[test]
fn without_a_rope_base_it_is_that_of_the_family() {
    let facts = facts();
    let [new, old] = &facts.models[0].configs;
    let bare = |base: &Value| with(base, &json!({"rope_theta": null, "rope_parameters": null}));
    for base in [new, old] {
        let read = Config::parse(&bare(base)).unwrap();
        assert_eq!(read.rope_theta, 10_000.0);
        assert!(read.notes.len() == 1 && read.notes[0].contains("rope_theta"), "{:?}", read.notes);
    }
}

#[test]
fn absent_fields_are_those_of_transformers() {
    let models = crate::lm::families::families().models;
    let without = |case: &str, names: &[&str]| {
        let mut config = models.iter().find(|model| model.case == case).unwrap().config.clone();
        names.iter().for_each(|name| drop(config.as_object_mut().unwrap().remove(*name)));
        Config::parse(&config.to_string()).unwrap()
    };
    for (case, theta) in
        [("cohere", 500_000.0), ("cohere2", 10_000.0), ("helium", 100_000.0), ("olmo3", 500_000.0)]
    {
        assert_eq!(without(case, &["rope_parameters"]).rope_theta, theta, "{case}");
    }
    let chosen = |case: &str| without(case, &["norm_topk_prob"]).parts.experts.unwrap();
    assert_eq!((chosen("qwen3 next mixture").normalize, chosen("qwen3.5 moe").normalize), (true, true));
}

#[test]
fn families_with_states_refuse_what_they_do_not_compute() {
    let models = crate::lm::families::families().models;
    let refused = |case: &str, changes: &[(&str, Value)], want: &str| {
        let mut config = models.iter().find(|model| model.case == case).unwrap().config.clone();
        for (name, value) in changes {
            config[*name] = value.clone();
        }
        let said = format!("{:#}", Config::parse(&config.to_string()).unwrap_err());
        assert!(said.contains(want), "{said}: {want}");
    };
    refused("lfm2", &[("conv_bias", json!(true))], "conv_bias is true");
    refused("lfm2", &[("layer_types", json!(["conv", "mamba", "conv"]))], "expected conv or full_attention");
    refused("lfm2", &[("layer_types", json!(["conv"]))], "layer_types");
    refused("lfm2", &[("layer_types", Value::Null), ("full_attn_idxs", json!([9]))], "full_attn_idxs is [9]");
    refused("lfm2", &[("block_auto_adjust_ff_dim", json!(3))], "block_auto_adjust_ff_dim is 3");
    refused("lfm2", &[("block_multiple_of", json!(0))], "block_multiple_of is 0");
    refused("qwen3.5", &[("linear_num_key_heads", json!(4))], "linear_num_key_heads 4 does not divide");
    refused("qwen3.5", &[("attn_output_gate", json!(false))], "attn_output_gate is false");
    refused("qwen3.5", &[("mamba_ssm_dtype", json!("bfloat16"))], "mamba_ssm_dtype");
    refused("qwen3 next", &[("mlp_only_layers", json!([9]))], "mlp_only_layers is [9]");
    // As older files say it, and without a list.
    let parts = |case: &str, changes: &[(&str, Value)]| {
        let mut config = models.iter().find(|model| model.case == case).unwrap().config.clone();
        for (name, value) in changes {
            config[*name] = value.clone();
        }
        let config = Config::parse(&config.to_string()).unwrap();
        (
            config.intermediate_size,
            config.parts.mixers.iter().map(|mixer| mixer.is_recurrent()).collect::<Vec<_>>(),
        )
    };
    let old = [("layer_types", Value::Null), ("full_attn_idxs", json!([1])), ("block_ff_dim", json!(96))];
    assert_eq!(parts("lfm2", &old), (64, vec![true, false, true]));
    let every = [("layer_types", Value::Null), ("full_attention_interval", json!(2))];
    assert_eq!(parts("qwen3.5", &every).1, [true, false]);
}

#[test]
fn a_config_with_two_rope_bases_is_refused() {
    let facts = facts();
    let [new, old] = &facts.models[0].configs;
    let llama3 = &facts.models[1].configs[0]["rope_parameters"];
    let rope = |parameters: Value| json!({ "rope_parameters": parameters });
    let cases = [
        (
            new,
            json!({"rope_theta": 10_000.0}),
            "rope_parameters.rope_theta is 500000 and rope_theta is 10000",
        ),
        (old, json!({"rope_theta": 0.0}), "rope_theta is 0"),
        (old, json!({"rope_theta": "many"}), "rope_theta is \"many\""),
        (new, rope(json!({"rope_type": "axial", "rope_theta": 1e4, "factor": 4.0})), "rope_type \"axial\""),
        (new, rope(json!({"full_attention": {"rope_type": "default", "rope_theta": 1e4}})), "full_attention"),
        (new, rope(json!({"rope_type": "linear", "rope_theta": 1e4})), "no factor"),
        (new, rope(json!({"rope_type": "linear", "rope_theta": 1e4, "factor": -1.0})), "factor is -1"),
        (
            new,
            rope(json!({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "beta_fast": 32})),
            "beta_fast (32)",
        ),
        (
            new,
            rope(json!({"rope_type": "default", "type": "linear", "rope_theta": 1e4})),
            "rope_type is \"default\" and type",
        ),
        (
            new,
            rope(json!({"rope_type": "default", "partial_rotary_factor": 0.25, "rope_theta": 1e4})),
            "partial_rotary",
        ),
        (new, rope(json!(7)), "rope_parameters is 7"),
        (old, json!({"rope_scaling": llama3, "rope_parameters": {"rope_theta": 500_000.0}}), "unlike things"),
        (old, json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}), "there is no low_freq_factor"),
    ];
    for (base, changes, want) in cases {
        let said = refused(&with(base, &changes));
        assert!(said.contains(want), "{said}, want {want:?}");
    }
    // Both forms may be there if they say the same.
    let both = with(old, &json!({"rope_scaling": llama3, "rope_parameters": llama3}));
    assert!(matches!(Config::parse(&both).unwrap().rope_scaling, Some(RopeScaling::Llama3 { .. })));
}

#[test]
fn counts_that_no_model_has_are_refused_before_any_work() {
    let base = serde_json::to_value(small(4, 2)).unwrap();
    for (field, value) in [
        ("num_hidden_layers", json!(1 << 30)),
        ("num_hidden_layers", json!(0)),
        ("num_attention_heads", json!(u64::MAX)),
        ("hidden_size", json!(-1)),
        ("vocab_size", json!(1.5)),
        ("vocab_size", json!("many")),
        ("head_dim", json!(7)),
        ("head_dim", json!([8])),
        ("max_position_embeddings", json!(1u64 << 40)),
        ("rms_norm_eps", json!(0)),
        ("tie_word_embeddings", json!(1)),
        ("eos_token_id", json!("</s>")),
    ] {
        let said = refused(&with(&base, &json!({ field: value })));
        let field = if field == "head_dim" && value == 7 { "heads are 7 wide" } else { field };
        assert!(said.contains(field), "{said}");
    }
    let said = refused(&with(&base, &json!({"rms_norm_eps": null})));
    assert!(said.contains("no rms_norm_eps"), "{said}");
}

/// Changes the tensors of a random model, and opens it.
fn opened(
    config: &Config,
    change: impl FnOnce(&mut HashMap<String, Tensor>, &Path),
) -> Result<Files, String> {
    let folder = tempfile::tempdir().unwrap();
    random_model::write(folder.path(), config, 7, DType::F32).unwrap();
    let file = folder.path().join("model.safetensors");
    let mut tensors = safetensors::load(&file, &Device::Cpu).unwrap();
    change(&mut tensors, folder.path());
    safetensors::save(&tensors, file).unwrap();
    Files::open(folder.path()).map_err(|error| format!("{error:#}"))
}

#[test]
fn tensors_without_a_place_in_the_model_are_refused_by_name() {
    let zeros = |width: usize| Tensor::zeros(width, DType::F32, &Device::Cpu).unwrap();
    for (name, width) in [("self_attn.q_proj.bias", 32), ("self_attn.q_norm.weight", 8)] {
        let said = opened(&small(4, 2), |tensors, _| {
            for layer in 0..2 {
                tensors.insert(format!("model.layers.{layer}.{name}"), zeros(width));
            }
        });
        let said = said.unwrap_err();
        assert!(
            said.contains(&format!("model.layers.0.{name}\" and 1 more")) && said.contains("no place"),
            "{said}"
        );
    }
    // What older versions of transformers saved besides follows from the config.
    let frequencies = "model.layers.0.self_attn.rotary_emb.inv_freq".to_owned();
    opened(&small(4, 2), |tensors, _| drop(tensors.insert(frequencies, zeros(4)))).unwrap();
}

#[test]
fn an_output_layer_beside_a_tied_table_is_tied_only_if_it_is_equal() {
    let tied = Config { tie_word_embeddings: true, ..small(4, 2) };
    let with_head = |off: f64| {
        opened(&tied, |tensors, _| {
            let table = &tensors["model.embed_tokens.weight"];
            let head = (table.copy().unwrap() + off).unwrap();
            tensors.insert("lm_head.weight".into(), head);
        })
    };
    assert_eq!(with_head(0.0).unwrap().config, tied);
    assert_eq!(with_head(0.5).unwrap().config, Config { tie_word_embeddings: false, ..tied.clone() });
}

#[test]
fn the_dtype_of_the_files_is_known_without_reading_them() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let folder = tempfile::tempdir().unwrap();
        random_model::write(folder.path(), &small(4, 2), 7, dtype).unwrap();
        let files = Files::open(folder.path()).unwrap();
        assert_eq!((files.dtype().unwrap(), files.bytes_read()), (dtype, 0));
        assert_eq!(files.bytes() as usize, small(4, 2).parameters() * dtype.size_in_bytes());
    }
    let norm = "model.norm.weight";
    let mixed = |dtype: DType| {
        opened(&small(4, 2), |tensors, _| {
            let norm_of = tensors[norm].to_dtype(dtype).unwrap();
            tensors.insert(norm.into(), norm_of);
        })
    };
    assert_eq!(mixed(DType::BF16).unwrap().dtype().unwrap(), DType::F32);
}

#[test]
fn a_folder_of_another_kind_is_refused_by_the_program_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    random_model::write(folder.path(), &small(4, 2), 7, DType::F32).unwrap();
    let path = folder.path().join("config.json");
    let config: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    fs::write(&path, with(&config, &json!({"model_type": "mamba", "architectures": ["MambaForCausalLM"]})))
        .unwrap();
    let output = crate::lm::llama(&["--model", folder.path().to_str().unwrap(), "--prompt", "x"]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{said}");
    assert!(said.contains("config.json: model_type \"mamba\" is not supported"), "{said}");
}

#[test]
fn fields_of_another_family_that_have_no_effect_are_refused_by_name() {
    let models = crate::lm::families::families().models;
    let cases = [
        ("gemma2", "rope_local_base_freq", json!(10_000.0)),
        ("gemma2", "sliding_window_pattern", json!(2)),
        ("gemma2", "_sliding_window_pattern", json!(2)),
        ("gemma3", "sliding_window_size", json!(4)),
        ("qwen2", "attention_bias", json!(false)),
        ("llama with biases", "original_max_position_embeddings", json!(8)),
    ];
    for (case, field, value) in cases {
        let base = &models.iter().find(|model| model.case == case).unwrap().config;
        let said = refused(&with(base, &json!({ (field): value })));
        assert!(said.contains(field), "{case}: {said}");
    }
}

/// The config of a small model of a family.
fn of_family(case: &str) -> Value {
    crate::lm::families::families().models.into_iter().find(|model| model.case == case).unwrap().config
}

#[test]
fn the_name_of_two_that_transformers_sets_last_counts() {
    let text = |kinds: [&str; 2]| json!(kinds);
    let (a, b) = (["linear_attention", "full_attention"], ["full_attention", "linear_attention"]);
    let mixers = |case: &str, fields: Value| {
        let read = Config::parse(&with(&of_family(case), &fields)).unwrap();
        read.parts.mixers.iter().map(|mixer| mixer.mamba().is_some()).collect::<Vec<_>>()
    };
    let both = json!({"layer_types": text(a), "layers_block_type": text(b), "num_hidden_layers": 2});
    assert_eq!(mixers("granite hybrid", both.clone()), [false, true]);
    assert_eq!(mixers("nemotron h", both), [true, false]);
    let names = json!({"moe_k": 2, "num_experts_per_tok": 1});
    let ernie = Config::parse(&with(&of_family("ernie moe"), &names)).unwrap();
    assert_eq!(ernie.parts.experts.unwrap().chosen, 1);
}

#[test]
fn scores_of_gemma_3_have_no_cap_as_in_transformers() {
    let cap = |case: &str| {
        let fields = with(&of_family(case), &json!({"attn_logit_softcapping": 2.0}));
        Config::parse(&fields).unwrap().parts.scores_cap
    };
    assert_eq!([cap("gemma2"), cap("gemma3")], [Some(2.0), None]);
}

#[test]
fn configs_of_older_transformers_say_the_same_of_newer_families() {
    let parsed = |text: &str| {
        let Config { parts, rope_theta, rope_scaling, .. } = Config::parse(text).unwrap();
        (parts, rope_theta, rope_scaling)
    };
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8});
    let alpha = json!({"type": "dynamic", "alpha": 50.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0});
    let cases = [
        ("olmo3", json!({"rope_theta": 10_000.0, "rope_scaling": yarn})),
        (
            "hunyuan",
            json!({"rope_theta": 10_000.0, "rope_scaling": alpha, "use_qk_norm": true, "use_cla": false}),
        ),
        ("glm4", json!({"rope_theta": 10_000.0, "partial_rotary_factor": 0.5})),
        (
            "gpt oss",
            json!({
                "rope_theta": 10_000.0, "experts_per_token": 2, "initial_context_length": 8, "num_experts": 5,
                "rope_scaling": {
                    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 4.0, "original_max_position_embeddings": 8,
                    "rope_type": "yarn", "truncate": false,
                },
            }),
        ),
        ("glm", json!({"rope_theta": 10_000.0})),
        ("nemotron", json!({"rope_theta": 10_000.0})),
        ("stablelm", json!({"rope_theta": 10_000.0})),
        ("lfm2 moe", json!({"rope_theta": 10_000.0, "tie_embedding": true})),
        ("granite moe", json!({"rope_theta": 10_000.0})),
        ("ernie moe", json!({"rope_theta": 10_000.0})),
        ("starcoder2", json!({"rope_theta": 10_000.0, "mlp_type": "default", "norm_type": "layer_norm"})),
        ("gemma", json!({"rope_theta": 10_000.0, "hidden_act": "gelu"})),
        (
            "cohere2",
            json!({
                "rope_theta": 10_000.0, "layer_switch": 4, "order_of_interleaved_layers": "local_attn_first",
                "position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "use_embedding_sharing": true,
                "use_gated_activation": true, "use_parallel_block": true, "use_parallel_embedding": false,
            }),
        ),
    ];
    for (case, older) in cases {
        let newer = of_family(case);
        let mut base = newer.clone();
        base.as_object_mut().unwrap().remove("rope_parameters");
        assert_eq!(parsed(&with(&base, &older)), parsed(&newer.to_string()), "{case}");
    }
    // What gpt-oss has without fields.
    let mut bare = of_family("gpt oss");
    let fields = bare.as_object_mut().unwrap();
    for name in
        ["rope_parameters", "sliding_window", "layer_types", "attention_bias", "swiglu_limit", "swiglu_alpha"]
    {
        fields.remove(name);
    }
    let (parts, theta, scaling) = parsed(&bare.to_string());
    let Some(RopeScaling::Yarn { factor, attention_factor, truncate, .. }) = scaling else {
        panic!("{scaling:?}")
    };
    assert_eq!((theta, factor, truncate), (150_000.0, 32.0, false));
    assert!((attention_factor - 1.3466).abs() < 1e-4, "{attention_factor}");
    assert_eq!((parts.windows, parts.qkv_bias, parts.output_bias), (vec![Some(128), None], true, true));
    assert_eq!(parts.experts.unwrap().gate, ExpertGate::Clamped { alpha: 1.702, limit: 7.0 });
    // What released files have that transformers does not read.
    let released = [
        (
            "hunyuan",
            json!({
                "attention_head_dim": 8, "cla_share_factor": 2, "dense_list": [4096, 0], "eod_token_id": 3, "im_end_id": 5,
                "im_newline_id": 11, "im_start_id": 4, "mask_init_id": 12, "norm_type": "rms", "num_experts": 1, "org_vocab_size": 37,
                "pad_id": 7, "text_end_id": 7, "text_start_id": 6, "use_cla": false, "use_qk_norm": true,
            }),
        ),
        (
            "minimax m2",
            json!({
                "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0, "layernorm_mlp_beta": 1.0,
                "max_model_len": 196_608, "swa_rope_theta": -1.0,
            }),
        ),
        (
            "starcoder2",
            json!({
                "activation_function": "gelu", "attention_softmax_in_fp32": true, "layer_norm_epsilon": 1e-5,
                "scale_attention_softmax_in_fp32": true, "scale_attn_weights": true,
            }),
        ),
        (
            "ernie moe",
            json!({
                "moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_use_aux_free": true, "moe_layer_end_index": -1,
                "num_nextn_predict_layers": 1,
            }),
        ),
        ("qwen3 moe", json!({"qkv_bias": false, "shared_expert_intermediate_size": 0, "use_qk_norm": true})),
        (
            "qwen3.5",
            json!({"attn_output_gate": true, "mtp_num_hidden_layers": 1, "output_gate_type": "swish"}),
        ),
        (
            "exaone4",
            json!({
                "_num_mtp_layers": 1, "mtp_loss_scaling_factor": 0.05, "mtp_share_layers": true, "num_nextn_predict_layers": 1,
            }),
        ),
        ("llama with biases", json!({"architectures": ["LLaMAForCausalLM"], "model_max_length": 4096})),
    ];
    for (case, fields) in released {
        let base = of_family(case);
        assert_eq!(parsed(&with(&base, &fields)), parsed(&base.to_string()), "{case}");
    }
    // A large Devstral has zeros in the place of both factors, which transformers takes as absent.
    let zeros = json!({
        "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 8, "mscale": 1.0,
        "mscale_all_dim": 0.0, "llama_4_scaling_beta": 0.0,
    });
    let (parts, _, scaling) = parsed(&with(&of_family("ministral3"), &json!({"rope_parameters": zeros})));
    let Some(RopeScaling::Yarn { attention_factor, .. }) = scaling else { panic!("{scaling:?}") };
    assert_eq!((parts.temperature, attention_factor), (None, 0.1 * 4f64.ln() + 1.0));
    let ernie = with(&of_family("ernie"), &json!({"architectures": ["Ernie4_5_ForCausalLM"]}));
    assert_eq!(Config::parse(&ernie).unwrap().family, "ernie4_5");
    // Without a list, each fourth layer of OLMo 3 sees all tokens; EXAONE 4 has the pattern in its config.
    let deep = json!({"layer_types": null, "num_hidden_layers": 5, "sliding_window_pattern": null});
    let (window, full) = (Some(4), None);
    let windows = |text: &str| Config::parse(text).unwrap().parts.windows;
    assert_eq!(windows(&with(&of_family("olmo3"), &deep)), [window, window, window, full, window]);
    let pattern = json!({"layer_types": null, "num_hidden_layers": 5, "sliding_window_pattern": 2});
    let parts = Config::parse(&with(&of_family("exaone4"), &pattern)).unwrap().parts;
    assert_eq!(parts.windows, [window, full, window, full, window]);
    assert_eq!(parts.rotary, [true, false, true, false, true]);
    // Beside the list its text says nothing.
    let text = json!({"sliding_window_pattern": "LLLG"});
    assert_eq!(windows(&with(&of_family("exaone4"), &text)), [window, full]);
    // What NVIDIA's hybrids call the same.
    let newer = of_family("nemotron h");
    let mut older = newer.clone();
    let fields = older.as_object_mut().unwrap();
    for (was, is) in [("time_step_limit", "mamba_dt_limit"), ("expand", "mamba_expand")] {
        let value = fields.remove(was).unwrap();
        fields.insert(is.into(), value);
    }
    assert_eq!(parsed(&older.to_string()), parsed(&newer.to_string()));
    // Nemotron 3 says two things in two ways.
    older["mamba_dt_limit"][1] = json!(1e308);
    older["norm_eps"] = older["layer_norm_epsilon"].clone();
    assert_eq!(parsed(&older.to_string()), parsed(&newer.to_string()));
    older["norm_eps"] = json!(0.25);
    let said = refused(&older.to_string());
    assert!(said.contains("norm_eps is 0.25"), "{said}");
    older["norm_eps"] = json!(null);
    older["mamba_dt_limit"][0] = json!(0.1);
    let said = refused(&older.to_string());
    assert!(said.contains("time_step_limit is"), "{said}");
}

#[test]
fn what_newer_families_do_not_compute_is_refused_by_name() {
    let alpha = json!({"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0, "alpha": 50.0});
    let no_alpha = json!({"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0, "mscale": 1.0});
    let beta = json!({
        "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 8,
        "llama_4_scaling_beta": 0.5,
    });
    let of_zero = json!({"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0, "alpha": 0.0});
    let cases = [
        ("exaone4", json!({"layer_types": null, "sliding_window_pattern": "LLLG"}), "sliding_window_pattern"),
        (
            "exaone4 without windows",
            json!({"layer_types": ["sliding_attention", "full_attention"]}),
            "layer_types has sliding_attention",
        ),
        ("hunyuan", json!({"use_cla": true}), "use_cla is true"),
        ("hunyuan", json!({"use_qk_norm": false}), "use_qk_norm is false"),
        ("hunyuan", json!({"rope_parameters": no_alpha}), "mscale"),
        ("hunyuan", json!({"rope_parameters": of_zero}), "alpha is 0"),
        ("llama with biases", json!({"rope_parameters": alpha}), "alpha (50.0)"),
        ("ernie", json!({"compression_ratio": 2.0}), "compression_ratio is 2.0"),
        ("ernie", json!({"attention_bias": true}), "attention_bias is true"),
        ("ernie moe", json!({"use_bias": true}), "use_bias is true"),
        ("ernie moe", json!({"moe_gate": "top2"}), "moe_gate is \"top2\""),
        ("ernie moe", json!({"moe_k": 7}), "num_experts_per_tok is 7, and there are 6 experts"),
        ("ernie moe", json!({"moe_norm_min": -1.0}), "moe_norm_min is -1"),
        ("glm", json!({"sliding_window": 4}), "sliding_window is 4"),
        ("olmo3", json!({"rope_local_base_freq": 10_000.0}), "rope_local_base_freq"),
        ("ministral3", json!({"rope_parameters": null}), "there is no llama_4_scaling_beta"),
        ("mistral", json!({"rope_parameters": beta}), "llama_4_scaling_beta (0.5)"),
        ("cohere", json!({"use_qk_norm": true}), "use_qk_norm is true"),
        ("cohere", json!({"layer_norm_eps": null}), "there is no layer_norm_eps"),
        ("cohere2", json!({"use_parallel_block": false}), "use_parallel_block is false"),
        ("cohere2", json!({"rotary_pct": 0.5}), "rotary_pct is 0.5"),
        ("nemotron", json!({"hidden_act": "silu"}), "hidden_act is \"silu\""),
        ("arcee", json!({"hidden_act": "silu"}), "hidden_act is \"silu\""),
        ("llama with biases", json!({"norm_eps": 1e-5}), "norm_eps"),
        ("gemma", json!({"hidden_act": "silu"}), "hidden_act is \"silu\""),
        ("stablelm", json!({"qk_layernorm": true}), "qk_layernorm is true"),
        ("gpt oss", json!({"swiglu_limit": 0.0}), "swiglu_limit is 0"),
        ("gpt oss", json!({"num_experts": 6}), "num_local_experts is 5 and num_experts is 6"),
        ("gpt oss", json!({"norm_topk_prob": false}), "norm_topk_prob"),
        ("gpt oss", json!({"hidden_act": "gelu"}), "hidden_act is \"gelu\""),
        ("lfm2 moe", json!({"block_auto_adjust_ff_dim": true}), "block_auto_adjust_ff_dim"),
        ("lfm2 moe", json!({"conv_bias": true}), "conv_bias is true"),
        ("granite moe", json!({"shared_intermediate_size": 20}), "shared_intermediate_size"),
        ("granite moe", json!({"attention_multiplier": 0.0}), "attention_multiplier is 0"),
        ("mistral4", json!({"rope_parameters": null}), "there is no llama_4_scaling_beta"),
        ("mistral4", json!({"scoring_func": "sigmoid"}), "scoring_func is \"sigmoid\""),
        ("mistral4", json!({"partial_rotary_factor": 0.7}), "partial_rotary_factor"),
        ("starcoder2", json!({"hidden_act": "silu"}), "hidden_act is \"silu\""),
        (
            "starcoder2",
            json!({"layer_norm_epsilon": 1e-6}),
            "layer_norm_epsilon is 1e-6, and norm_epsilon is",
        ),
        ("starcoder2", json!({"scale_attn_weights": false}), "scale_attn_weights is false"),
        ("hunyuan", json!({"num_experts": 8}), "num_experts is 8"),
        ("hunyuan", json!({"org_vocab_size": 36}), "org_vocab_size is 36, and vocab_size is 37"),
        ("minimax m2", json!({"layernorm_mlp_beta": 3.5}), "layernorm_mlp_beta is 3.5"),
        ("qwen3 moe", json!({"qkv_bias": true}), "qkv_bias is true"),
        ("qwen3.5", json!({"output_gate_type": "sigmoid"}), "output_gate_type is \"sigmoid\""),
        (
            "llama4",
            json!({"layer_types": vec!["sliding_attention"; 4]}),
            "layer_types is [\"sliding_attention\"",
        ),
        ("hunyuan moe", json!({"moe_topk": [1, 2]}), "moe_topk is [1,2]"),
        ("hunyuan moe", json!({"moe_intermediate_size": [8, 8]}), "moe_intermediate_size is 8"),
        ("llama4", json!({"attention_chunk_size": 0}), "attention_chunk_size is 0"),
        ("llama4", json!({"moe_layers": [4]}), "moe_layers is [4]"),
        ("llama4", json!({"no_rope_layers": [1, 0]}), "no_rope_layers is [1,0]"),
        ("llama4", json!({"moe_intermediate_size": 8}), "moe_intermediate_size is a field of other families"),
        ("llama4", json!({"hidden_act": "gelu"}), "hidden_act is \"gelu\""),
        (
            "gemma4",
            json!({"num_kv_shared_layers": 4}),
            "no layer before has keys for layer 0, which has a window",
        ),
        (
            "gemma4",
            json!({"num_kv_shared_layers": 3}),
            "no layer before has keys for layer 1, which is without a",
        ),
        ("gemma4", json!({"num_kv_shared_layers": -1}), "num_kv_shared_layers is -1"),
        (
            "gemma4",
            json!({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 36}),
            "vocab_size_per_layer_input is 36, and layers have embeddings of all 37 tokens",
        ),
        ("gemma4", json!({"use_bidirectional_attention": "all"}), "use_bidirectional_attention is \"all\""),
        ("gemma4", json!({"per_layer_config": {"0": {"head_dim": 8}}}), "per_layer_config is"),
        (
            "gemma4",
            json!({"per_layer_config": {"1": {"head_dim": 8}, "3": {"head_dim": 16}}}),
            "per_layer_config is",
        ),
        (
            "gemma4",
            json!({"per_layer_config": {"1": {"sliding_window": 8}, "3": {"sliding_window": 8}}}),
            "per_layer_config is",
        ),
        ("gemma4", json!({"global_head_dim": 32}), "global_head_dim is 32, and per_layer_config says 24"),
        ("gemma4 mixture", json!({"num_experts": null}), "there is no num_experts"),
        ("starcoder2", json!({"norm_type": "rms"}), "norm_type is \"rms\""),
    ];
    for (case, change, want) in cases {
        let said = refused(&with(&of_family(case), &change));
        assert!(said.contains(want), "{case}: {said}, want {want:?}");
    }
}
