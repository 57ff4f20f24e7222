//! Folders that are no model in the layout of the Hub: one sentence says what is there, and what to do.

use std::fs;
use std::path::Path;

use candle_core::DType;
use candle_lm::files::Files;
use candle_lm::random_model;

use crate::lm::config;

/// Names of files with their texts, and what is said of them.
type Case<'a> = (&'a [(&'a str, &'a str)], &'a [&'a str]);

fn said(folder: &Path) -> String {
    format!("{:#}", Files::open(folder).unwrap_err())
}

#[test]
fn what_a_folder_has_instead_of_a_model_is_said() {
    let model = tempfile::tempdir().unwrap();
    random_model::write(model.path(), &config(4, 2), 3, DType::F32).unwrap();
    let config = fs::read_to_string(model.path().join("config.json")).unwrap();
    let adapter = r#"{"base_model_name_or_path": "Qwen/Qwen3-0.6B"}"#;
    let cases: [Case<'_>; 6] = [
        (
            &[("adapter_config.json", adapter), ("adapter_model.safetensors", "")],
            &["an adapter", "Qwen/Qwen3-0.6B", "lm merge"],
        ),
        (&[("adapter_config.json", "damaged")], &["an adapter", "its base model"]),
        (&[("b.gguf", "GGUF"), ("a.gguf", "GGUF")], &["GGUF files", "/a.gguf"]),
        (
            &[("params.json", "{}"), ("consolidated.00.pth", "")],
            &["params.json and consolidated.00.pth", "config.json"],
        ),
        (
            &[("config.json", &config), ("pytorch_model-00001-of-00002.bin", "")],
            &["pytorch_model-00001", "save_pretrained"],
        ),
        (&[("README.md", "")], &["config.json"]),
    ];
    for (files, wants) in cases {
        let folder = tempfile::tempdir().unwrap();
        files.iter().for_each(|(name, text)| fs::write(folder.path().join(name), text).unwrap());
        let said = said(folder.path());
        assert!(wants.iter().all(|want| said.contains(want)), "{said}: {wants:?}");
    }
    // A model may have other files beside it.
    fs::write(model.path().join("x.gguf"), "GGUF").unwrap();
    fs::write(model.path().join("adapter_config.json"), adapter).unwrap();
    Files::open(model.path()).unwrap();
}

#[test]
fn a_pointer_of_git_lfs_in_the_place_of_a_file_is_said() {
    let pointer =
        format!("version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 12345\n", "0".repeat(64));
    for name in ["model.safetensors", "config.json", "tokenizer.json"] {
        let folder = tempfile::tempdir().unwrap();
        random_model::write(folder.path(), &config(4, 2), 3, DType::F32).unwrap();
        fs::write(folder.path().join(name), &pointer).unwrap();
        let error = Files::open(folder.path()).and_then(|files| files.tokenizer().map(drop)).unwrap_err();
        let said = format!("{error:#}");
        assert!(said.contains(name) && said.contains("git lfs pull"), "{said}");
    }
}
