//! What is told of a model, and what each rank would hold; and the flags of writing.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use candle_core::DType;
use candle_core::quantized::GgmlDType;
use candle_lm::config::Config;
use candle_lm::engine::{Engine, ModelOptions, Purpose};
use candle_lm::files::Files;
use candle_lm::{memory, random_model};
use lm::info::Info;
use serde_json::{Value, json};
use test_utils::on_ranks;

use crate::lm::config as small;
use crate::lm::families::families;

#[test]
fn what_each_rank_would_hold_is_what_it_holds() {
    let folder = tempfile::tempdir().unwrap();
    let config = Config { vocab_size: 256, ..small(6, 3) };
    random_model::write(folder.path(), &config, 7, DType::F16).unwrap();
    let files = Files::open(folder.path()).unwrap();
    let before = files.bytes_read();
    let alone = Info::new(&files, 1, &ModelOptions::of(DType::F32)).unwrap();
    assert_eq!(files.bytes_read(), before, "headers suffice");
    assert_eq!(alone.bytes_per_rank, [config.parameters() * 4]);
    assert_eq!(
        alone.bytes_by_type.into_iter().collect::<Vec<_>>(),
        [("F16".to_owned(), config.parameters() as u64 * 2)]
    );
    for ranks in 2..=3 {
        let flags = ["--tp", &ranks.to_string(), "--max-tokens", "1", "--json", "-"].map(str::to_owned);
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let model = ["--model", folder.path().to_str().unwrap()];
        let written = crate::lm::llama(&[&["generate", "--prompt", "x"], &model[..], &flags].concat());
        let written: Value = serde_json::from_slice(&written.stdout).unwrap();
        let told = crate::lm::llama(&[&["info"], &model[..], &["--tp", flags[1], "--json", "-"]].concat());
        let told: Value = serde_json::from_slice(&told.stdout).unwrap();
        assert_eq!(told["bytes_per_rank"], written["bytes_per_rank"]);
        assert_eq!((&told["family"], &told["layers"]), (&"llama".into(), &2.into()));
    }
}

#[test]
fn weights_are_counted_from_the_headers_as_ranks_hold_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.gguf");
    for model in crate::lm::families::families().models {
        let mut sources = vec![folder.path().to_owned()];
        crate::lm::families::write(folder.path(), &model.config);
        if model.case == "qwen3" {
            crate::lm::gguf::write(&path, &model.config, GgmlDType::F32);
            sources.push(path.clone());
        }
        for source in sources {
            let files = Files::open(&source).unwrap();
            let (experts, before) =
                (if files.config.parts.experts.is_some() { 2 } else { 1 }, files.bytes_read());
            for (tp, ep) in (1..=3).flat_map(|tp| (1..=experts).map(move |ep| (tp, ep))) {
                let held = ModelOptions { ep, ..ModelOptions::of(DType::F32) };
                let told: usize = Info::new(&files, ep * tp, &held).unwrap().bytes_per_rank.iter().sum();
                let counted = memory::weight_bytes(&files, &held, [tp, 1]).unwrap();
                let off = (counted as f64 / told as f64 - 1.0).abs();
                assert!(off < 0.02, "{} on {tp} x {ep}: {counted} for {told}", model.case);
                let is_read = files.bytes_read() > before;
                assert!(!is_read || files.is_gguf(), "{}: more than headers were read", model.case);
            }
        }
    }
}

#[test]
fn ranks_hold_what_is_told_of_newer_parts() {
    let cases = [
        "deepseek v3 mixture",
        "qwen3 next mixture",
        "granite hybrid with experts",
        "nemotron h with groups",
        "falcon h1",
        "lfm2 moe",
        "gpt oss",
        "gemma4 with embeddings of layers",
        "gemma4 mixture",
    ];
    let mut models = families().models;
    models.retain(|model| cases.contains(&model.case.as_str()));
    assert_eq!(models.len(), cases.len());
    for model in models {
        let folder = tempfile::tempdir().unwrap();
        crate::lm::families::write(folder.path(), &model.config);
        let files = Arc::new(Files::open(folder.path()).unwrap());
        let held_by = |ranks: usize, stages: usize, ep: usize| -> Vec<usize> {
            let (files, held) = (files.clone(), ModelOptions { ep, ..ModelOptions::of(DType::F32) });
            let purpose = Purpose::Write { slots: 1, room: 4, block: 4 };
            on_ranks(ranks, "held", move |ctx| -> anyhow::Result<usize> {
                Ok(Engine::new(ctx, stages, &files, &held, purpose)?.bytes)
            })
        };
        let has_experts = files.config.parts.experts.is_some();
        for (ranks, ep) in [(1, 1), (2, 1), (3, 1), (2, 2)] {
            if ep > 1 && !has_experts {
                continue;
            }
            let held = ModelOptions { ep, ..ModelOptions::of(DType::F32) };
            let told = Info::new(&files, ranks, &held).unwrap().bytes_per_rank;
            assert_eq!(held_by(ranks, 1, ep), told, "{} on {ranks} ranks, {ep} of experts", model.case);
        }
        // In stages what is told is the sum of all ranks.
        for tp in [1, 2] {
            let counted = memory::weight_bytes(&files, &ModelOptions::of(DType::F32), [tp, 2]).unwrap();
            let sum: usize = held_by(2 * tp, 2, 1).iter().sum();
            let off = (counted as f64 / sum as f64 - 1.0).abs();
            assert!(off < 0.02, "{} in 2 stages of {tp}: {counted} for {sum}", model.case);
        }
    }
}

#[test]
fn states_are_counted_once_for_a_text_however_long_it_is() {
    let model = families().models.into_iter().find(|model| model.case == "lfm2").unwrap();
    let folder = tempfile::tempdir().unwrap();
    crate::lm::families::write(folder.path(), &model.config);
    let files = Files::open(folder.path()).unwrap();
    // Two of three layers keep two inputs of 32 channels, and one keys and values of 2 heads of 8 numbers.
    let (states, keys) = (2 * 2 * 32 * 4, |room: usize| 2 * 8 * 2 * 2 * room);
    for room in [1, 10, 1000] {
        let bytes = memory::cache_bytes(&files.config, DType::BF16, [3, room], [1, 1, 1]);
        assert_eq!(bytes, 3 * (states + keys(room)));
    }
    let info = Info::new(&files, 2, &ModelOptions::of(DType::F32)).unwrap();
    assert_eq!(info.state_bytes, Some(states));
    assert!(info.to_string().contains("states of a text take 512 bytes"), "{info}");
}

#[test]
fn weights_that_layers_turn_into_floats_are_counted_as_floats() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.gguf");
    let blocks = GgmlDType::Q8_0;
    for (case, field, value) in [
        ("qwen3", "head_dim", 32),
        // Heads that no rank can have with whole blocks of the output projection.
        ("qwen3", "head_dim", 24),
        // Some columns of experts that are no whole blocks, and all that are.
        ("mixtral", "intermediate_size", 48),
        ("mixtral", "intermediate_size", 64),
    ] {
        let mut fields = crate::lm::families::families()
            .models
            .into_iter()
            .find(|model| model.case == case)
            .unwrap()
            .config;
        // Whole tiles of rows, which packed blocks are made of.
        (fields["hidden_size"], fields["intermediate_size"], fields["vocab_size"]) =
            (json!(64), json!(96), json!(96));
        fields[field] = json!(value);
        crate::lm::gguf::write(&path, &fields, blocks);
        let files = Files::open(&path).unwrap();
        for tp in 1..=2 {
            let held = ModelOptions::of(DType::F32);
            let told: usize = Info::new(&files, tp, &held).unwrap().bytes_per_rank.iter().sum();
            let counted = memory::weight_bytes(&files, &held, [tp, 1]).unwrap();
            let off = (counted as f64 / told as f64 - 1.0).abs();
            assert!(off < 0.02, "{case} with {field} {value} on {tp} ranks: {counted} for {told}");
        }
    }
}

/// Writes a model of 824 GB: a header, and a hole where the weights would be.
fn write_huge(folder: &Path) {
    random_model::write(folder, &Config { vocab_size: 256, ..small(4, 2) }, 7, DType::F32).unwrap();
    let huge = Config { vocab_size: 256, intermediate_size: 1 << 30, ..small(4, 2) };
    fs::write(folder.join("config.json"), serde_json::to_string(&huge).unwrap()).unwrap();
    let (mut header, mut end) = (serde_json::Map::new(), 0u64);
    for (name, shape) in huge.tensors() {
        let bytes = shape.iter().product::<usize>() as u64 * 4;
        header.insert(name, json!({"dtype": "F32", "shape": shape, "data_offsets": [end, end + bytes]}));
        end += bytes;
    }
    let header = serde_json::to_vec(&header).unwrap();
    let mut file = fs::File::create(folder.join("model.safetensors")).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(&header).unwrap();
    file.set_len(8 + header.len() as u64 + end).unwrap();
}

#[test]
fn weights_larger_than_the_memory_are_told_by_their_headers() {
    let folder = tempfile::tempdir().unwrap();
    write_huge(folder.path());
    let files = Files::open(folder.path()).unwrap();
    let info = Info::new(&files, 3, &ModelOptions::of(DType::F32)).unwrap();
    let (held, all) = (info.bytes_per_rank.iter().sum::<usize>(), files.config.parameters() * 4);
    assert!(held >= all && held < all + (1 << 20), "{held} of {all} bytes");
    assert_eq!(files.bytes_read(), 0);
}

#[test]
fn weights_larger_than_the_memory_are_refused_before_they_are_read() {
    let folder = tempfile::tempdir().unwrap();
    write_huge(folder.path());
    let prompts = folder.path().join("prompts");
    fs::write(&prompts, "Once").unwrap();
    let prompts = prompts.to_str().unwrap();
    for flags in [
        &["generate", "--prompt", "x", "--tp", "2"][..],
        &["generate", "--prompts", prompts, "--pp", "2"],
        &["score", "--text", prompts],
    ] {
        let output = crate::lm::llama(&[flags, &["--model", folder.path().to_str().unwrap()]].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains("the weights take 824,"), "{flags:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}

#[test]
fn a_stop_text_ends_the_text_on_all_ranks_and_is_not_shown() {
    let run = |flags: &[&str]| -> Value {
        let fixed = ["--prompt", "Once", "--max-tokens", "12", "--temperature", "0", "--json", "-"];
        serde_json::from_slice(&crate::lm::llama(&[&fixed[..], flags].concat()).stdout).unwrap()
    };
    let whole = run(&[]);
    let text = whole["text"].as_str().unwrap();
    let written: Vec<char> = text["Once".len()..].chars().collect();
    let stop: String = written[4..6].iter().collect();
    let end = text["Once".len()..].find(&stop).unwrap();
    for flags in [&["--tp", "1"], &["--tp", "2"], &["--pp", "2"]] {
        let report = run(&[&flags[..], &["--stop", &stop]].concat());
        assert_eq!(
            (report["text"].as_str(), &report["stop"]),
            (Some(&text[.."Once".len() + end]), &"text".into())
        );
    }
    // In 16 bits keys and values are rounded, and the text of this model stays.
    let rounded = run(&["--cache-dtype", "bf16", "--tp", "2"]);
    assert_eq!(rounded["new_tokens"], whole["new_tokens"]);
    let one = run(&["--top-k", "1"]);
    assert_eq!(one["text"], whole["text"]);
}

#[test]
fn flags_without_effect_are_refused_and_not_in_the_help() {
    test_utils::programs::refuses(
        crate::lm::llama,
        &[
            (&["info", "--temperature", "0"], &["--temperature", "no effect with info"]),
            (&["info", "--max-tokens", "5"], &["--max-tokens", "info"]),
            (&["info", "--pp", "2"], &["--pp", "info"]),
            (&["info", "--backend", "mpi"], &["--backend", "info"]),
            (&["score", "--prompt", "x"], &["--prompt", "score"]),
            (&["score", "--cache-dtype", "bf16"], &["--cache-dtype", "score"]),
            (&["generate", "--stride", "5"], &["--stride", "generate"]),
            (&["--window", "5"], &["--window", "generate"]),
        ],
    );
    let help = |command: &str| String::from_utf8(crate::lm::llama(&[command, "--help"]).stdout).unwrap();
    for (command, shown, hidden) in [
        ("generate", ["--prompts", "--temperature", "--batch"], ["--stride", "--warmup", "--text"]),
        ("score", ["--stride", "--text", "--pp"], ["--prompt", "--warmup", "--batch"]),
        ("info", ["--model", "--shares", "--json"], ["--pp", "--stride", "--seq-len"]),
        ("train", ["--warmup", "--tp", "--batch"], ["--prompt", "--stride", "--cache-tokens"]),
    ] {
        let help = help(command);
        // The examples behind the options are those of all commands.
        let options = help.split("Examples:").next().unwrap();
        let has = |flag: &str| options.lines().any(|line| line.trim_start().starts_with(&format!("{flag} ")));
        assert!(shown.iter().all(|flag| has(flag)), "{command}: {options}");
        assert!(!hidden.iter().any(|flag| has(flag)), "{command}: {options}");
    }
}
