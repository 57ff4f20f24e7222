//! Concatenates the workspace's own Rust sources into the text that the toy Transformer reads by default.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

fn main() -> io::Result<()> {
    let manifest = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let root = manifest.parent().unwrap_or(&manifest);
    println!("cargo::rerun-if-changed={}", root.join("Cargo.toml").display());

    let mut sources = Vec::new();
    for entry in fs::read_dir(root)? {
        let crate_dir = entry?.path();
        if crate_dir.join("Cargo.toml").is_file() {
            println!("cargo::rerun-if-changed={}", crate_dir.display());
            collect_sources(&crate_dir, &mut sources)?;
        }
    }
    // Sorted by component, so that the text is the same on every file system.
    sources.sort();

    let mut text = String::new();
    for source in &sources {
        // Line ends as in the repository, also where git has made them CRLF.
        text.push_str(&fs::read_to_string(source)?.replace("\r\n", "\n"));
    }
    fs::write(out.join("corpus.txt"), text)
}

fn collect_sources(dir: &Path, sources: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let (path, name) = (entry.path(), entry.file_name());
        if entry.file_type()?.is_dir() {
            if name != "target" && !name.to_string_lossy().starts_with('.') {
                collect_sources(&path, sources)?;
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            sources.push(path);
        }
    }
    Ok(())
}
