//! Names and texts that would steer a terminal.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use candle_core::DType;
use candle_lm::random_model;
use serde_json::{Value, json};
use test_utils::Attacks;

use crate::lm::{config, llama};

/// Clears the screen, sets the title, and turns the line around.
const EVIL: &str = "\u{1b}[2J\u{1b}]0;x\u{7}\u{9b}31m\u{202e}";

/// Runs the program and fails if it printed what steers a terminal, or not `shown`.
fn is_clean(flags: &[&str], shown: &str) -> Result<(), String> {
    let output = llama(flags);
    let said = [String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr)].concat();
    let steers = |char: char| char.is_control() && char != '\n' || char == '\u{202e}';
    match !said.contains(steers) && said.contains(shown) {
        true => Ok(()),
        false => Err(format!("{said:?}")),
    }
}

/// Writes a small model to a folder, with a field of its configuration changed.
fn model(folder: &Path, field: &str, value: Value) {
    random_model::write(folder, &config(2, 1), 7, DType::F32).unwrap();
    let path = folder.join("config.json");
    let mut fields: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    fields[field] = value;
    fs::write(&path, fields.to_string()).unwrap();
}

#[test]
fn names_and_texts_of_strangers_cannot_steer_a_terminal() {
    let mut attacks = Attacks::new("what is printed");
    let escaped = "\\u{1b}[2J";
    attacks.attack("the name of a folder that is not there", || {
        is_clean(&["info", "--model", &format!("/{EVIL}")], escaped)
    });
    // clap removes what it knows.
    attacks.attack("a flag", || is_clean(&["info", &format!("--{EVIL}")], "\\u{9b}31m"));
    attacks.attack("a value of a flag", || is_clean(&["info", "--dtype", EVIL], "\\u{9b}31m"));
    attacks.attack("the name of a folder", || {
        let folder = tempfile::tempdir().unwrap();
        let named = folder.path().join(OsStr::from_bytes(EVIL.as_bytes()));
        fs::create_dir(&named).unwrap();
        fs::write(named.join("config.json"), "{").unwrap();
        is_clean(&["info", "--model", named.to_str().unwrap()], escaped)
    });
    for field in ["model_type", "hidden_act", "torch_dtype"] {
        attacks.attack(format!("{field} of config.json"), || {
            let folder = tempfile::tempdir().unwrap();
            model(folder.path(), field, json!(EVIL));
            is_clean(&["info", "--model", folder.path().to_str().unwrap()], "")
        });
    }
    for template in [
        format!("{{{{ raise_exception({:?}) }}}}", EVIL.replace('"', "")),
        format!("{{% {EVIL} %}}"),
        format!("{{{{ {EVIL} }}}}"),
    ] {
        attacks.attack(format!("the template {template:?}"), || {
            let folder = tempfile::tempdir().unwrap();
            model(folder.path(), "x", json!(1));
            fs::write(folder.path().join("chat_template.jinja"), &template).unwrap();
            let model = folder.path().to_str().unwrap();
            is_clean(
                &["generate", "--model", model, "--chat", "--prompt", "x", "--max-tokens", "1"],
                "error: ",
            )
        });
    }
    attacks.assert();
}
