//! Embeddings of a small encoder over HTTP.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use super::client::{Answer, CHAT, COMPLETE, Client, JSON, get, post, said};
use super::process::Program;
use crate::sentence_embedding::{Small, facts, write};

pub(super) const EMBED: &str = "/v1/embeddings";

/// Writes the small encoder with a tokenizer of a few words.
pub(super) fn write_encoder(folder: &Path, small: &Small) {
    write(folder, small, &[]);
    let word = |id: usize, content: &str| {
        let off =
            ["single_word", "lstrip", "rstrip", "normalized"].map(|flag| (flag.to_owned(), json!(false)));
        let mut fields = serde_json::Map::from_iter(off);
        fields.extend(json!({"id": id, "content": content, "special": true}).as_object().unwrap().clone());
        Value::Object(fields)
    };
    let special = |id: &str| json!({"SpecialToken": {"id": id, "type_id": 0}});
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    let tokens = |id: &str, token: usize| json!({"id": id, "ids": [token], "tokens": [id]});
    let tokenizer = json!({
        "version": "1.0", "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        "padding": null, "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "decoder": null,
        "added_tokens": [word(1, "[CLS]"), word(2, "[SEP]")],
        "post_processor": {
            "type": "TemplateProcessing", "single": [special("[CLS]"), text, special("[SEP]")], "pair": [text, special("[SEP]")],
            "special_tokens": {"[CLS]": tokens("[CLS]", 1), "[SEP]": tokens("[SEP]", 2)},
        },
        "model": {"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3, "b": 4}},
    });
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
}

/// The embeddings of an answer, in the order of the texts.
#[track_caller]
fn embeddings(answer: &Answer) -> Vec<Vec<f32>> {
    assert_eq!(answer.status, 200, "{}", answer.body);
    let answer = answer.json();
    let data = answer["data"].as_array().unwrap();
    assert!(
        data.iter().enumerate().all(|(index, one)| one["index"] == index && one["object"] == "embedding")
    );
    let numbers = |one: &Value| match &one["embedding"] {
        Value::String(letters) => of_base64(letters),
        list => serde_json::from_value(list.clone()).unwrap(),
    };
    data.iter().map(numbers).collect()
}

/// The numbers of a text in base64.
fn of_base64(letters: &str) -> Vec<f32> {
    let value = |letter: u8| match letter {
        b'A'..=b'Z' => letter - b'A',
        b'a'..=b'z' => letter - b'a' + 26,
        b'0'..=b'9' => letter - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let bits = letters.bytes().filter(|letter| *letter != b'=').flat_map(|letter| {
        let value = value(letter);
        (0..6).rev().map(move |bit| value >> bit & 1)
    });
    let bits: Vec<u8> = bits.collect();
    let bytes: Vec<u8> =
        bits.chunks_exact(8).map(|bits| bits.iter().fold(0, |byte, bit| byte << 1 | bit)).collect();
    bytes.chunks_exact(4).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect()
}

#[track_caller]
fn assert_close(got: &[Vec<f32>], want: &[Vec<f32>]) {
    assert_eq!(got.len(), want.len());
    for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
        assert!((got - want).abs() < 1e-5, "{got} instead of {want}");
    }
}

#[test]
fn an_encoder_gives_the_embeddings_of_transformers() {
    let small = facts().small;
    let folder = tempfile::tempdir().unwrap();
    write_encoder(folder.path(), &small);
    let path = folder.path().to_str().unwrap();
    for ranks in ["1", "3"] {
        let mut program =
            Program::start(&["--model", path, "--name", "small", "--tp", ranks, "--slots", "3"]);
        let address = program.address;
        let whole = post(address, EMBED, &json!({"input": small.ids, "model": "small"}));
        assert_close(&embeddings(&whole), &small.embeddings);
        let tokens: usize = small.ids.iter().map(Vec::len).sum();
        assert_eq!(whole.json()["usage"], json!({"prompt_tokens": tokens, "total_tokens": tokens}));
        assert_eq!(whole.json()["model"], "small");
        let letters =
            post(address, EMBED, &json!({"input": small.ids, "encoding_format": "base64", "dimensions": 48}));
        assert_eq!(embeddings(&letters), embeddings(&whole));
        // A text has the tokens around it, and what the tokenizer says of cutting is left out.
        let text = post(address, EMBED, &json!({"input": ["a b b", "b"]}));
        let ids = post(address, EMBED, &json!({"input": [[1, 3, 4, 4, 2], [1, 4, 2]]}));
        assert_eq!(embeddings(&text), embeddings(&ids));
        let cut = post(address, "/tokenize", &json!({"content": "a b b", "add_special": true}));
        assert_eq!(cut.json()["tokens"], json!([1, 3, 4, 4, 2]));
        assert_eq!(get(address, "/v1/models").json()["data"][0]["max_model_len"], 16);

        // Clients at once, of which some leave.
        let threads: Vec<_> = (0..12)
            .map(|nth: usize| {
                let (ids, want) = (small.ids.clone(), small.embeddings.clone());
                thread::spawn(move || {
                    for round in 0..5 {
                        let at = (nth + round) % ids.len();
                        let body = json!({"input": ids[at]});
                        if nth.is_multiple_of(4) {
                            Client::new(address).ask("POST", EMBED, &[JSON], body.to_string().as_bytes());
                        } else {
                            assert_close(&embeddings(&post(address, EMBED, &body)), &want[at..=at]);
                        }
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());

        for (field, value) in [
            ("input", json!(null)),
            ("input", json!("")),
            ("input", json!([])),
            ("input", json!([[]])),
            ("input", json!([37])),
            ("input", json!([1.5])),
            ("input", json!({"a": 1})),
            ("input", json!(vec!["a"; 2049])),
            ("dimensions", json!(12)),
            ("encoding_format", json!("hex")),
            ("add_special_tokens", json!(false)),
            ("normalize", json!(false)),
            ("prompt_name", json!("query")),
        ] {
            let mut body = json!({"input": "a"});
            body[field] = value;
            let refused = post(address, EMBED, &body);
            assert_eq!((refused.status, &refused.error()["param"]), (400, &json!(field)), "{body}");
        }
        let neutral = json!({"input": "b", "add_special_tokens": true, "normalize": true, "prompt": null, "task": "", "user": "me"});
        assert_eq!(post(address, EMBED, &neutral).status, 200);
        let long = post(address, EMBED, &json!({"input": vec![3; 17]}));
        assert_eq!((long.status, &long.error()["code"]), (400, &json!("context_length_exceeded")));
        assert_eq!(post(address, EMBED, &json!({"input": "a", "model": "other"})).status, 404);
        for (path, body) in [(CHAT, said("Hi", json!({"model": null}))), (COMPLETE, json!({"prompt": "a"}))] {
            let refused = post(address, path, &body);
            assert_eq!((refused.status, &refused.error()["param"]), (400, &json!("model")), "{path}");
        }
        let metrics = get(address, "/metrics").body;
        assert!(metrics.contains("vllm:num_requests_running{model_name=\"small\"} 0"), "{metrics}");
        program.signal("-TERM");
        assert!(program.wait(Duration::from_secs(60)).success(), "{}", program.said());
    }
    for (flags, want) in [
        (["--pp", "2"], "--pp 2"),
        (["--cache-bytes", "9"], "--cache-bytes"),
        (["--dp", "2"], "--dp 2"),
        (["--ignore-field", "a"], "--ignore-field"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_lm"))
            .args(["serve", "--port", "0", "--model", path])
            .args(flags)
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains(want), "{error}");
    }
}
