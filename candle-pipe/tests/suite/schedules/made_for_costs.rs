//! Schedules and cuts that are made for the costs that there are.
use super::simulated;
use candle_pipe::schedule::{Costs, Edges, Schedule, StageOrder, candidates, fastest, greedy};
use proptest::prelude::*;

fn peak(schedule: &Schedule) -> f64 {
    simulated(schedule, [1.0; 3], 0.0).peak_activations().into_iter().fold(0.0, f64::max)
}

#[test]
fn greedy_is_as_fast_as_zb_h1_with_its_memory() {
    for ranks in 2..=8 {
        let (stage_ranks, edges) = (StageOrder::Loop.stage_ranks(ranks, 1), Edges::chain(ranks));
        let costs = Costs::per_rank(&stage_ranks, 1.0, 1.0, 1.0);
        let microbatches = 4 * ranks;
        let time = |cap: f64| {
            let schedule = greedy(&stage_ranks, microbatches, &edges, &costs, cap).unwrap();
            assert!(peak(&schedule) <= cap);
            schedule.simulate(&edges, &costs).unwrap().makespan()
        };
        assert_eq!(time(ranks as f64), (3 * microbatches + ranks - 1) as f64, "{ranks} ranks");
        // One microbatch after the other, but for the `W` of the first rank.
        assert!(time(1.0) > (2 * ranks * microbatches) as f64, "{ranks} ranks");
    }
}

#[test]
fn the_fastest_holds_no_more_than_it_may() {
    let costs = Costs::per_rank(&StageOrder::V.stage_ranks(4, 2), 1.0, 1.0, 1.0);
    let edges = Edges::chain(8);
    assert_eq!(fastest(4, 16, &edges, &costs, f64::INFINITY).unwrap().timeline.makespan(), 49.5);
    let mut before = f64::INFINITY;
    for cap in [1.0, 2.0, 3.0, 4.0, 8.0, 16.0] {
        let best = fastest(4, 16, &edges, &costs, cap).unwrap();
        assert!(best.timeline.peak_activations().iter().all(|&peak| peak <= cap));
        assert!(best.timeline.makespan() <= before, "{}", best.name);
        before = best.timeline.makespan();
    }
    let names: Vec<_> =
        candidates(4, 8, &edges, &costs, 8.0).unwrap().iter().map(|found| found.name).collect();
    let want = ["interleaved-1f1b", "looped-bfs", "interleaved-zb", "zbv", "v-half", "v-min", "dualpipev"];
    assert_eq!(names[..7], want);
    assert_eq!(names[7..], ["greedy", "greedy-v"]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Any stages on any ranks at any costs: whole, within the cap, and it comes to its end.
    #[test]
    fn greedy_always_makes_a_schedule(
        places in proptest::collection::vec(0usize..3, 1..8),
        microbatches in 1usize..7,
        times in proptest::collection::vec(0u8..4, 24),
        latency in 0u8..3,
        cap in 2u8..9,
        skips in proptest::collection::vec((0usize..8, 0usize..8), 0..5),
    ) {
        let mut places = places;
        // No rank without a stage.
        let mut used: Vec<_> = places.clone();
        used.sort_unstable();
        used.dedup();
        places.iter_mut().for_each(|place| *place = used.iter().position(|other| other == place).unwrap());
        let stages = places.len();
        let list = |from: usize| times[from..from + stages].iter().map(|&time| f64::from(time)).collect::<Vec<_>>();
        let costs = Costs {
            forward: list(0), input: list(8), weight: list(16),
            latency: f64::from(latency), per_byte: 0.5, bytes: vec![1.0; stages], edge_bytes: [((0, stages - 1), 2.0)].into_iter().filter(|((from, to), _)| from < to).collect(),
        };
        let chain = (1..stages).map(|to| (to - 1, to));
        let skips = skips.into_iter().filter(|&(from, to)| from < to && to < stages);
        let edges = Edges::new(stages, chain.chain(skips)).unwrap();
        let cap = f64::from(cap) / 2.0;
        let schedule = greedy(&places, microbatches, &edges, &costs, cap).unwrap();
        prop_assert_eq!(schedule.stage_ranks(), &places);
        prop_assert_eq!(schedule.microbatches(), microbatches);
        prop_assert!(peak(&schedule) <= cap);
    }
}
