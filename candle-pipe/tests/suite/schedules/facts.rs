//! The orders of PyTorch, taken down by `benchmarks/schedule_facts.py`.
use super::schedule;
use candle_pipe::schedule::{Edges, Lowering, Program, Schedule, ScheduleKind};
use serde::Deserialize;

#[derive(Deserialize)]
struct Fact {
    schedule: String,
    stages_per_rank: usize,
    ranks: usize,
    /// Microbatches, and the hashes of the order and of the lowered order.
    rows: Vec<(usize, String, String)>,
}

fn facts() -> Vec<Fact> {
    serde_json::from_str(include_str!("facts.json")).unwrap()
}

/// The 64-bit FNV-1a hash, in hex.
fn hash(text: &str) -> String {
    let hash = text.bytes().fold(0xcbf29ce484222325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    format!("{hash:x}")
}

#[test]
fn every_order_of_pytorch_is_ours() {
    let facts = facts();
    assert_eq!(facts.iter().map(|fact| fact.rows.len()).sum::<usize>(), 2678);
    for Fact { schedule: name, stages_per_rank, ranks, rows } in &facts {
        for (microbatches, order, _) in rows {
            let ours = schedule(name, *ranks, *microbatches, *stages_per_rank).to_csv();
            let what = format!(
                "{name}, {ranks} ranks, {microbatches} microbatches, {stages_per_rank} stages a rank"
            );
            assert_eq!(&hash(&ours), order, "{what}:\n{ours}");
        }
    }
}

#[test]
fn every_lowered_order_of_pytorch_is_ours() {
    for Fact { schedule: name, stages_per_rank, ranks, rows } in facts() {
        for (microbatches, _, lowered) in rows {
            let ours = schedule(&name, ranks, microbatches, stages_per_rank);
            let ours = ours.lower(&Lowering::new(Edges::chain(ours.stages()))).unwrap().to_csv();
            let what = format!(
                "{name}, {ranks} ranks, {microbatches} microbatches, {stages_per_rank} stages a rank"
            );
            assert_eq!(hash(&ours), lowered, "{what}:\n{ours}");
        }
    }
}

#[test]
fn what_pytorch_refuses_is_refused_unless_it_can_be_ordered() {
    for Fact { schedule: name, stages_per_rank, ranks, rows } in facts() {
        let kind: ScheduleKind = name.parse().unwrap();
        let taken =
            (1..=32).filter(|&microbatches| kind.schedule(ranks, microbatches, stages_per_rank).is_ok());
        let theirs = rows.iter().map(|(microbatches, ..)| *microbatches);
        if name == "1f1b" {
            assert_eq!(taken.count(), 32, "fewer microbatches than ranks can be ordered too");
        } else {
            assert!(taken.eq(theirs), "{name}, {ranks} ranks, {stages_per_rank} stages a rank");
        }
    }
}

#[test]
fn files_of_pytorch_are_read_and_written_as_they_are() {
    let text = include_str!("computed.csv").replace("\r\n", "\n");
    let computed = Schedule::from_csv(&text).unwrap();
    assert_eq!(computed.to_csv(), text);
    assert_eq!(computed.ranks()[1][0], None);
    assert!(computed.computes(1).eq(schedule("interleaved-zb", 2, 3, 2).computes(1)));

    let text = include_str!("lowered.csv").replace("\r\n", "\n");
    let lowered = Program::from_csv(&text).unwrap();
    assert_eq!(lowered.to_csv(), text);
    assert_eq!(*lowered.schedule(), schedule("dualpipev", 2, 5, 2));
}
