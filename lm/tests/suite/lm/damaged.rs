//! Damaged configs, tokenizers, templates and GGUF files of small models: each is an error or another model, and never a
//! panic.
//!
//! `CANDLE_LM_DAMAGED_FILES` is the number of files of each kind, 300 without it.

use std::fs;
use std::path::Path;

use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device};
use candle_lm::chat::{ChatMessage, ChatTemplate};
use candle_lm::config::{Config, GenerationConfig};
use candle_lm::files::Files;
use candle_lm::{random_model, tokens};
use candle_shard::Weights;
use serde_json::Value;

use crate::lm::families::families;
use crate::lm::ropes::ropes;

/// A small generator of numbers, the same in each run.
struct Draws(u64);

impl Draws {
    fn below(&mut self, most: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % most.max(1)
    }

    fn of<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.below(list.len())]
    }

    /// Bytes that are overwritten, left out or repeated at some places.
    fn damaged(&mut self, whole: &[u8]) -> Vec<u8> {
        const BYTES: &[u8] = b"\0\x01\x7f\x80\xff\t09-.eE[]{}\":,x";
        let mut bytes = whole.to_vec();
        for _ in 0..1 + self.below(3) {
            let at = self.below(bytes.len());
            let run = (1 + self.below(8)).min(bytes.len() - at);
            match self.below(3) {
                0 => drop(bytes.splice(at..at + run, [])),
                1 => {
                    let part = bytes[at..at + run].to_vec();
                    bytes.splice(at..at, part);
                }
                _ => bytes[at..at + run].fill(*self.of(BYTES)),
            }
            if bytes.is_empty() {
                bytes.push(b'{');
            }
        }
        bytes
    }

    /// A JSON value in which one value somewhere is another one: files that parse, and say absurd things.
    fn changed(&mut self, value: &Value) -> Value {
        let others = [
            "null",
            "true",
            "-1",
            "0",
            "1",
            "7",
            "1e308",
            "1e400",
            "18446744073709551615",
            "0.5",
            "\"\"",
            "\"x\"",
            "[]",
            "{}",
            "[[]]",
            "[0]",
        ];
        let other =
            |draws: &mut Self| serde_json::from_str(others[draws.below(others.len())]).unwrap_or(Value::Null);
        match value {
            Value::Object(map) if !map.is_empty() && self.below(8) > 0 => {
                let mut map = map.clone();
                let names: Vec<String> = map.keys().cloned().collect();
                let name = self.of(&names).clone();
                let made = self.changed(&map[&name]);
                map.insert(name, made);
                Value::Object(map)
            }
            Value::Array(list) if !list.is_empty() && self.below(4) > 0 => {
                let mut list = list.clone();
                let at = self.below(list.len());
                list[at] = self.changed(&list[at]);
                Value::Array(list)
            }
            _ => other(self),
        }
    }
}

fn many() -> usize {
    std::env::var("CANDLE_LM_DAMAGED_FILES").map_or(300, |n| n.parse().unwrap())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn damaged_configs_are_an_error_or_another_model() {
    let mut configs: Vec<Value> = families().models.into_iter().map(|model| model.config).collect();
    configs.extend(ropes().models.into_iter().map(|model| model.config));
    let mut draws = Draws(1);
    let mut refused = 0;
    for i in 0..many() {
        let config = draws.of(&configs).clone();
        let damaged = match i % 2 {
            0 => text(&draws.damaged(config.to_string().as_bytes())),
            _ => draws.changed(&config).to_string(),
        };
        match Config::parse(&damaged) {
            Err(error) => {
                assert!(!error.to_string().is_empty());
                refused += 1;
            }
            // What follows from sizes is counted and not allocated.
            Ok(config) => assert!(config.heads().dim > 0 && config.longest() > 0, "{damaged}"),
        }
    }
    assert!(refused > many() / 10, "{refused}");
}

/// A folder with a small random model.
fn model() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let small = Config {
        hidden_size: 16,
        intermediate_size: 12,
        num_hidden_layers: 1,
        num_attention_heads: 2,
        num_key_value_heads: Some(1),
        ..random_model::config()
    };
    random_model::write(folder.path(), &small, 7, DType::F32).unwrap();
    folder
}

#[test]
fn damaged_files_beside_the_weights_are_an_error_or_another_model() {
    let folder = model();
    let template = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}{% if loop.last %}!{% endif %}{% endfor %}";
    let fields =
        serde_json::json!({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": template});
    let generation = serde_json::json!({"eos_token_id": [1, 2], "do_sample": true, "top_k": 50});
    let path = |name: &str| folder.path().join(name);
    fs::write(path("tokenizer_config.json"), fields.to_string()).unwrap();
    fs::write(path("generation_config.json"), generation.to_string()).unwrap();
    let names = ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"];
    let whole = names.map(|name| (name, fs::read(path(name)).unwrap()));
    let messages = [ChatMessage::new("user", " Hi "), ChatMessage::new("assistant", "Ho")];
    let now = jiff::civil::date(2026, 3, 7).at(9, 5, 0, 0);
    let mut draws = Draws(2);
    let mut refused = 0;
    for i in 0..many() {
        let (name, bytes) = draws.of(&whole);
        let parsed: Value = serde_json::from_slice(bytes).unwrap();
        let damaged =
            if i % 2 == 0 { draws.damaged(bytes) } else { draws.changed(&parsed).to_string().into_bytes() };
        fs::write(path(name), &damaged).unwrap();
        let used = || -> anyhow::Result<String> {
            GenerationConfig::read(folder.path())?;
            let files = Files::open(folder.path())?;
            let tokenizer = files.tokenizer()?;
            let ids = tokens::encode(&tokenizer, "The cat, 12 é 🙂\n")?;
            tokenizer.decode(&ids, true).map_err(|error| anyhow::anyhow!("{error}"))?;
            let template = files.chat_template()?;
            template.end_of_turn(&tokenizer);
            Ok(template.render(&messages, now)?.to_string())
        };
        refused += usize::from(used().is_err());
        fs::write(path(name), bytes).unwrap();
    }
    assert!(refused > many() / 10, "{refused}");
}

#[test]
fn damaged_headers_of_weights_are_an_error_or_other_weights() {
    let folder = model();
    let path = folder.path().join("model.safetensors");
    let whole = fs::read(&path).unwrap();
    let end = 8 + u64::from_le_bytes(*whole.first_chunk().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&whole[8..end]).unwrap();
    let mut draws = Draws(5);
    let mut refused = 0;
    for i in 0..many() {
        let mut bytes = match i % 2 {
            0 => draws.damaged(&whole[..end]),
            _ => {
                let header = draws.changed(&header).to_string().into_bytes();
                [&(header.len() as u64).to_le_bytes()[..], &header].concat()
            }
        };
        bytes.extend(&whole[end..]);
        fs::write(&path, &bytes).unwrap();
        // What a file says of itself can be read, also where it is not the model of the config.
        if let Ok(weights) = Weights::open(folder.path()) {
            for name in weights.names() {
                let block: Vec<_> = weights.shape(name).unwrap().iter().map(|&n| 0..n).collect();
                weights
                    .read_block(name, &block, &Device::Cpu)
                    .map_or_else(|error| drop(error.to_string()), drop);
            }
        }
        refused += usize::from(Files::open(folder.path()).is_err());
    }
    assert!(refused > many() / 10, "{refused}");
}

#[test]
fn damaged_templates_are_an_error_or_another_text() {
    let templates = crate::lm::chat::templates();
    let messages = [ChatMessage::new("user", " Hi "), ChatMessage::new("assistant", "Ho")];
    let now = jiff::civil::date(2026, 3, 7).at(9, 5, 0, 0);
    let mut draws = Draws(3);
    for _ in 0..many() {
        let template = draws.of(&templates).clone();
        let damaged = text(&draws.damaged(template.as_bytes()));
        if let Ok(template) = ChatTemplate::new(&damaged, "a file", Default::default()) {
            template.render(&messages, now).map_or_else(|error| drop(error.to_string()), drop);
        }
    }
}

#[test]
fn damaged_gguf_files_of_models_are_an_error_or_another_model() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let mut whole = Vec::new();
    for case in ["mistral with wide heads", "gemma3", "phi3", "granite"] {
        let config = families().models.into_iter().find(|model| model.case == case).unwrap().config;
        crate::lm::gguf::write(&path, &config, GgmlDType::F32);
        whole.push(fs::read(&path).unwrap());
    }
    for fact in crate::lm::tokenizers::facts() {
        crate::lm::tokenizers::write(&path, &fact, &[]);
        whole.push(fs::read(&path).unwrap());
    }
    let mut draws = Draws(4);
    let mut refused = 0;
    for _ in 0..many() {
        let file = draws.of(&whole).clone();
        // Most of a file is weights.
        let header = file.len().min(6000);
        let mut bytes = draws.damaged(&file[..header]);
        bytes.extend(&file[header..]);
        fs::write(&path, &bytes).unwrap();
        refused += usize::from(opened(&path).is_err());
    }
    assert!(refused > many() / 10, "{refused}");
}

fn opened(path: &Path) -> anyhow::Result<()> {
    if let Ok(tokenizer) = tokens::read(path) {
        tokens::encode(&tokenizer, "The cat, 12 é 🙂\n")?;
    }
    let files = Files::open(path)?;
    files.dtype()?;
    drop(files.chat_template());
    Ok(())
}
