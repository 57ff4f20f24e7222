//! Adapters as models of their own names, of the program over HTTP.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::thread;

use candle_core::DType;
use candle_lm::adapter::{AdapterConfig, TargetModules};
use candle_lm::config::Config;
use candle_lm::random_model;
use candle_shard::nn::LoraOptions;
use serde_json::{Value, json};

use super::client::{CHAT, COMPLETE, get, post, said};
use super::process::Program;
use super::program::{PROMPTS, generated};
use crate::lm::adapted::write_adapter;
use crate::lm::config;

const NAMES: [&str; 3] = ["model", "french", "german"];

/// Writes a model of bytes and two adapters; returns their paths.
fn place(folder: &Path) -> [String; 3] {
    let config = Config { vocab_size: 256, ..config(6, 3) };
    let paths = NAMES.map(|name| folder.join(name));
    random_model::write(&paths[0], &config, 5, DType::F32).unwrap();
    let some = TargetModules::Suffixes(["q_proj", "down_proj", "lm_head"].map(String::from).into());
    let of = |rank: usize, targets: TargetModules| AdapterConfig::new(LoraOptions::new(rank), targets);
    write_adapter(&paths[1], &config, &of(2, TargetModules::AllLinear));
    write_adapter(&paths[2], &config, &of(3, some));
    paths.map(|path| path.to_str().unwrap().to_owned())
}

#[test]
fn adapters_are_models_whose_texts_are_those_of_generate() {
    let folder = tempfile::tempdir().unwrap();
    let [model, french, german] = place(folder.path());
    let mut wanted: BTreeMap<(&str, &str), String> = BTreeMap::new();
    for prompt in PROMPTS {
        for (name, path) in NAMES.into_iter().zip([None, Some(&french), Some(&german)]) {
            let mut flags = vec!["--model", &model, "--dtype", "f32"];
            flags.extend(path.iter().flat_map(|path| ["--adapter", path.as_str()]));
            wanted.insert((name, prompt), generated(prompt, &flags));
        }
    }
    for prompt in PROMPTS {
        let of = |name: &'static str| &wanted[&(name, prompt)];
        assert!(of("model") != of("french") && of("model") != of("german") && of("french") != of("german"));
    }
    let of_name = [format!("french={french}"), format!("german={german}")];
    for mesh in [&[][..], &["--tp", "2"], &["--pp", "2"]] {
        let mut flags =
            vec!["--model", &model, "--adapter", &of_name[0], "--adapter", &of_name[1], "--slots", "5"];
        flags.extend(mesh);
        let program = Program::start(&flags);
        let address = program.address;
        let ask = move |name: &str, prompt: &str, stream: bool| {
            let body = json!({"model": name, "prompt": prompt, "temperature": 0, "max_tokens": 24, "stream": stream});
            let answer = post(address, COMPLETE, &body);
            let parts = if stream { answer.chunks() } else { vec![answer.json()] };
            assert!(parts.iter().all(|part| part["model"] == name), "{parts:?}");
            parts.iter().map(|part| part["choices"][0]["text"].as_str().unwrap()).collect::<String>()
        };
        let texts = move |place: usize| {
            let one = move |round: usize| {
                let (name, prompt) = (NAMES[(place + round) % 3], PROMPTS[(place * 3 + round) % 4]);
                (name, prompt, ask(name, prompt, round.is_multiple_of(2)))
            };
            (0..9).map(one).collect::<Vec<_>>()
        };
        let threads: Vec<_> = (0..6).map(|place| thread::spawn(move || texts(place))).collect();
        for (name, prompt, text) in threads.into_iter().flat_map(|thread| thread.join().unwrap()) {
            assert_eq!(text, wanted[&(name, prompt)], "{mesh:?}, {name}");
        }
        let metrics = get(address, "/metrics").body;
        for name in NAMES {
            // Each name has had 18 of 54 texts.
            let line = format!("vllm:request_success_total{{model_name=\"{name}\",finished_reason=");
            let of_name = metrics.lines().filter_map(|told| told.strip_prefix(&line)?.split_once(' '));
            let ended: f64 = of_name.map(|(_, count)| count.parse::<f64>().unwrap()).sum();
            assert_eq!(ended, 18.0, "{name} in {metrics}");
        }
        let all = get(address, "/v1/models").json();
        let ids: Vec<&Value> = all["data"].as_array().unwrap().iter().map(|model| &model["id"]).collect();
        assert_eq!(ids, NAMES);
        let one = get(address, "/v1/models/german").json();
        assert_eq!((&one["id"], &one["parent"]), (&json!("german"), &json!("model")));
        for (path, body) in [
            (COMPLETE, json!({"model": "dutch", "prompt": "x"})),
            (CHAT, said("x", json!({"model": "dutch"}))),
        ] {
            let missing = post(address, path, &body);
            let error = missing.error();
            assert_eq!(
                (missing.status, &error["code"], &error["param"]),
                (404, &json!("model_not_found"), &json!("model"))
            );
            let message = error["message"].as_str().unwrap();
            assert!(NAMES.iter().all(|name| message.contains(name)), "{message}");
        }
    }
}

#[test]
fn adapters_that_cannot_be_served_are_one_error_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let [model, french, _] = place(folder.path());
    let other = folder.path().join("other");
    let wide = Config { vocab_size: 256, ..config(4, 2) };
    write_adapter(&other, &wide, &AdapterConfig::new(LoraOptions::new(2), TargetModules::AllLinear));
    let [twice, base, misfit] =
        [format!("one={french}"), format!("model={french}"), format!("two={}", other.display())];
    for (flags, wants) in [
        (vec!["--adapter", &french], "has no name by which clients may ask"),
        (vec!["--adapter", &twice, "--adapter", &twice], "two adapters are named \"one\""),
        (vec!["--adapter", &base], "the model has this name too"),
        (vec!["--adapter", &misfit], "the model and the config want"),
        (vec!["--adapter", &twice, "--adapter", &misfit, "--tp", "2"], "the model and the config want"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_lm"))
            .args(["serve", "--port", "0", "--model", &model])
            .args(&flags)
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains(wants), "{flags:?}: {error}");
        assert_eq!(error.matches(wants).count(), 1, "{flags:?}: {error}");
    }
}
