//! Random programs of 3 to 6 ops over all ops, in random layouts on random meshes, against plain candle on one device:
//! each value, and the gradient of each leaf. Calls that are made wrong end alike on all ranks.
//!
//! `CANDLE_SHARD_PROGRAMS=20000` runs as many programs, `CANDLE_SHARD_FIRST_PROGRAM=7` begins at the seed 7. A failing
//! program is made smaller and printed with its seed.
mod program;
mod run;
mod table;
mod truth;

use crate::ops::complete;
use itertools::Itertools;
use program::Program;
use std::collections::BTreeSet;
use std::io::Write;

/// Ops that are in no program, with the reason.
const ELSEWHERE: &[&str] = &[
    "embedding_renorm", // these change a tensor in place
    "const_set",
    "one_set",
    "scatter_add_set",
    "scatter_set",
    "slice_set",
    "zero_set",
    "candidate_keys",
    "is_contiguous", // these give no elements to compare
    "largest_keys",
    "side",
    "to_device",
    "to_vec0", // elements as lists
    "to_vec1",
    "to_vec2",
    "to_vec3",
];

/// Programs that are drawn before they run.
const BATCH: u64 = 800;

fn from_environment(name: &str, default: u64) -> u64 {
    let wrong = |value: String| panic!("{name}={value:?} is no number");
    std::env::var(name).map_or(default, |value| value.parse().unwrap_or_else(|_| wrong(value)))
}

#[test]
fn random_programs_equal_one_device() {
    let first = from_environment("CANDLE_SHARD_FIRST_PROGRAM", 0);
    let programs = from_environment("CANDLE_SHARD_PROGRAMS", 3000);
    let entries = table::entries();
    let (mut refused, mut failed, mut ops) = (0, Vec::new(), BTreeSet::new());
    for start in (first..first + programs).step_by(BATCH as usize) {
        let drawn = (start..(start + BATCH).min(first + programs))
            .map(|seed| Program::new(seed, &entries))
            .collect_vec();
        ops.extend(drawn.iter().flat_map(|program| &program.steps).map(|step| step.entry.name));
        let (no, wrong) = run::all(drawn);
        refused += no;
        failed.extend(wrong);
        if failed.len() > 20 {
            break;
        }
    }
    let line = format!(
        "{programs} programs of {} ops, {refused} wrong calls refused, {} fail\n",
        ops.len(),
        failed.len()
    );
    std::io::stdout().write_all(line.as_bytes()).unwrap(); // tests capture what `println` writes
    let seeds = failed.iter().map(|(program, _)| program.seed).join(", ");
    if let Some((program, reason)) = failed.into_iter().next() {
        let again =
            format!("CANDLE_SHARD_FIRST_PROGRAM={} CANDLE_SHARD_PROGRAMS=1 runs it again", program.seed);
        let (small, why) = run::shrunk(program.clone(), reason.clone());
        panic!("programs {seeds} fail\n{program}\n{reason}\n{again}\nand smaller:\n{small}\n{why}");
    }
    assert!(
        programs < 3000 || ops.len() == entries.len(),
        "only {} of {} ops were drawn",
        ops.len(),
        entries.len()
    );
}

#[test]
fn every_op_is_in_programs() {
    let drawn: BTreeSet<&str> = table::entries().iter().map(|entry| entry.name).collect();
    let missing = complete::ops()
        .into_iter()
        .filter(|op| !drawn.contains(op.as_str()) && !ELSEWHERE.contains(&op.as_str()));
    let missing = missing.collect_vec();
    assert!(
        missing.is_empty(),
        "ops that no program calls: {missing:?}; add a row to tests/suite/programs/table"
    );
}
