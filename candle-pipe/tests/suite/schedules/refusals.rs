//! What is no schedule, or none that fits: one sentence that names the place.
use super::schedule;
use candle_pipe::schedule::{Costs, Edges, Lowering, Schedule, ScheduleKind, StageOrder, fastest, greedy};
use std::fmt::Debug;

#[track_caller]
fn refused<T: Debug, E: ToString>(made: Result<T, E>, mentions: &[&str]) {
    let said = made.map(|made| format!("{made:?}")).map_err(|error| error.to_string()).unwrap_err();
    for mention in mentions {
        assert!(said.contains(mention), "should mention {mention:?}: {said}");
    }
}

#[test]
fn orders_that_are_no_schedule() {
    let cases: &[(&str, &[&str])] = &[
        ("", &["there is no rank"]),
        ("\n", &["there is no rank"]),
        (",\n", &["rank 0 has no stage"]),
        ("0F0,0B0\n\n1F0,1B0\n", &["rank 1 has no stage"]),
        ("0F0,0B0\n,\n", &["rank 1 has no stage"]),
        ("0F0,0B0\n2F0,2B0\n", &["stage 1 is on no rank"]),
        ("99999999999999999F0\n", &["stage 0 is on no rank"]),
        ("0F18446744073709551615\n", &["0F0 is missing"]),
        ("0F0,0F1,0B0,0B1\n1F0,1B0\n", &["1F1 is missing"]),
        ("0F0,0F1,0B0\n", &["0B1 is missing"]),
        ("0F0,0B0,0B1\n", &["0F1 is missing"]),
        ("0F0\n1F0,1B0\n", &["0B0 is missing"]),
        ("0F0,0I0\n", &["0W0 is missing"]),
        ("0F0,0W0\n", &["0I0 is missing"]),
        ("0F0,0F0,0B0\n", &["rank 0, position 1, 0F0", "duplicate", "rank 0, position 0"]),
        ("0F0,0B0\n1F0,1B0,0F0\n", &["rank 1, position 2, 0F0", "duplicate"]),
        ("0F0,0B0,0I0\n", &["0B0", "duplicate", "0I0 is there too"]),
        ("0F0,0B0,0W0\n", &["0B0", "duplicate", "0W0 is there too"]),
        ("0B0,0F0\n", &["rank 0, position 0, 0B0", "misplaced", "needs 0F0"]),
        ("0F0,0W0,0I0\n", &["rank 0, position 1, 0W0", "misplaced", "needs 0I0"]),
        ("(0F0;0B0)OVERLAP_F_B\n", &["0B0", "misplaced"]),
        ("0F0\n1F0,1B0,0B0\n", &["rank 1, position 2, 0B0", "stage 0 is on rank 0 too"]),
        ("0F0,0SEND_F0,0B0\n1F0,1B0\n", &["rank 0, position 1, 0SEND_F0", "communicates"]),
        ("0F0,0B0 0W0\n", &["position 1", "is no action"]),
        ("1F0,1B0,0F0,0B0\n", &["rank 0, position 0, 1F0", "waits for stage 0"]),
        ("0F0,0B0,2F0,2B0\n1F0,1B0\n", &["waits for stage", "forever"]),
        ("0F0,0F1,0B1,0B0\n1F0,1B0,1F1,1B1\n2F1,2F0,2B0,2B1\n", &["waits for stage", "forever"]),
    ];
    for (text, mentions) in cases {
        refused(Schedule::from_csv(text), mentions);
    }
}

#[test]
fn kinds_that_do_not_fit() {
    let cases: &[(&str, [usize; 3], &[&str])] = &[
        ("gpipe", [0, 4, 1], &["gpipe", "0 ranks"]),
        ("gpipe", [4, 0, 1], &["gpipe", "0 microbatches"]),
        ("gpipe", [4, 4, 0], &["gpipe", "0 stages per rank"]),
        ("1f1b", [4, 4, 2], &["1f1b", "a rank has 1 stages, not 2"]),
        ("zbv", [4, 4, 1], &["zbv", "2 stages, not 1"]),
        ("interleaved-1f1b", [4, 9, 2], &["interleaved-1f1b", "9 microbatches", "2 equal rounds"]),
        ("interleaved-zb", [4, 11, 2], &["interleaved-zb", "11 microbatches", "2 equal rounds"]),
        ("dualpipev", [4, 7, 2], &["dualpipev", "7 microbatches", "8 stages"]),
        ("looped-bfs", [1 << 20, 1 << 20, 1 << 40], &["too many"]),
        ("gpipe", [1 << 20, 1 << 20, 1], &["too many"]),
        ("gpipe", [1 << 13, 1, 1], &["8192 ranks", "at most 4096 stages"]),
    ];
    for (name, [ranks, microbatches, turns], mentions) in cases {
        refused(name.parse::<ScheduleKind>().unwrap().schedule(*ranks, *microbatches, *turns), mentions);
    }
    for (name, near) in [
        ("1f1", "1f1b"),
        ("v-halve", "v-half"),
        ("dualpipe", "dualpipev"),
        ("Interleaved1F1B", "interleaved-1f1b"),
    ] {
        refused(name.parse::<ScheduleKind>(), &[&format!("did you mean {near}?"), "known: gpipe, "]);
    }
    assert!(!"pipedream".parse::<ScheduleKind>().unwrap_err().to_string().contains("did you mean"));
}

#[test]
fn edges_costs_and_groups_that_do_not_fit() {
    refused(Edges::new(2, [(0, 2)]), &["stage 0 to stage 2", "2 stages"]);
    refused(Edges::new(2, [(1, 1)]), &["stage 1 to stage 1"]);
    let schedule = schedule("gpipe", 2, 2, 1);
    refused(schedule.lower(&Lowering::new(Edges::chain(3))), &["edges of 3 stages", "schedule of 2"]);
    let beyond = Lowering::new(Edges::chain(2)).shared([vec![0, 2]]);
    refused(schedule.lower(&beyond), &["a shared group has stage 2"]);
    let costs = Costs::per_rank(&[0, 1], 1.0, 1.0, 1.0);
    let simulate = |costs: Costs| schedule.simulate(&Edges::chain(2), &costs);
    refused(simulate(Costs { input: vec![1.0], ..costs.clone() }), &["1 input costs do not fit 2 stages"]);
    refused(simulate(Costs { weight: vec![1.0, -1.0], ..costs.clone() }), &["weight cost is -1"]);
    refused(simulate(Costs { latency: f64::NAN, ..costs.clone() }), &["latency cost is NaN"]);
    refused(greedy(&[0, 1], 0, &Edges::chain(2), &costs, 1.0), &["2 stages for 0 microbatches"]);
    refused(greedy(&[0, 1], usize::MAX, &Edges::chain(2), &costs, 1.0), &["together at most"]);
    refused(
        greedy(&[0, usize::MAX], 1, &Edges::chain(2), &costs, 1.0),
        &["2 stages suffice for at most 2 ranks"],
    );
    refused(greedy(&[1, 1], 1, &Edges::chain(2), &costs, 1.0), &["rank 0 has no stage"]);
    refused(greedy(&[0, 1], 1, &Edges::chain(2), &costs, 0.5), &["at most 0.5 microbatches"]);
    refused(greedy(&[0, 1], 1, &Edges::chain(2), &costs, f64::NAN), &["at most NaN microbatches"]);
    refused(fastest(3, 4, &Edges::chain(2), &costs, 4.0), &["2 stages", "3 ranks"]);
    assert_eq!(StageOrder::V.stage_ranks(4, 2), [0, 1, 2, 3, 3, 2, 1, 0]);
    assert_eq!(StageOrder::V.stage_ranks(2, 3), [0, 1, 1, 0, 0, 1]);
}
