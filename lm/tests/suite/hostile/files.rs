//! Names that lead to pipes, devices, sockets, folders, loops, and files that are larger than memory.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;

use candle_core::DType;
use candle_lm::random_model;
use test_utils::Attacks;

use super::output;

/// Runs the program, which has to end by itself with one sentence, soon and with little memory.
fn refused(args: &[&str], stdin: &Path) -> Result<String, String> {
    // More than the program takes by itself, and less than what it must not read.
    let limited = format!("ulimit -v {}; exec \"$0\" \"$@\"", 6 << 20);
    let mut command = Command::new("sh");
    command.args(["-c", &limited, env!("CARGO_BIN_EXE_lm")]).args(args);
    let stdin = File::open(stdin).map_err(|error| error.to_string())?;
    let output = output(command.stdin(stdin))?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    match output.status.code() {
        Some(1 | 2) if said.lines().count() == 1 && said.starts_with("error: ") => Ok(said),
        code => Err(format!("{code:?} {said}")),
    }
}

const NAMES: [&str; 8] = [
    "config.json",
    "tokenizer.json",
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
    "model.safetensors.index.json",
    "checkpoint.json",
];

/// Puts something else in the place of a file.
type Replace = fn(&Path) -> std::io::Result<()>;

const KINDS: [(&str, Replace); 8] = [
    ("a pipe", |path| Command::new("mkfifo").arg(path).status().map(drop)),
    ("/dev/zero", |path| symlink("/dev/zero", path)),
    ("/dev/tty", |path| symlink("/dev/tty", path)),
    ("a folder", |path| fs::create_dir(path)),
    ("a socket", |path| UnixListener::bind(path).map(drop)),
    ("a loop", |path| symlink(path, path)),
    ("a hole of a terabyte", |path| File::create(path)?.set_len(1 << 40)),
    ("/proc/self/mem", |path| symlink("/proc/self/mem", path)),
];

#[test]
fn files_of_models_that_are_no_files_are_refused_at_once() {
    let mut attacks = Attacks::new("names of files");
    let whole = tempfile::tempdir().unwrap();
    random_model::write(whole.path(), &random_model::config(), 7, DType::F32).unwrap();
    fs::write(whole.path().join("tokenizer_config.json"), r#"{"chat_template": "x"}"#).unwrap();
    for (kind, replace) in KINDS {
        for name in NAMES {
            attacks.attack(format!("{kind} as {name}"), || -> Result<(), String> {
                let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
                for entry in fs::read_dir(whole.path()).map_err(|error| error.to_string())? {
                    let entry = entry.map_err(|error| error.to_string())?;
                    let is_instead = name.ends_with(".index.json") || name == "checkpoint.json";
                    if entry.file_name() != name && !(is_instead && entry.file_name() == "model.safetensors")
                    {
                        fs::copy(entry.path(), folder.path().join(entry.file_name()))
                            .map_err(|error| error.to_string())?;
                    }
                }
                replace(&folder.path().join(name)).map_err(|error| error.to_string())?;
                let model = folder.path().to_str().ok_or("no name")?;
                let said = refused(
                    &["generate", "--chat", "--prompt", "Hi", "--max-tokens", "1", "--model", model],
                    Path::new("/dev/null"),
                )?;
                if said.contains(model) { Ok(()) } else { Err(said) }
            });
        }
        attacks.attack(format!("{kind} as a GGUF file"), || -> Result<(), String> {
            let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
            let path = folder.path().join("x.gguf");
            replace(&path).map_err(|error| error.to_string())?;
            refused(&["info", "--model", path.to_str().ok_or("no name")?], Path::new("/dev/null")).map(drop)
        });
        for flags in [&["score", "--text"][..], &["generate", "--prompts"], &["train", "--train"]] {
            // A text may come from a pipe, and waits for who writes to it.
            if kind == "a pipe" {
                continue;
            }
            attacks.attack(format!("{kind} as {}", flags[1]), || {
                let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
                let path = folder.path().join("text");
                replace(&path).map_err(|error| error.to_string())?;
                let (path, model) =
                    (path.to_str().ok_or("no name")?, whole.path().to_str().ok_or("no name")?);
                refused(&[flags, &[path, "--model", model]].concat(), Path::new("/dev/null")).map(drop)
            });
        }
    }
    attacks.assert();
}

#[test]
fn streams_without_an_end_are_refused() {
    let mut attacks = Attacks::new("streams");
    for args in [&["score"][..], &["generate"], &["generate", "--chat"]] {
        attacks.attack(format!("{args:?} of /dev/zero"), || -> Result<(), String> {
            let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
            random_model::write(folder.path(), &random_model::config(), 7, DType::F32)
                .map_err(|error| error.to_string())?;
            fs::write(folder.path().join("chat_template.jinja"), "x").map_err(|error| error.to_string())?;
            let model = folder.path().to_str().ok_or("no name")?;
            refused(&[args, &["--model", model]].concat(), Path::new("/dev/zero")).map(drop)
        });
    }
    attacks.assert();
}
