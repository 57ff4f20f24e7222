//! Makes every function that the build links, and that the simulator does not model, end the process with its name.
//!
//! `NCCL_SIM_NAMES` is a file with the names of all linked functions, one per line; without it there are none.
use std::collections::BTreeSet;
use std::fmt::Write;
use std::{env, fs, path::Path};

fn main() {
    println!("cargo::rerun-if-env-changed=NCCL_SIM_NAMES");
    println!("cargo::rerun-if-changed=src");
    let mut modeled = BTreeSet::new();
    collect(Path::new("src"), &mut modeled);
    let linked = env::var("NCCL_SIM_NAMES").ok().map(|path| {
        println!("cargo::rerun-if-changed={path}");
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
    });
    let mut code = String::new();
    for name in linked.iter().flat_map(|names| names.lines()).filter(|name| !modeled.contains(*name)) {
        writeln!(
            code,
            "#[unsafe(no_mangle)] extern \"C\" fn {name}() -> ! {{ crate::report::unmodeled({name:?}) }}"
        )
        .expect("a string grows");
    }
    let out = env::var("OUT_DIR").expect("cargo sets it");
    fs::write(Path::new(&out).join("unmodeled.rs"), code).expect("the folder is writable");
}

/// Collects the names of the exported functions in a folder.
fn collect(folder: &Path, names: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).expect("the sources are there").flatten() {
        if entry.path().is_dir() {
            collect(&entry.path(), names);
            continue;
        }
        let source = fs::read_to_string(entry.path()).expect("a source file");
        let functions = source.split("extern \"C\" fn ").skip(1);
        names.extend(functions.filter_map(|rest| rest.split('(').next()).map(str::to_string));
    }
}
