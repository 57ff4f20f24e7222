//! The state of a thread in candle-shard is listed in one place: the docs of its `autograd` module.
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// All source files below a folder.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let below = |path: PathBuf| if path.is_dir() { sources(&path) } else { vec![path] };
    entries
        .flat_map(below)
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .collect()
}

/// The names of the thread-locals that a source file declares.
fn declared(text: &str) -> Vec<String> {
    let blocks = text.split("thread_local! {").skip(1);
    let name = |line: &str| Some(line.trim().strip_prefix("static ")?.split(':').next()?.to_string());
    blocks
        .flat_map(|block| block.lines().skip(1).take_while(|line| line.trim() != "}").filter_map(name))
        .collect()
}

/// The names in backticks of a cell of a table.
fn quoted(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

#[test]
fn the_table_of_thread_locals_is_complete() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../candle-shard/src");
    let of = |path: &PathBuf| {
        let file = path.strip_prefix(&root).unwrap().to_str().unwrap().to_string();
        declared(&std::fs::read_to_string(path).unwrap()).into_iter().map(move |name| (file.clone(), name))
    };
    let in_code: BTreeSet<(String, String)> = sources(&root).iter().flat_map(of).collect();
    let docs = std::fs::read_to_string(root.join("autograd/mod.rs")).unwrap();
    let rows =
        docs.split("# State of a thread").nth(1).unwrap().lines().filter(|line| line.starts_with("//! | `"));
    let listed = rows.flat_map(|row| {
        let cells: Vec<&str> = row.split('|').collect();
        let file = quoted(cells[1]).next().unwrap().to_string();
        quoted(cells[2]).map(|name| (file.clone(), name.to_string())).collect::<Vec<_>>()
    });
    assert_eq!(listed.collect::<BTreeSet<_>>(), in_code);
    assert!(in_code.contains(&("autograd/off_graph.rs".into(), "OFF_GRAPH".into())), "{in_code:?}");
}
