//! Configs of models with layers of Mamba 2, and what ranks keep of a text.

use candle_core::DType;
use candle_lm::config::Config;
use candle_lm::memory;
use serde_json::{Value, json};

use crate::lm::families::families;

fn of_family(case: &str) -> Value {
    families().models.into_iter().find(|model| model.case == case).unwrap().config
}

fn with(config: &Value, change: &Value) -> String {
    let mut config = config.clone();
    config.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
    config.to_string()
}

#[test]
fn older_configs_say_the_same() {
    let parts = |text: &str| Config::parse(text).unwrap().parts;
    let newer = of_family("nemotron h");
    let mut older = newer.clone();
    older.as_object_mut().unwrap().remove("layers_block_type");
    let pattern = json!({"hybrid_override_pattern": "M-*M", "num_hidden_layers": 4});
    assert_eq!(parts(&with(&older, &pattern)), parts(&newer.to_string()));
    let granite = of_family("granite hybrid");
    let words = json!({"layer_types": ["mamba", "attention"]});
    assert_eq!(parts(&with(&granite, &words)), parts(&granite.to_string()));
    let auto = json!({"mamba_d_head": "auto"});
    assert_eq!(parts(&with(&granite, &auto)), parts(&granite.to_string()));
}

#[test]
fn the_infinity_of_python_is_read() {
    let mamba = of_family("mamba2");
    let text = mamba.to_string();
    let word = r#"{"__float__":"Infinity"}"#;
    assert!(text.contains(word));
    assert_eq!(Config::parse(&text.replace(word, "Infinity")).unwrap(), Config::parse(&text).unwrap());
    let said = Config::parse(&text.replace(word, "-Infinity")).unwrap_err().to_string();
    assert!(said.contains("time_step_limit is [0.0,{\"__float__\":\"-Infinity\"}]"), "{said}");
    // In a text it is one.
    let named = with(&mamba, &json!({"_name_or_path": "a \"quoted\\\" Infinity"}));
    assert!(Config::parse(&named.replace(word, "Infinity")).is_ok());
}

#[test]
fn what_is_not_computed_is_refused_by_name() {
    let cases = [
        ("granite hybrid", json!({"time_step_limit": [0.1, 1.0]}), "time_step_limit is [0.1,1.0]"),
        ("granite hybrid", json!({"mamba_d_head": 12}), "mamba_d_head is 12"),
        (
            "granite hybrid",
            json!({"position_embedding_type": "alibi"}),
            "position_embedding_type is \"alibi\"",
        ),
        ("granite hybrid", json!({"layer_types": ["mamba", "conv"]}), "layer_types is"),
        ("granite hybrid", json!({"normalization_function": "layernorm"}), "normalization_function"),
        ("granite hybrid with groups", json!({"mamba_n_groups": 4}), "4 groups do not divide the 6 heads"),
        ("mamba2", json!({"expand": 3}), "not expand 3 times hidden_size"),
        ("mamba2", json!({"rms_norm": false}), "rms_norm is false"),
        ("nemotron h", json!({"layers_block_type": ["linear_attention", "conv"]}), "layer_types is"),
        ("nemotron h with experts", json!({"mlp_bias": true}), "mlp_bias is true"),
        ("nemotron h with latents", json!({"topk_group": 1}), "topk_group is 1"),
        ("falcon h1", json!({"projectors_bias": true}), "projectors_bias is true"),
        ("falcon h1", json!({"mlp_multipliers": [1.0]}), "mlp_multipliers is [1.0]"),
        ("falcon h1", json!({"mamba_d_head": 8}), "together they are not the 80 of mamba_d_ssm"),
        ("falcon h1", json!({"time_step_limit": [0.1, 1.0]}), "time_step_limit is"),
        ("falcon h1", json!({"layer_types": ["hybrid", "mamba"]}), "layer_types is"),
        ("nemotron h", json!({"layers_block_type": null}), "there is no layers_block_type"),
        (
            "nemotron h",
            json!({"layers_block_type": null, "hybrid_override_pattern": "MX"}),
            "hybrid_override_pattern is \"MX\"",
        ),
        ("nemotron h", json!({"mlp_hidden_act": "silu"}), "mlp_hidden_act is \"silu\""),
    ];
    for (case, change, want) in cases {
        let said = format!("{:#}", Config::parse(&with(&of_family(case), &change)).unwrap_err());
        assert!(said.contains(want), "{case}: {said}, want {want:?}");
    }
}

#[test]
fn states_of_one_group_have_copies_of_what_it_reads_and_writes() {
    let bytes = |case: &str, tp: usize| {
        let config = Config::parse(&of_family(case).to_string()).unwrap();
        let attention =
            (0..config.num_hidden_layers).filter(|&layer| config.parts.mixer(layer).is_attention()).count();
        let heads = config.heads();
        let keys = if heads.key_value < tp { heads.query } else { heads.key_value };
        memory::cache_bytes(&config, DType::F32, [1, 10], [tp, 1, 1])
            - attention * 2 * keys * heads.dim * 10 * 4
    };
    // 5 heads of 16 inputs with states of 6: three inputs of 80 channels and of 2 · 6 on each rank.
    let of_rank = |tp: usize| 4 * (3 * (80 + 12 * tp) + 80 * 6);
    assert_eq!([1, 2, 3].map(|tp| bytes("granite hybrid", tp)), [1, 2, 3].map(of_rank));
    // As many in both layers, beside keys and values.
    assert_eq!([1, 2, 3].map(|tp| bytes("falcon h1", tp)), [1, 2, 3].map(|tp| 2 * of_rank(tp)));
    // 8 heads of 8 inputs in 2 groups, in two layers.
    let all = 2 * 4 * (3 * (64 + 2 * 2 * 6) + 64 * 6);
    assert_eq!([1, 2].map(|tp| bytes("mamba2", tp)), [all; 2]);
}
