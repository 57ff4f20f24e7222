//! GGUF files that are written: the models that they were made of.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::quantized::GgmlDType;
use candle_lm::files::Files;
use candle_lm::tokens;
use serde_json::{Value, json};
use test_utils::on_ranks;

use crate::lm::families::{Families, families, greedy, logits, write};
use crate::lm::{config, llama};

/// Writes a tokenizer of so many tokens into a folder: bytes, and one that ends texts.
fn tokenizer(folder: &Path, count: usize, cut: Value) {
    let mut tokenizer: Value = serde_json::from_str(&tokens::of_bytes().unwrap().to_string(false).unwrap()).unwrap();
    let letters = ('A'..='~').chain('!'..='@').chain(['Ġ', 'Ċ', '¡', '¢']).map(String::from).take(count - 1);
    let vocab: serde_json::Map<String, Value> = letters.zip(0..).map(|(letter, id)| (letter, json!(id))).collect();
    tokenizer["model"]["vocab"] = Value::Object(vocab);
    tokenizer["pre_tokenizer"] = cut;
    tokenizer["added_tokens"] = json!([{
        "id": count - 1, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true,
    }]);
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
}

fn byte_level() -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true})
}

fn rows(path: &Path, prompt: &[u32], ranks: usize) -> Vec<Vec<f32>> {
    let (path, prompt) = (path.to_owned(), prompt.to_vec());
    on_ranks(ranks, "exported", move |ctx| logits(ctx, &path, &prompt, false)).swap_remove(0)
}

fn difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    let pairs = a.iter().flatten().zip(b.iter().flatten());
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn exported_files_compute_what_their_folders_compute() {
    let Families { prompt, models } = families();
    // Of SmolLM3, files say nothing about layers without rotary positions. The others have windows or biases that llama.cpp lacks.
    let supported = ["mistral with wide heads", "qwen2", "qwen3", "olmo2", "granite", "mixtral", "qwen3 moe"];
    let mut done = Vec::new();
    for model in models {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &model.config);
        tokenizer(folder.path(), 37, byte_level());
        let files = Files::open(folder.path()).unwrap();
        let out = |name: &str| folder.path().join(format!("{name}.gguf"));
        let exported = files.export_gguf(&out("f32"), GgmlDType::F32, |_, _| {});
        if let Err(error) = exported {
            let said = format!("{error:#}");
            assert!(!supported.contains(&model.case.as_str()), "{}: {said}", model.case);
            assert!(
                said.contains("not written") || said.contains("llama.cpp has no") || said.contains("would be"),
                "{said}"
            );
            assert!(!out("f32").exists());
            continue;
        }
        assert!(supported.contains(&model.case.as_str()), "{}", model.case);
        let want = rows(folder.path(), &prompt, 1);
        for ranks in [1, 2, 3] {
            let off = difference(&rows(&out("f32"), &prompt, ranks), &want);
            assert!(off < 2e-5, "{} on {ranks}: {off}", model.case);
        }
        assert_eq!(greedy(&out("f32"), &prompt, model.tokens.len(), [1, 1]), model.tokens, "{}", model.case);
        files.export_gguf(&out("q8_0"), GgmlDType::Q8_0, |_, _| {}).unwrap();
        let off = difference(&rows(&out("q8_0"), &prompt, 1), &want);
        // A router may choose another expert.
        let most = if files.config.parts.experts.is_some() { 2.0 } else { 0.3 };
        assert!(off > 0.0 && off < most, "{}: {off}", model.case);
        // From one file to another.
        let again = Files::open(&out("f32")).unwrap();
        again.export_gguf(&out("again"), GgmlDType::F32, |_, _| {}).unwrap();
        assert_eq!(difference(&rows(&out("again"), &prompt, 1), &rows(&out("f32"), &prompt, 1)), 0.0, "{}", model.case);
        done.push(model.case);
    }
    assert_eq!(done.len(), supported.len(), "{done:?}");
}

#[test]
fn the_program_writes_gguf_files_and_never_over_others() {
    let folder = tempfile::tempdir().unwrap();
    let config = candle_lm::config::Config { vocab_size: 99, ..config(4, 2) };
    candle_lm::random_model::write(folder.path(), &config, 3, candle_core::DType::F32).unwrap();
    let digits = json!({"type": "Digits", "individual_digits": true});
    tokenizer(folder.path(), 99, json!({"type": "Sequence", "pretokenizers": [digits, byte_level()]}));
    let model = folder.path().to_str().unwrap();
    let out = folder.path().join("x.gguf");
    let run =
        |more: &[&str]| llama(&[&["export", "--model", model, "--out", out.to_str().unwrap()][..], more].concat());
    let written = run(&["--gguf", "q4_0", "--json", "-"]);
    assert!(written.status.success(), "{}", String::from_utf8_lossy(&written.stderr));
    let told: Value = serde_json::from_slice(&written.stdout).unwrap();
    assert_eq!(told["bytes"].as_u64().unwrap(), fs::metadata(&out).unwrap().len());
    let before = fs::read(&out).unwrap();
    let text =
        llama(&["generate", "--model", out.to_str().unwrap(), "--prompt", "Hi", "--max-tokens", "3", "--tp", "2"]);
    assert!(text.status.success(), "{}", String::from_utf8_lossy(&text.stderr));
    let again = run(&[]);
    assert_eq!((again.status.code(), fs::read(&out).unwrap() == before), (Some(2), true));
    assert!(String::from_utf8_lossy(&again.stderr).contains("exists"));
    for (args, status, want) in [
        (&["export", "--model", model][..], 2, "--out"),
        (&["export", "--out", "y.gguf"], 2, "--model"),
        (&["export", "--model", model, "--out", "/no/such/folder/x.gguf"], 1, "/no/such/folder"),
        (&["export", "--model", model, "--out", "y.gguf", "--tp", "2"], 2, "--tp has no effect with export"),
        (&["info", "--model", model, "--gguf", "f16"], 2, "--gguf has no effect with info"),
    ] {
        let output = llama(args);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(status) && said.contains(want), "{args:?}: {said}");
    }
    // A tokenizer that cuts texts in no known way.
    tokenizer(
        folder.path(),
        99,
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}),
    );
    let other: PathBuf = folder.path().join("other.gguf");
    let files = Arc::new(Files::open(folder.path()).unwrap());
    let said = format!("{:#}", files.export_gguf(&other, GgmlDType::F16, |_, _| {}).unwrap_err());
    assert!(said.contains("no name for how the tokenizer cuts texts") && !other.exists(), "{said}");
}
