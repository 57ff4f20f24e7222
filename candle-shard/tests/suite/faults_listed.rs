//! The list of known faults in `docs/pytorch-faults.md` and the tests are one.
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn list() -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/pytorch-faults.md")).unwrap()
}

fn suite() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/suite")
}

/// The tests that the list names, as modules and a function.
fn named() -> BTreeSet<String> {
    let quoted = list().split('`').skip(1).step_by(2).map(str::to_string).collect::<Vec<_>>();
    quoted.into_iter().filter(|name| name.contains("::")).collect()
}

#[test]
fn every_test_in_the_list_exists() {
    let named = named();
    assert!(named.len() > 30, "{named:?}");
    for name in named {
        let (modules, function) = name.rsplit_once("::").unwrap();
        let source =
            fs::read_to_string(suite().join(modules.replace("::", "/")).with_extension("rs")).unwrap();
        assert!(source.contains(&format!("#[test]\nfn {function}(")), "{name} is no test");
    }
}

#[test]
fn every_fault_that_a_test_names_is_in_the_list() {
    let list = list();
    for file in [
        "faults_views",
        "faults_layers",
        "faults_elementwise",
        "faults_dispatch",
        "embedding/faults",
        "sharded_tensor/faults",
    ] {
        let source = fs::read_to_string(suite().join(file).with_extension("rs")).unwrap();
        let numbers = source.lines().filter_map(|line| line.strip_prefix("/// Fault"));
        let numbers = numbers
            .flat_map(|rest| rest.split(':').next().unwrap_or_default().split(|c: char| !c.is_ascii_digit()));
        let letters = source.lines().filter_map(|line| line.strip_prefix("fn fault_")?.split('_').next());
        for fault in numbers.chain(letters).filter(|fault| !fault.is_empty()) {
            assert!(
                list.contains(&format!("\n| {fault} | ")),
                "fault {fault} of {file} is not in docs/pytorch-faults.md"
            );
        }
    }
}
