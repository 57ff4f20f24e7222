//! Layers that are cut in unlike shares.

use std::path::Path;
use std::sync::Arc;

use candle_core::DType;
use candle_core::quantized::GgmlDType;
use candle_lm::config::Config;
use candle_lm::engine::ModelOptions;
use candle_lm::files::Files;
use candle_lm::generate::{Completion, Task, generate};
use candle_lm::random_model;
use candle_lm::sample::Sampling;
use candle_shard::parallel::Shares;
use lm::info::Info;
use serde_json::Value;
use test_utils::on_ranks;
use test_utils::programs::refuses;

use crate::lm::families::{families, write};
use crate::lm::{TOKENS, config, gguf, llama};

/// What all ranks write with these shares, greedily.
fn written(path: &Path, shares: Option<&str>, [ranks, stages]: [usize; 2]) -> Vec<Completion> {
    let mut files = Files::open(path).unwrap();
    files.ends.clear();
    let held =
        ModelOptions { shares: shares.map(|shares| shares.parse().unwrap()), ..ModelOptions::of(DType::F32) };
    let task =
        Task { prompt: TOKENS.to_vec(), most: 8, cache_tokens: None, sampling: Sampling::default(), held };
    let files = Arc::new(files);
    on_ranks(ranks, "shares", move |ctx| generate(ctx, stages, &files, &task, |_| Ok(true)))
}

/// Shares, ranks and stages.
const MESHES: [(&str, [usize; 2]); 9] = [
    ("3:1", [2, 1]),
    ("1:3", [2, 1]),
    ("1:0", [2, 1]),
    ("0:7", [2, 1]),
    ("1:1", [2, 1]),
    ("2:1:1", [3, 1]),
    ("5:0:1", [3, 1]),
    ("4:3:2:1", [4, 1]),
    ("3:1", [4, 2]),
];

fn assert_alike(path: &Path, what: &str) {
    let alone = written(path, None, [1, 1]).remove(0);
    for (shares, mesh) in MESHES {
        for rank in written(path, Some(shares), mesh) {
            assert_eq!(rank.tokens, alone.tokens, "{what} in shares {shares} on {mesh:?}");
            let near = |((a, x), (b, y)): (&(u32, f32), &(u32, f32))| a != b || (x - y).abs() < 1e-3;
            assert!(
                rank.logits_top.iter().zip(&alone.logits_top).all(near),
                "{what} in shares {shares} on {mesh:?}"
            );
        }
    }
}

#[test]
fn models_in_unlike_shares_write_the_text_of_one_rank() {
    let cases = [
        ("as many key heads", config(4, 4)),
        ("grouped heads", config(6, 3)),
        ("one key head", config(6, 1)),
        ("a tied table", Config { tie_word_embeddings: true, ..config(4, 2) }),
    ];
    for (case, config) in cases {
        let folder = tempfile::tempdir().unwrap();
        random_model::write(folder.path(), &config, 7, DType::F32).unwrap();
        assert_alike(folder.path(), case);
    }
    for family in families().models.iter().filter(|family| {
        let cases = [
            "olmo2",
            "gemma3",
            "phi3",
            "mixtral",
            "qwen3 moe",
            "deepseek v3",
            "deepseek v3 mixture",
            "lfm2",
            "qwen3.5",
            "qwen3 next",
        ];
        cases.contains(&&*family.case)
    }) {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &family.config);
        assert_alike(folder.path(), &family.case);
    }
}

#[test]
fn quantized_models_in_unlike_shares_write_the_text_of_one_rank() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    for (query, key_value, hidden) in [(8, 4, 256), (8, 2, 256), (4, 1, 128)] {
        let fields = serde_json::json!({
            "model_type": "llama", "hidden_size": hidden, "intermediate_size": 320, "num_hidden_layers": 2,
            "num_attention_heads": query, "num_key_value_heads": key_value, "vocab_size": 37,
            "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        });
        gguf::write(&path, &fields, GgmlDType::Q4_0);
        assert_alike(&path, &format!("{query} heads and {key_value} key heads"));
    }
}

#[test]
fn each_rank_holds_its_share_of_the_bytes_and_info_tells_so() {
    let folder = tempfile::tempdir().unwrap();
    let config = Config { vocab_size: 256, intermediate_size: 64, ..config(4, 4) };
    random_model::write(folder.path(), &config, 7, DType::F32).unwrap();
    let ranks = written(folder.path(), Some("3:1"), [2, 1]);
    let (a, b) = (ranks[0].bytes as f64, ranks[1].bytes as f64);
    assert!((a / b - 3.0).abs() < 0.1, "{a} and {b}");
    let files = Files::open(folder.path()).unwrap();
    let shares: Shares = "3:1".parse().unwrap();
    let held = ModelOptions { shares: Some(shares), ..ModelOptions::of(DType::F32) };
    assert_eq!(Info::new(&files, 2, &held).unwrap().bytes_per_rank, [ranks[0].bytes, ranks[1].bytes]);
    let path = folder.path().to_str().unwrap();
    let told = llama(&["info", "--model", path, "--tp", "2", "--shares", "3:1", "--json", "-"]);
    let told: Value = serde_json::from_slice(&told.stdout).unwrap();
    assert_eq!(told["bytes_per_rank"], serde_json::json!([ranks[0].bytes, ranks[1].bytes]));
}

#[test]
fn feed_forward_layers_make_up_for_heads_that_do_not_divide() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let fields = |query: usize, hidden: usize, inner: usize| {
        serde_json::json!({
            "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 2,
            "num_attention_heads": query, "num_key_value_heads": 3, "vocab_size": 48,
            "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        })
    };
    // Heads of 32 columns, and units of as many columns of the feed-forward layer.
    for (dtype, query, hidden, inner, unit) in
        [(GgmlDType::Q4_0, 6, 192, 512, 32), (GgmlDType::F32, 9, 72, 240, 8), (GgmlDType::F32, 3, 48, 101, 1)]
    {
        gguf::write(&path, &fields(query, hidden, inner), dtype);
        let files = Files::open(&path).unwrap();
        let of = |shares: Option<&str>| {
            let shares = shares.map(|shares| shares.parse().unwrap());
            let held = ModelOptions { shares, ..ModelOptions::of(DType::F32) };
            Info::new(&files, 2, &held).unwrap().bytes_per_rank
        };
        let bytes_of = |numbers: usize| numbers / dtype.block_size() * dtype.type_size();
        // Half of the unit that no cut divides, in both layers.
        let most = bytes_of(2 * 3 * hidden * unit);
        let (even, by_hand) = (of(None), of(Some("1:1")));
        assert!(even[0].abs_diff(even[1]) <= most, "{dtype:?}: {even:?}");
        assert_eq!(even.iter().sum::<usize>(), by_hand.iter().sum::<usize>());
        // Shares by hand are those of all layers: one rank has two of the three heads.
        let heads = 2 * (2 * hidden * hidden + 2 * hidden * hidden * 3 / query) / 3;
        assert!(by_hand[0] - by_hand[1] >= bytes_of(heads) - most, "{dtype:?}: {by_hand:?}");
        let alone = written(&path, None, [1, 1]).remove(0);
        for mesh in [[2, 1], [4, 1], [4, 2]] {
            for rank in written(&path, None, mesh) {
                assert_eq!(rank.tokens, alone.tokens, "{dtype:?} on {mesh:?}");
            }
        }
        let held: Vec<usize> = written(&path, None, [2, 1]).iter().map(|rank| rank.bytes).collect();
        assert_eq!(held, even, "what info tells is what ranks hold");
    }
}

#[test]
fn shares_that_do_not_fit_are_one_error() {
    refuses(
        llama,
        &[
            (&["generate", "--tp", "2", "--shares", "3:1:1"], &["--shares 3:1:1", "3", "--tp 2"]),
            (&["generate", "--shares", "3:1"], &["--shares 3:1", "--tp 1"]),
            (&["info", "--tp", "2", "--shares", "1"], &["--shares 1"]),
            (&["generate", "--tp", "2", "--shares", "0:0"], &["0"]),
            (&["generate", "--tp", "2", "--shares", "a:b"], &["a:b"]),
            (&["generate", "--tp", "2", "--shares", "3:-1"], &["3:-1"]),
        ],
    );
}
