//! Models by name, from a small server that answers as the Hub does.

mod moving;
pub(crate) mod server;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use candle_core::quantized::{GgmlDType, gguf_file};
use candle_core::{DType, Device};
use candle_lm::config::Config;
use candle_lm::hub::HubName;
use candle_lm::random_model;
use serde_json::{Value, json};

use server::{COMMITS, Server};

fn config() -> Config {
    Config {
        hidden_size: 32,
        intermediate_size: 44,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        max_position_embeddings: 64,
        ..random_model::config()
    }
}

/// The files of a small model: in one file, and with an index of two.
pub(crate) fn files(folder: &Path, seed: u64) -> BTreeMap<String, Vec<u8>> {
    random_model::write(folder, &config(), seed, DType::F32).unwrap();
    let read = |name: &str| fs::read(folder.join(name)).unwrap();
    let mut files = BTreeMap::new();
    for name in ["config.json", "tokenizer.json", "model.safetensors"] {
        files.insert(format!("someone/small/{name}"), read(name));
        files.insert(format!("closed/small/{name}"), read(name));
        if name != "model.safetensors" {
            files.insert(format!("someone/sharded/{name}"), read(name));
            files.insert(format!("someone/torn/{name}"), read(name));
        }
    }
    let tensors =
        candle_core::safetensors::load(folder.join("model.safetensors"), &candle_core::Device::Cpu).unwrap();
    let mut map = serde_json::Map::new();
    for part in 0..2 {
        let name = format!("model-0000{}-of-00002.safetensors", part + 1);
        let mut names: Vec<&String> = tensors.keys().collect();
        names.sort();
        let some = names
            .into_iter()
            .enumerate()
            .filter(|(i, _)| i % 2 == part)
            .map(|(_, name)| (name.clone(), tensors[name].clone()));
        let some: std::collections::HashMap<_, _> = some.collect();
        map.extend(some.keys().map(|tensor| (tensor.clone(), json!(name))));
        candle_core::safetensors::save(&some, folder.join(&name)).unwrap();
        files.insert(format!("someone/sharded/{name}"), read(&name));
    }
    let index = json!({"metadata": {}, "weight_map": map}).to_string().into_bytes();
    files.insert("someone/sharded/model.safetensors.index.json".into(), index);
    let index = json!({"weight_map": {"a": "../../up.safetensors"}}).to_string().into_bytes();
    files.insert("someone/torn/model.safetensors.index.json".into(), index);
    files
}

/// Runs the program, which continues a prompt.
fn lm(server: &str, home: &Path, model: &str, more: &[(&str, &str)]) -> Output {
    let prompt = ["--tp", "2", "--prompt", "Hi", "--max-tokens", "4", "--temperature", "0"];
    program(server, home, more).args(["generate", "--model", model]).args(prompt).output().unwrap()
}

/// The program with a cache in `home`.
pub(crate) fn program(server: &str, home: &Path, more: &[(&str, &str)]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lm"));
    command
        .args(["--json", "-"])
        .env("HF_HOME", home)
        .env("HF_ENDPOINT", server)
        .env("NO_PROXY", "127.0.0.1");
    for name in [
        "HF_TOKEN",
        "HF_HUB_OFFLINE",
        "HF_HUB_DOWNLOAD_TIMEOUT",
        "http_proxy",
        "HTTP_PROXY",
        "all_proxy",
        "ALL_PROXY",
    ] {
        command.env_remove(name);
    }
    command.envs(more.iter().copied());
    command
}

fn tokens(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice::<Value>(&output.stdout).unwrap()["tokens"].clone()
}

#[test]
fn a_model_by_name_is_downloaded_once_and_writes_as_its_folder_does() {
    let (folder, home) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let server = Server::start(files(folder.path(), 7));
    let run = |model: &str, more: &[(&str, &str)]| lm(&server.address, home.path(), model, more);
    let want = tokens(&run(folder.path().to_str().unwrap(), &[]));
    assert_eq!(server.sent(), Vec::<String>::new(), "a path that exists is a path");

    let got = run("someone/small", &[]);
    assert_eq!(tokens(&got), want);
    assert_eq!(got.stderr.iter().filter(|&&byte| byte == b'\r').count(), 0, "no progress without a terminal");
    assert_eq!(
        server.sent(),
        ["config.json", "tokenizer.json", "model.safetensors"],
        "once, not once per rank"
    );
    assert_eq!(tokens(&run("someone/small@main", &[])), want);
    assert_eq!(server.sent(), Vec::<String>::new(), "from the cache");
    assert_eq!(tokens(&run("someone/small", &[("HF_ENDPOINT", "http://127.0.0.1:9")])), want, "asks nobody");
    assert_eq!(
        tokens(&run("someone/small", &[("HF_HUB_OFFLINE", "1"), ("HF_ENDPOINT", "http://127.0.0.1:9")])),
        want
    );
    let blobs = home.path().join("hub/models--someone--small/snapshots").join(COMMITS[0]);
    assert!(blobs.join("config.json").exists(), "in the layout of huggingface_hub");

    assert_eq!(tokens(&run("someone/sharded", &[])), want);
    assert_eq!(server.sent().len(), 5);
    assert_eq!(tokens(&run("closed/small", &[("HF_TOKEN", "open-sesame")])), want);
}

#[test]
fn a_gguf_file_by_name_is_the_only_file_that_is_downloaded() {
    let (folder, home) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let path = folder.path().join("x.gguf");
    let model =
        crate::lm::families::families().models.into_iter().find(|model| model.case == "qwen3").unwrap();
    crate::lm::gguf::write(&path, &model.config, GgmlDType::F32);
    let file = ("someone/quantized/sub/x.gguf".to_owned(), fs::read(&path).unwrap());
    let server = Server::start(BTreeMap::from([file]));
    let info = |model: &str| -> Value {
        let output =
            program(&server.address, home.path(), &[]).args(["info", "--tp", "2", "--model", model]).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    assert_eq!(info("someone/quantized/sub/x.gguf"), info(path.to_str().unwrap()));
    assert_eq!(server.sent(), ["sub/x.gguf"]);
}

/// Splits a GGUF file into two: the metadata with some tensors, and the others.
fn split(path: &Path, parts: [&Path; 2]) {
    let mut file = fs::File::open(path).unwrap();
    let content = gguf_file::Content::read(&mut file).unwrap();
    let mut names: Vec<&String> = content.tensor_infos.keys().collect();
    names.sort();
    for (nth, part) in parts.into_iter().enumerate() {
        let mut metadata: Vec<(&str, gguf_file::Value)> = vec![
            ("split.no", gguf_file::Value::U16(nth as u16)),
            ("split.count", gguf_file::Value::U16(2)),
            ("split.tensors.count", gguf_file::Value::I32(names.len() as i32)),
        ];
        if nth == 0 {
            metadata.extend(content.metadata.iter().map(|(name, value)| (name.as_str(), value.clone())));
        }
        let metadata: Vec<_> = metadata.iter().map(|(name, value)| (*name, value)).collect();
        let mine = names.iter().enumerate().filter(|(at, _)| at % 2 == nth).map(|(_, name)| name.as_str());
        let tensors: Vec<_> =
            mine.map(|name| (name, content.tensor(&mut file, name, &Device::Cpu).unwrap())).collect();
        let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (*name, tensor)).collect();
        gguf_file::write(&mut fs::File::create(part).unwrap(), &metadata, &tensors).unwrap();
    }
}

#[test]
fn a_gguf_model_in_several_files_is_the_model_of_one() {
    let (folder, home) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let path = folder.path().join("x.gguf");
    let model =
        crate::lm::families::families().models.into_iter().find(|model| model.case == "qwen3").unwrap();
    crate::lm::gguf::write(&path, &model.config, GgmlDType::F32);
    let names = [1, 2].map(|nth| format!("x-{nth:05}-of-00002.gguf"));
    let parts = [folder.path().join(&names[0]), folder.path().join(&names[1])];
    split(&path, [&parts[0], &parts[1]]);
    let remote =
        |name: &String| (format!("someone/quantized/{name}"), fs::read(folder.path().join(name)).unwrap());
    let server = Server::start(names.iter().map(remote).collect());
    let info = |model: &str| {
        let run =
            program(&server.address, home.path(), &[]).args(["info", "--model", model]).output().unwrap();
        assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
        run.stdout
    };
    let want = info(path.to_str().unwrap());
    assert!(parts.iter().all(|part| info(part.to_str().unwrap()) == want));
    let name = format!("someone/quantized/{}", names[1]);
    assert_eq!(info(&name), want);
    assert_eq!(server.sent(), names);
    // Both are in the cache.
    assert_eq!(info(&name), want);
    assert!(server.sent().is_empty());
}

#[test]
fn a_quantized_folder_that_cannot_be_read_is_refused_before_its_weights_are_downloaded() {
    let (folder, home) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut files = files(folder.path(), 7);
    let mut config: Value = serde_json::from_slice(&files["someone/small/config.json"]).unwrap();
    let mut tensors =
        candle_core::safetensors::load(folder.path().join("model.safetensors"), &Device::Cpu).unwrap();
    let scale = candle_core::Tensor::ones(1, DType::F32, &Device::Cpu).unwrap();
    tensors.insert("model.layers.1.mlp.up_proj.weight_scale".into(), scale);
    let path = folder.path().join("scaled.safetensors");
    candle_core::safetensors::save(&tensors, &path).unwrap();
    for (name, quantization) in
        [("three", json!({"quant_method": "gptq", "bits": 3})), ("scaled", json!({"quant_method": "fp8"}))]
    {
        config["quantization_config"] = quantization;
        files.insert(format!("someone/{name}/config.json"), config.to_string().into_bytes());
        files.insert(format!("someone/{name}/tokenizer.json"), files["someone/small/tokenizer.json"].clone());
        files.insert(format!("someone/{name}/model.safetensors"), fs::read(&path).unwrap());
    }
    let server = Server::start(files);
    for (name, sent, wants) in [
        ("someone/three", &["config.json"][..], &["quantization_config has bits 3"][..]),
        ("someone/scaled", &["config.json", "tokenizer.json"], &["up_proj", "F32", "expected F8_E4M3 or I8"]),
    ] {
        let output = lm(&server.address, home.path(), name, &[]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(wants.iter().all(|part| said.contains(part)), "{said}");
        assert_eq!(server.sent(), sent, "{name}");
    }
}

#[test]
fn a_name_that_cannot_be_had_is_one_error_before_anything_else() {
    let (folder, home) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let server = Server::start(files(folder.path(), 7));
    /// A model, variables of the environment, and words of the error.
    type Case<'a> = (&'a str, &'a [(&'a str, &'a str)], &'a [&'a str]);
    let cases: [Case<'_>; 9] = [
        ("someone/missing", &[], &["--model someone/missing@main", "no config.json"]),
        ("someone/small@v2", &[], &["someone/small@v2", "no config.json"]),
        ("someone/small/other.gguf", &[], &["no other.gguf"]),
        ("closed/small", &[], &["401", "set HF_TOKEN"]),
        ("closed/small", &[("HF_TOKEN", "wrong")], &["403", "does not allow it"]),
        ("broken/small", &[], &["500"]),
        ("someone/torn", &[], &["weight_map has \"../../up.safetensors\""]),
        ("someone/small", &[("HF_ENDPOINT", "http://127.0.0.1:9")], &["127.0.0.1:9", "HF_HUB_OFFLINE"]),
        ("someone/small", &[("HF_HUB_OFFLINE", "1")], &["no config.json", "HF_HUB_OFFLINE is set"]),
    ];
    for (model, more, wanted) in cases {
        let output = lm(&server.address, home.path(), model, more);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && output.stdout.is_empty(), "{model}: {said}");
        assert!(wanted.iter().all(|want| said.contains(want)), "{model}: {said}, want {wanted:?}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
    let output = lm(&server.address, home.path(), "./someone/small", &[]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("is no folder"));
}

#[test]
fn names_are_told_from_paths() {
    for path in [
        "small",
        "/a/b",
        "./a/b",
        "../a",
        "a/b/c",
        "a//b",
        "a/b@",
        "a/..",
        "a b/c",
        "a/b/../c.gguf",
        "~/models/x",
        "a/b@../x",
    ] {
        assert_eq!(HubName::parse(path), None, "{path}");
    }
    let named = HubName::parse("a-b/c.d_1/sub/x.gguf@refs/pr/7").unwrap();
    assert_eq!(
        (named.repo.as_str(), named.revision.as_str(), named.file.as_deref()),
        ("a-b/c.d_1", "refs/pr/7", Some("sub/x.gguf"))
    );
}
