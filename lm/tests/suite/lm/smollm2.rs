//! A real model, SmolLM2-135M-Instruct in 4-bit blocks, against what transformers computes with its floats, taken down by
//! `benchmarks/smollm2_facts.py`. `CANDLE_SMOLLM2` is the path of the file, which `scripts/smollm2.sh` downloads. `CANDLE_LM` is the
//! path of an optimized `lm`, since the runs take minutes otherwise.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

use candle_lm::files::Files;
use candle_lm::tokens::{encode, encode_rendered};
use serde::Deserialize;
use serde_json::Value;
use test_utils::skip;

#[derive(Deserialize)]
struct Fact {
    prompt: String,
    ids: Vec<u32>,
    tokens: Vec<u32>,
    text: String,
    logits_top: Vec<(u32, f32)>,
    encodings: Vec<(String, Vec<u32>)>,
}

/// The path of the file.
pub(crate) fn path() -> Option<PathBuf> {
    let path = std::env::var_os("CANDLE_SMOLLM2").filter(|path| !path.is_empty());
    if path.is_none() {
        skip("CANDLE_SMOLLM2 is not set; see scripts/smollm2.sh");
    }
    path.map(Into::into)
}

/// The program, optimized if there is one.
pub(crate) fn program() -> OsString {
    std::env::var_os("CANDLE_LM").unwrap_or(env!("CARGO_BIN_EXE_lm").into())
}

/// The file, and what transformers computes with it.
fn given() -> Option<(PathBuf, Fact)> {
    path().map(|path| (path, serde_json::from_str(include_str!("smollm2.json")).unwrap()))
}

#[test]
fn texts_become_the_tokens_of_transformers() {
    let Some((path, fact)) = given() else { return };
    let tokenizer = Files::open(&path).unwrap().tokenizer().unwrap();
    assert_eq!(encode(&tokenizer, &fact.prompt).unwrap(), fact.ids);
    for (text, ids) in fact.encodings {
        assert_eq!(encode(&tokenizer, &text).unwrap(), ids, "{text:?}");
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
    }
}

#[test]
fn conversations_become_the_tokens_of_transformers() {
    let Some((path, _)) = given() else { return };
    let files = Files::open(&path).unwrap();
    let (tokenizer, template) = (files.tokenizer().unwrap(), files.chat_template().unwrap());
    for case in crate::lm::chat::facts().smollm2 {
        let text = template.render(&case.messages, jiff::civil::date(2026, 3, 7).at(9, 5, 0, 0)).unwrap();
        assert_eq!(Some(&*text), case.text.as_deref());
        assert_eq!(encode_rendered(&tokenizer, &text).unwrap(), case.ids, "{text}");
    }
    assert_eq!(template.end_of_turn(&tokenizer), tokenizer.token_to_id("<|im_end|>"));
}

#[test]
fn a_real_model_writes_the_text_of_transformers_on_every_mesh() {
    let Some((path, fact)) = given() else { return };
    let program = program();
    let run = |flags: &[&str]| -> Value {
        let fixed =
            ["generate", "--model", path.to_str().unwrap(), "--prompt", &fact.prompt, "--temperature", "0"];
        let most = ["--max-tokens", "20", "--json", "-"];
        let output = Command::new(&program).args(fixed).args(most).args(flags).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let meshes = ["--tp 1", "--tp 2", "--tp 3", "--pp 2"];
    for mesh in meshes {
        for dequantize in [false, true] {
            let flags: Vec<&str> = mesh.split(' ').chain(dequantize.then_some("--dequantize")).collect();
            let report = run(&flags);
            // Products with blocks round what they are multiplied with to 8 bits, so that texts part after some tokens.
            let (near, same) = if dequantize { (1e-3, fact.tokens.len()) } else { (0.5, 4) };
            let top: Vec<(u32, f32)> = serde_json::from_value(report["logits_top"].clone()).unwrap();
            for (token, want) in &fact.logits_top[..5] {
                let got = top.iter().find(|(known, _)| known == token).map(|(_, logit)| *logit);
                let is_near = got.is_some_and(|got| (got - want).abs() < near);
                assert!(is_near, "{flags:?}: {got:?} instead of {want} of {token}");
            }
            let tokens: Vec<u32> = serde_json::from_value(report["tokens"].clone()).unwrap();
            assert_eq!(tokens[..same], fact.tokens[..same], "{flags:?}");
            if dequantize {
                assert_eq!(report["text"], format!("{}{}", fact.prompt, fact.text), "{flags:?}");
            }
        }
    }
}
