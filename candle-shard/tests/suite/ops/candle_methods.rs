//! What candle's `Tensor` has, `DTensor` has too, or there is a reason.
//!
//! `candle_methods.txt` lists the public methods of `Tensor` and the release that they were taken from. Where the source of
//! that release lies in cargo's registry, the list is compared with it.
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Why `DTensor` lacks a method.
const LACKS: &[(&str, &str)] = &[
    ("apply_op1", "a custom op says nothing of layouts: `on_whole` runs it on whole tensors"),
    ("apply_op1_arc", "see apply_op1"),
    ("apply_op1_no_bwd", "see apply_op1; it drops gradients"),
    ("apply_op2", "see apply_op1"),
    ("apply_op2_arc", "see apply_op1"),
    ("apply_op2_no_bwd", "see apply_op1; it drops gradients"),
    ("apply_op3", "see apply_op1"),
    ("apply_op3_arc", "see apply_op1"),
    ("apply_op3_no_bwd", "see apply_op1; it drops gradients"),
    ("inplace_op1", "see apply_op1; of one shard alone: `to_local().inplace_op1(..)`"),
    ("inplace_op2", "see inplace_op1"),
    ("inplace_op3", "see inplace_op1"),
    ("conv1d_with_algo", "an algorithm of cuDNN, which changes no number: `conv1d`"),
    ("conv2d_with_algo", "an algorithm of cuDNN, which changes no number: `conv2d`"),
    ("empty", "memory without values, which would differ between the ranks: `zeros`"),
    ("empty_like", "memory without values, which would differ between the ranks: `zeros_like`"),
    ("new", "`distribute` takes a tensor that every rank has"),
    ("from_iter", "see new"),
    ("from_slice", "see new"),
    ("from_vec", "see new"),
    ("from_raw_buffer", "see new"),
    ("from_storage", "see new"),
    ("read_npy", "see new; `Weights` reads each rank's own blocks of safetensors"),
    ("read_npz", "see read_npy"),
    ("read_npz_by_name", "see read_npy"),
    ("save_safetensors", "`checkpoint::save` writes each rank's own blocks"),
    ("write_npy", "see save_safetensors"),
    ("write_npz", "see save_safetensors"),
    ("write_bytes", "see save_safetensors"),
    ("id", "of this rank's shard: `to_local().id()`"),
    ("is_fortran_contiguous", "of this rank's shard: `to_local().is_fortran_contiguous()`"),
    ("is_variable", "of this rank's shard: `to_local().is_variable()`"),
    ("layout", "of this rank's shard: `to_local().layout()`; the layout on the mesh is `spec()`"),
    ("sorted_nodes", "of this rank's graph: `to_local().sorted_nodes()`"),
    ("storage_and_layout", "of this rank's shard: `to_local().storage_and_layout()`"),
    ("stride", "of this rank's shard: `to_local().stride()`"),
    ("strided_blocks", "of this rank's shard: `to_local().strided_blocks()`"),
    ("strided_index", "of this rank's shard: `to_local().strided_index()`"),
    ("track_op", "of this rank's shard: `to_local().track_op()`, which is the same on all ranks"),
];

/// Name and version of a package that this workspace is locked to.
pub(super) fn package_of(name: &str) -> String {
    let lock = Path::new(env!("CARGO_MANIFEST_DIR")).join("../Cargo.lock");
    let text = fs::read_to_string(&lock).unwrap_or_else(|e| panic!("{}: {e}", lock.display()));
    let after =
        text.split_once(&format!("name = \"{name}\"\nversion = \"")).unwrap_or_else(|| panic!("no {name}"));
    format!("{name}-{}", after.1.split('"').next().unwrap())
}

/// The source of a package in cargo's registry, or why it is not there.
pub(super) fn source_of(package: &str) -> Result<PathBuf, String> {
    let cargo = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let cargo = cargo
        .or_else(|| Some(std::env::home_dir()?.join(".cargo")))
        .ok_or("neither CARGO_HOME nor a home")?;
    let registries =
        fs::read_dir(cargo.join("registry/src")).map_err(|e| format!("{}: {e}", cargo.display()))?;
    let found = registries.filter_map(|registry| Some(registry.ok()?.path().join(package).join("src")));
    let why = || format!("no source of {package} below {}: run `cargo fetch`", cargo.display());
    found.into_iter().find(|source| source.is_dir()).ok_or_else(why)
}

/// All Rust files below a folder.
fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let files = entries.flat_map(|path| match path.is_dir() {
        true => rust_files(&path),
        false => Vec::from_iter((path.extension() == Some("rs".as_ref())).then_some(path)),
    });
    files.collect()
}

/// The public methods in blocks that begin with one of `heads`, and what macros there make by name.
fn methods(source: &str, heads: &[&str]) -> BTreeSet<String> {
    const MADE: [&str; 6] = [
        "pub fn ",
        "pub unsafe fn ",
        "unary_op!(",
        "binary_op!(",
        "binary_op_scalar!(",
        "broadcast_binary_op!(",
    ];
    let mut inside = false;
    let mut found = BTreeSet::new();
    for line in source.lines() {
        match line {
            _ if heads.contains(&line) => inside = true,
            "}" => inside = false,
            _ if inside => {
                let rest =
                    line.strip_prefix("    ").and_then(|line| MADE.iter().find_map(|p| line.strip_prefix(p)));
                found.extend(rest.map(word));
            }
            _ => {}
        }
    }
    found
}

/// The name at the start of a text.
fn word(text: &str) -> String {
    text.trim_start().chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect()
}

fn of_candle(source: &Path) -> BTreeSet<String> {
    let read = |file: &PathBuf| fs::read_to_string(file).unwrap();
    let blocks = rust_files(source)
        .iter()
        .flat_map(|file| methods(&read(file), &["impl Tensor {"]))
        .collect::<Vec<_>>();
    let shape = read(&source.join("shape.rs"));
    blocks.into_iter().chain(shape.split("\nextract_dims!(").skip(1).map(word)).collect()
}

fn of_dtensor() -> BTreeSet<String> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let files = rust_files(&source).into_iter().map(|file| fs::read_to_string(file).unwrap());
    let in_blocks = files.flat_map(|text| methods(&text, &["impl DTensor {"])).collect::<Vec<_>>();
    let dims = fs::read_to_string(source.join("tensor/dtensor.rs")).unwrap();
    let dims = dims
        .split("\nsizes!(")
        .nth(1)
        .unwrap()
        .split("\n);")
        .next()
        .unwrap()
        .lines()
        .map(word)
        .collect::<Vec<_>>();
    in_blocks.into_iter().chain(dims).chain(super::complete::ops()).collect()
}

fn listed() -> (String, BTreeSet<String>) {
    let mut lines = include_str!("candle_methods.txt").lines();
    (lines.next().unwrap().replace(' ', "-"), lines.map(str::to_string).collect())
}

#[test]
fn every_method_of_candles_tensor_is_here_or_has_a_reason() {
    let (candles, ours) = (listed().1, of_dtensor());
    let reasons: BTreeMap<&str, &str> = LACKS.iter().copied().collect();
    assert_eq!(reasons.len(), LACKS.len(), "a method has two reasons");
    let missing: Vec<_> =
        candles.iter().filter(|m| !ours.contains(*m) && !reasons.contains_key(m.as_str())).collect();
    assert!(missing.is_empty(), "candle's Tensor has what DTensor lacks without a reason: {missing:?}");
    let idle: Vec<_> = reasons.keys().filter(|m| ours.contains(**m) || !candles.contains(**m)).collect();
    assert!(idle.is_empty(), "reasons for what DTensor has, or candle has not: {idle:?}");
}

#[test]
fn the_list_of_candles_methods_is_that_of_its_source() {
    let (release, list) = listed();
    let package = package_of("candle-core");
    assert_eq!(release, package, "candle_methods.txt is of another release: write its list again");
    match source_of(&package) {
        Ok(source) => {
            let found = of_candle(&source);
            let (new, gone): (Vec<_>, Vec<_>) =
                (found.difference(&list).collect(), list.difference(&found).collect());
            assert!(
                new.is_empty() && gone.is_empty(),
                "candle_methods.txt lacks {new:?} and has too many: {gone:?}"
            );
        }
        Err(why) => println!("candle_methods.txt was not compared with the source: {why}"),
    }
}
