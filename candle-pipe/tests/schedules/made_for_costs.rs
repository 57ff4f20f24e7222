//! Schedules and cuts that are made for the costs that there are.
use super::simulated;
use candle_pipe::schedule::{Costs, Edges, Placement, Schedule, balance, candidates, fastest, greedy};
use proptest::prelude::*;

fn peak(schedule: &Schedule) -> f64 {
    simulated(schedule, [1.0; 3], 0.0).peak_activations().into_iter().fold(0.0, f64::max)
}

#[test]
fn greedy_is_as_fast_as_zb_h1_with_its_memory() {
    for ranks in 2..=8 {
        let (stage_ranks, edges) = (Placement::Loop.stage_ranks(ranks, 1), Edges::chain(ranks));
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
    let costs = Costs::per_rank(&Placement::V.stage_ranks(4, 2), 1.0, 1.0, 1.0);
    let edges = Edges::chain(8);
    assert_eq!(fastest(4, 16, &edges, &costs, f64::INFINITY).unwrap().timeline.makespan(), 49.5);
    let mut before = f64::INFINITY;
    for cap in [1.0, 2.0, 3.0, 4.0, 8.0, 16.0] {
        let best = fastest(4, 16, &edges, &costs, cap).unwrap();
        assert!(best.timeline.peak_activations().iter().all(|&peak| peak <= cap));
        assert!(best.timeline.makespan() <= before, "{}", best.name);
        before = best.timeline.makespan();
    }
    let names: Vec<_> = candidates(4, 8, &edges, &costs, 8.0).unwrap().iter().map(|found| found.name).collect();
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
            latency: f64::from(latency), per_byte: 0.5, bytes: vec![1.0; stages],
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

    /// No cut into ranges has a most costly stage that costs less.
    #[test]
    fn balance_is_the_best_of_all_cuts(costs in proptest::collection::vec(0u8..9, 1..9), extra in proptest::collection::vec(0u8..9, 1..5)) {
        prop_assume!(extra.len() <= costs.len());
        let costs: Vec<_> = costs.into_iter().map(f64::from).collect();
        let extra: Vec<_> = extra.into_iter().map(f64::from).collect();
        let ranges = balance(&costs, &extra).unwrap();
        prop_assert_eq!(ranges.len(), extra.len());
        prop_assert!(ranges.iter().all(|range| !range.is_empty()));
        prop_assert!(ranges.iter().cloned().flatten().eq(0..costs.len()));
        let worst = ranges.iter().zip(&extra).map(|(range, extra)| costs[range.clone()].iter().sum::<f64>() + extra);
        prop_assert_eq!(worst.fold(0.0, f64::max), least(&costs, &extra));
    }
}

/// The least that the most costly stage of any cut costs.
fn least(costs: &[f64], extra: &[f64]) -> f64 {
    let Some((first, rest)) = extra.split_first() else {
        return if costs.is_empty() { 0.0 } else { f64::INFINITY };
    };
    let cuts = 1..=costs.len();
    let worst = cuts.map(|cut| (costs[..cut].iter().sum::<f64>() + first).max(least(&costs[cut..], rest)));
    worst.fold(f64::INFINITY, f64::min)
}

#[test]
fn a_cut_that_counts_the_head_is_faster() {
    // Eight layers alike and a head that costs as much as two of them.
    let layers = [1.0; 8];
    let time = |cuts: Vec<std::ops::Range<usize>>| {
        let mut times: Vec<_> = cuts.iter().map(|range| layers[range.clone()].iter().sum::<f64>()).collect();
        times[3] += 2.0;
        let costs = Costs {
            forward: times.clone(),
            input: times.clone(),
            weight: times,
            ..Costs::per_rank(&[0, 1, 2, 3], 1.0, 1.0, 1.0)
        };
        super::schedule("1f1b", 4, 16, 1).simulate(&Edges::chain(4), &costs).unwrap().makespan()
    };
    let even = time(balance(&layers, &[0.0; 4]).unwrap());
    let aware = time(balance(&layers, &[0.0, 0.0, 0.0, 2.0]).unwrap());
    assert!(aware < 0.85 * even, "{aware} against {even}");
}
