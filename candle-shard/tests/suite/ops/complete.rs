//! No op without a sweep: what the crate defines is compared with what the sweeps' sources call.
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Ops whose results are no numbers to compare, with the test that shows what they do.
const ELSEWHERE: [&str; 7] = [
    "replicated", // in all forms of the operators: a plain tensor beside a distributed one
    "side",       // the operands of all binary ops
    "indexers",   // the arguments of `i`
    "to_vec0",    // elements as lists: names.rs
    "to_vec1",
    "to_vec2",
    "to_vec3",
];

fn sources(folder: &str) -> Vec<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let files = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
    let files = files.filter(|file| file.is_file() && !file.ends_with("complete.rs"));
    files.map(|file| fs::read_to_string(file).unwrap()).collect()
}

fn is_name(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}

/// The public functions of a source, and the names in its tables of ops: lines such as `relu, Rising, Tensor::relu;`.
fn ops_of(source: &str) -> Vec<String> {
    let function =
        |line: &str| line.trim().strip_prefix("pub fn ")?.split(['(', '<']).next().map(str::to_string);
    let listed = |line: &str| {
        let mut cells = line.trim().strip_suffix(';')?.split(", ");
        let first =
            cells.next().filter(|first| first.chars().all(char::is_alphanumeric) || is_name(first))?;
        let cells: Vec<&str> = cells.collect();
        let names = std::iter::once(first).chain(cells.iter().copied()).filter(|cell| is_name(cell));
        (!cells.is_empty()).then(|| names.map(str::to_string).collect::<Vec<_>>())
    };
    let table = source.lines().filter(|line| line.starts_with("    ") && !line.starts_with("     "));
    let listed = table.filter_map(listed).flatten();
    source.lines().filter_map(function).filter(|name| is_name(name)).chain(listed).collect()
}

/// The names of all ops.
pub(crate) fn ops() -> BTreeSet<String> {
    sources("src/ops").iter().flat_map(|source| ops_of(source)).collect()
}

#[test]
fn every_op_is_in_a_sweep() {
    let ops = ops();
    let sweeps = sources("tests/suite/ops").concat();
    let swept =
        |op: &String| [format!(".{op}("), format!("DTensor::{op}")].iter().any(|call| sweeps.contains(call));
    assert!(
        ["relu", "floor", "argmin_keepdim", "broadcast_as", "lt"].iter().all(|op| ops.contains(*op)),
        "{ops:?}"
    );
    let missing: Vec<&String> =
        ops.iter().filter(|op| !swept(op) && !ELSEWHERE.contains(&op.as_str())).collect();
    assert!(missing.is_empty(), "ops that no sweep calls: {missing:?}");
    println!("{} ops, each in a sweep", ops.len());
}
