//! How many names a reader meets: methods of process groups, and functions, files and words of `docs/walk.md`.
use crate::functions::{Function, functions, rust_files, types, workspace};
use itertools::Itertools;
use std::collections::BTreeSet;

/// The most public methods of `ProcessGroup`. Forms are methods of a call, and objects have a view.
const METHODS: usize = 35;

/// The most functions, files and words on the path of `docs/walk.md`.
const PATH: (usize, usize, usize) = (20, 12, 12);

/// The most functions beside that path.
const BESIDE: usize = 57;

/// The most types that signatures on the path name, and that are none of the words.
const FURTHER_TYPES: usize = 19;

#[test]
fn a_process_group_has_few_methods() {
    let files = rust_files(&workspace().join("candle-dist/src"));
    let methods = files.iter().flat_map(|file| functions(file));
    let methods = methods.filter(|function| function.owner == "ProcessGroup" && function.is_public);
    let names: Vec<String> = methods.map(|function| function.name).sorted().collect();
    assert!(names.contains(&"all_reduce".to_string()), "{names:?}");
    assert!(names.len() <= METHODS, "{} public methods of ProcessGroup: {names:?}", names.len());
}

/// Names that candle's and the standard library's types have too, which signatures mean.
const FOREIGN: [&str; 2] = ["Result", "Storage"];

/// A row of a table: the words in backticks, without the backticks.
fn quoted(row: &str) -> Vec<String> {
    row.split('`').skip(1).step_by(2).map(String::from).collect()
}

/// Returns the rows of the table under a heading.
fn table<'a>(page: &'a str, heading: &str) -> Vec<&'a str> {
    let section = page.split("\n## ").find(|section| section.starts_with(heading)).unwrap_or_default();
    section.lines().filter(|line| line.starts_with('|')).skip(2).collect()
}

/// Finds the functions of a table in the files that it names.
fn found(rows: &[&str]) -> Vec<(Function, String)> {
    let find = |row: &&str| {
        let [name, file, ..] = &quoted(row)[..] else { panic!("no function and file in {row}") };
        let (owner, bare) = name.split_once("::").unwrap_or(("", name));
        let all = functions(&workspace().join(file));
        let function = all.into_iter().find(|function| function.owner == owner && function.name == bare);
        (function.unwrap_or_else(|| panic!("{file} has no {name}")), file.clone())
    };
    rows.iter().map(find).collect()
}

#[test]
fn the_walk_is_short_and_true() {
    let page = std::fs::read_to_string(workspace().join("docs/walk.md")).unwrap();
    let (path, beside) = (found(&table(&page, "The path")), found(&table(&page, "Beside the path")));
    let files: BTreeSet<&String> = path.iter().map(|(_, file)| file).collect();
    let words: Vec<Vec<&str>> =
        table(&page, "The words").iter().map(|row| row.split('|').map(str::trim).collect()).collect();
    let counts = (path.len(), files.len(), words.len());
    assert!(
        counts.0 <= PATH.0 && counts.1 <= PATH.1 && counts.2 <= PATH.2,
        "functions, files, words {counts:?}, at most {PATH:?}"
    );
    assert!(beside.len() <= BESIDE, "{} functions beside the path", beside.len());

    let glossary = std::fs::read_to_string(workspace().join("docs/glossary.md")).unwrap();
    let explained: BTreeSet<&str> = glossary
        .lines()
        .filter(|line| line.starts_with("| **"))
        .flat_map(|line| line.split('|').nth(1).unwrap_or_default().split(','))
        .map(|word| word.trim().trim_matches('*'))
        .collect();
    let unknown: Vec<&str> =
        words.iter().map(|row| row[1]).filter(|word| !explained.contains(word)).collect();
    assert!(unknown.is_empty(), "words that docs/glossary.md lacks: {unknown:?}");

    // A signature names no type that the page does not.
    let crates = ["candle-dist", "candle-shard"];
    let sources = crates.map(|name| rust_files(&workspace().join(name).join("src"))).concat();
    let mut known: BTreeSet<String> = sources.iter().flat_map(|file| types(file)).collect();
    known.retain(|name| !FOREIGN.contains(&name.as_str()));
    let taught: BTreeSet<String> = words.iter().map(|row| row[2].trim_matches('`').to_string()).collect();
    let lost: Vec<&String> = taught.iter().filter(|name| !known.contains(*name)).collect();
    assert!(lost.is_empty(), "types that do not exist: {lost:?}");
    let named = path.iter().flat_map(|(function, _)| function.words.iter().chain([&function.owner]));
    let further: BTreeSet<&String> =
        named.filter(|name| known.contains(*name) && !taught.contains(*name)).collect();
    let listed = page.split("The signatures of the path also name").nth(1).unwrap_or_default();
    let listed = quoted(listed.split("\n\n").next().unwrap_or_default());
    assert_eq!(further.into_iter().sorted().collect_vec(), listed.iter().collect_vec());
    assert!(listed.len() <= FURTHER_TYPES, "{} types beside the words", listed.len());
}
