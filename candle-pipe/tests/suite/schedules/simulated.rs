//! The times and the memory of the known schedules.
use super::{close, schedule, simulated};
use candle_pipe::schedule::{Costs, Edges};

const EVEN: [f64; 3] = [1.0; 3];

/// The columns of the tables: a schedule and its stages a rank.
const COLUMNS: [(&str, usize); 10] = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("looped-bfs", 2),
    ("interleaved-1f1b", 2),
    ("interleaved-1f1b", 4),
    ("zb-h1", 1),
    ("interleaved-zb", 2),
    ("interleaved-zb", 4),
    ("zbv", 2),
    ("dualpipev", 2),
];

/// Ranks, microbatches, and the bubble of a step in percent; DualPipeV takes no fewer microbatches than stages.
#[rustfmt::skip]
const BUBBLES: [(usize, usize, &[f64]); 6] = [
    (4, 8, &[27.27, 27.27, 15.79, 15.79, 8.57, 11.11, 5.88, 3.03, 5.88, 5.88]),
    (4, 16, &[15.79, 15.79, 8.57, 8.57, 4.48, 5.88, 3.03, 1.54, 3.03, 3.03]),
    (4, 32, &[8.57, 8.57, 4.48, 4.48, 2.29, 3.03, 1.54, 0.78, 1.54, 1.54]),
    (8, 8, &[46.67, 46.67, 30.43, 30.43, 17.95, 22.58, 12.73, 6.80, 22.58]),
    (8, 16, &[30.43, 30.43, 17.95, 17.95, 9.86, 12.73, 6.80, 3.52, 6.80, 6.80]),
    (8, 32, &[17.95, 17.95, 9.86, 9.86, 5.19, 6.80, 3.52, 1.79, 3.52, 3.52]),
];

#[test]
fn bubbles_of_a_step() {
    for (ranks, microbatches, percents) in BUBBLES {
        for (&(name, stages), &percent) in COLUMNS.iter().zip(percents) {
            let got =
                100.0 * simulated(&schedule(name, ranks, microbatches, stages), EVEN, 0.0).bubble_step();
            close(
                got,
                percent,
                0.005,
                &format!("{name}, {stages} stages, {ranks} ranks, {microbatches} microbatches"),
            );
        }
    }
}

/// The idle time of the worst rank between its first and its last computation.
#[test]
fn bubbles_of_a_span() {
    let cases: &[(&str, usize, [f64; 2])] = &[
        ("zb-h2", 1, [0.0, 0.0]),
        ("zbv", 2, [0.0, 0.0]),
        ("gpipe", 1, [9.0, 21.0]),
        ("1f1b", 1, [9.0, 21.0]),
        ("looped-bfs", 2, [4.5, 10.5]),
        ("interleaved-1f1b", 2, [4.5, 10.5]),
        ("interleaved-1f1b", 4, [2.25, 5.25]),
        ("zb-h1", 1, [3.0, 7.0]),
        ("interleaved-zb", 2, [1.5, 3.5]),
        ("dualpipev", 2, [1.5, 3.5]),
    ];
    for &(name, stages, want) in cases {
        for (ranks, want) in [4, 8].into_iter().zip(want) {
            for microbatches in [16, 32] {
                let bubble = simulated(&schedule(name, ranks, microbatches, stages), EVEN, 0.0).bubble_span();
                let work = 3.0 * microbatches as f64;
                // A share of a span that is work and idle time together.
                let idle = work * bubble / (1.0 - bubble);
                close(idle, want, 1e-9, &format!("{name}, {ranks} ranks, {microbatches} microbatches"));
            }
        }
    }
}

#[test]
fn peaks_of_four_ranks() {
    let cases: &[(&str, usize, [f64; 4])] = &[
        ("gpipe", 1, [8.0; 4]),
        ("1f1b", 1, [4.0, 3.0, 2.0, 1.0]),
        ("looped-bfs", 2, [8.0; 4]),
        ("interleaved-1f1b", 2, [5.5, 4.5, 3.5, 2.5]),
        ("interleaved-1f1b", 4, [4.75, 4.25, 3.75, 3.25]),
        ("zb-h1", 1, [4.0; 4]),
        ("zb-h2", 1, [7.0; 4]),
        ("interleaved-zb", 2, [4.0; 4]),
        ("interleaved-zb", 4, [4.0; 4]),
        ("zbv", 2, [4.0; 4]),
    ];
    for &(name, stages, want) in cases {
        assert_eq!(simulated(&schedule(name, 4, 8, stages), EVEN, 0.0).peak_activations(), want, "{name}");
    }
    let peaks = simulated(&schedule("dualpipev", 4, 8, 2), EVEN, 0.0).peak_activations();
    assert_eq!(peaks.into_iter().fold(0.0, f64::max), 4.5);
}

/// Bubbles of a step in percent for 8 ranks and 32 microbatches.
#[test]
fn costs_that_differ() {
    let columns = [0, 1, 5, 3, 4, 6, 8, 9];
    #[rustfmt::skip]
    let cases = [
        (EVEN, 0.05, [18.44, 20.27, 8.05, 11.11, 8.00, 5.23, 5.09, 5.04]),
        (EVEN, 0.2, [19.87, 26.49, 11.60, 14.67, 15.53, 10.03, 9.52, 10.61]),
        ([1.0, 1.2, 0.8], 0.0, [17.95, 17.95, 9.26, 9.86, 5.19, 4.86, 4.19, 5.04]),
        ([1.0, 1.5, 0.5], 0.0, [17.95, 17.95, 12.73, 9.86, 5.19, 6.80, 6.80, 7.91]),
        ([1.0, 2.0, 1.0], 0.0, [17.95, 17.95, 9.86, 9.86, 5.19, 5.19, 5.19, 7.25]),
    ];
    let mut wrong = vec![];
    for (times, latency, percents) in cases {
        for (column, percent) in columns.into_iter().zip(percents) {
            let (name, stages) = COLUMNS[column];
            let got = 100.0 * simulated(&schedule(name, 8, 32, stages), times, latency).bubble_step();
            if (got - percent).abs() > 0.005 {
                wrong.push(format!(
                    "{name}, {stages} stages, {times:?} and {latency}: {got:.2} instead of {percent}"
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_last_stage_that_costs_more() {
    for (name, want) in [("1f1b", [69.0, 81.0, 105.0]), ("zb-h1", [63.0, 75.0, 99.0])] {
        let schedule = schedule(name, 4, 16, 1);
        for (factor, want) in [1.25, 1.5, 2.0].into_iter().zip(want) {
            let mut costs = Costs::per_rank(schedule.stage_ranks(), 1.0, 1.0, 1.0);
            for list in [&mut costs.forward, &mut costs.input, &mut costs.weight] {
                list[3] *= factor;
            }
            let timeline = schedule.simulate(&Edges::chain(4), &costs).unwrap();
            close(timeline.makespan(), want, 1e-9, &format!("{name}, last stage times {factor}"));
        }
    }
}

#[test]
fn a_value_that_skips_stages_has_bytes_of_its_own() {
    let schedule = schedule("gpipe", 3, 1, 1);
    let edges = candle_pipe::schedule::Edges::new(3, [(0, 1), (1, 2), (0, 2)]).unwrap();
    let costs =
        Costs { per_byte: 1.0, bytes: vec![6.0, 4.0, 0.0], ..Costs::per_rank(&[0, 1, 2], 1.0, 1.0, 0.0) };
    let costs = Costs { edge_bytes: [((0, 2), 1.0)].into(), ..costs };
    let timeline = schedule.simulate(&edges, &costs).unwrap();
    let took =
        |rank: usize| timeline.transfers[rank].iter().map(|span| span.end - span.start).collect::<Vec<_>>();
    assert_eq!((took(0), took(1)), (vec![6.0, 1.0], vec![4.0, 6.0]));
    // Both gradients of the last stage: of what it took from stage 0, and from stage 1.
    let mut last = took(2);
    last.sort_by(f64::total_cmp);
    assert_eq!(last, [1.0, 4.0]);
    for (edge, want) in
        [((1, 0), "bytes of stage 1 for stage 0"), ((0, 3), "bytes of stage 0 for stage 3 of 3")]
    {
        let wrong = Costs { edge_bytes: [(edge, 1.0)].into(), ..costs.clone() };
        let said = schedule.simulate(&edges, &wrong).unwrap_err().to_string();
        assert!(said.contains(want), "{said}");
    }
    let wrong = Costs { edge_bytes: [((0, 2), f64::NAN)].into(), ..costs };
    assert!(schedule.simulate(&edges, &wrong).unwrap_err().to_string().contains("edge_bytes cost is NaN"));
}

#[test]
fn messages_wait_for_their_way_and_take_latency_and_bytes() {
    let schedule = schedule("gpipe", 2, 2, 1);
    let costs = Costs {
        latency: 0.25,
        per_byte: 0.5,
        bytes: vec![6.0, 0.0],
        ..Costs::per_rank(&[0, 1], 1.0, 1.0, 1.0)
    };
    let timeline = schedule.simulate(&Edges::chain(2), &costs).unwrap();
    let shown = |spans: &[candle_pipe::schedule::Span]| {
        spans.iter().map(|span| format!("{} {}-{}", span.action, span.start, span.end)).collect::<Vec<_>>()
    };
    // Three units for six bytes: the second value is computed at 2 and has its way at 4.
    assert_eq!(shown(&timeline.transfers[0]), ["0SEND_F0 1-4.25", "0SEND_F1 4-7.25"]);
    assert_eq!(shown(&timeline.ranks[1])[..2], ["1F0 4.25-5.25", "1F1 7.25-8.25"]);
    // The gradient is as large as the value: that of stage 0, and its way is that of the other direction.
    assert_eq!(shown(&timeline.transfers[1]), ["1SEND_B0 10.25-13.5", "1SEND_B1 13.25-16.5"]);
    assert_eq!(shown(&timeline.ranks[0])[2..], ["0B0 13.5-15.5", "0B1 16.5-18.5"]);
    assert_eq!(timeline.idle(), [12.5, 12.5]);
}
