//! Random schedules: any order that respects what needs what is one, and any that is changed is none.
use super::lowering::check;
use candle_pipe::schedule::{Action, Compute, Edges, Lowering, Pass, Schedule};
use proptest::prelude::*;

/// The passes over a microbatch on a stage, all of a step in an order in which everything comes after what it needs.
fn order(stages: usize, microbatches: usize, split: &[bool], choices: &[u16]) -> Vec<Compute> {
    // What is left of each microbatch: forwards up the stages, backwards down, and a `W` any time after its `I`.
    let mut chains: Vec<Vec<Compute>> = vec![];
    for microbatch in 0..microbatches {
        let compute = |stage, pass| Compute { stage, pass, microbatch };
        let split = |stage: usize| split[(stage + microbatch) % split.len()];
        let forwards = (0..stages).map(|stage| compute(stage, Pass::Forward));
        let backward = |stage| if split(stage) { Pass::Input } else { Pass::Backward };
        let backwards = (0..stages).rev().map(|stage| compute(stage, backward(stage)));
        chains.push(forwards.chain(backwards).rev().collect());
    }
    let (mut order, mut choices) = (vec![], choices.iter().cycle());
    while !chains.is_empty() {
        let at = usize::from(*choices.next().unwrap()) % chains.len();
        let compute = chains[at].pop().unwrap();
        if compute.pass == Pass::Input {
            chains.push(vec![Compute { pass: Pass::Weight, ..compute }]);
        }
        order.push(compute);
        chains.retain(|chain| !chain.is_empty());
    }
    order
}

/// The ranks of the stages, without gaps.
fn ranks(places: Vec<usize>) -> Vec<usize> {
    let mut used = places.clone();
    used.sort_unstable();
    used.dedup();
    places.iter().map(|place| used.binary_search(place).unwrap()).collect()
}

prop_compose! {
    fn lists()(
        places in proptest::collection::vec(0usize..4, 1..7),
        microbatches in 1usize..6,
        split in proptest::collection::vec(any::<bool>(), 1..4),
        choices in proptest::collection::vec(any::<u16>(), 1..200),
    ) -> Vec<Vec<Option<Action>>> {
        let ranks = ranks(places);
        let mut lists = vec![vec![]; ranks.iter().max().unwrap() + 1];
        for compute in order(ranks.len(), microbatches, &split, &choices) {
            lists[ranks[compute.stage]].push(Some(Action::Compute(compute)));
        }
        lists
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_order_is_a_schedule_and_lowers(
        lists in lists(),
        skips in proptest::collection::vec((0usize..7, 0usize..7), 0..6),
        groups in proptest::collection::vec(proptest::collection::vec(0usize..7, 1..4), 0..3),
        without_chain in any::<bool>(),
    ) {
        let schedule = Schedule::new(lists).unwrap();
        let stages = schedule.stages();
        prop_assert_eq!(&Schedule::from_csv(&schedule.to_csv()).unwrap(), &schedule);
        let chain = (1..stages).map(|to| (to - 1, to)).filter(|_| !without_chain);
        let skips = skips.into_iter().filter(|&(from, to)| from < to && to < stages);
        let edges = Edges::new(stages, chain.chain(skips)).unwrap();
        let groups = groups.into_iter().map(|group| group.into_iter().map(|stage| stage % stages).collect::<Vec<_>>());
        let program = schedule.lower(&Lowering::new(edges).shared(groups).reduced()).unwrap();
        check(&program);
        prop_assert_eq!(program.schedule(), &schedule);
    }

    #[test]
    fn a_schedule_that_lacks_or_repeats_an_action_is_none(lists in lists(), at in any::<prop::sample::Index>(), idle in any::<bool>()) {
        let all: Vec<_> = (0..lists.len()).flat_map(|rank| (0..lists[rank].len()).map(move |i| (rank, i))).collect();
        // A forward alone is an evaluation.
        prop_assume!(all.len() > 2);
        let (rank, position) = *at.get(&all);
        let action = lists[rank][position].unwrap();

        let mut lacking = lists.clone();
        if idle { lacking[rank][position] = None } else { _ = lacking[rank].remove(position) }
        prop_assert!(Schedule::new(lacking).is_err());

        for target in 0..lists.len() {
            let mut doubled = lists.clone();
            doubled[target].push(Some(action));
            let said = Schedule::new(doubled).unwrap_err().to_string();
            prop_assert!(said.contains("duplicate"), "{}", said);
        }

        // Another rank has none of this stage.
        let mut moved = lists.clone();
        moved[rank].remove(position);
        moved.push(vec![Some(action)]);
        prop_assert!(Schedule::new(moved).is_err());
    }

    #[test]
    fn messages_that_change_places_are_noticed(lists in lists(), at in any::<prop::sample::Index>()) {
        let schedule = Schedule::new(lists).unwrap();
        let edges = Edges::chain(schedule.stages());
        let program = schedule.lower(&Lowering::new(edges.clone())).unwrap();
        let sends: Vec<_> = program.ranks().iter().enumerate().flat_map(|(rank, actions)| {
            let sends = actions.iter().enumerate().filter(|(_, action)| matches!(action, Action::Send(_) | Action::Recv(_)));
            sends.map(move |(i, _)| (rank, i))
        }).collect();
        prop_assume!(!sends.is_empty());
        let (rank, position) = *at.get(&sends);
        let mut ranks = program.ranks().to_vec();
        let action = ranks[rank].remove(position);
        prop_assert!(candle_pipe::schedule::Program::new(ranks.clone(), edges.clone()).is_err(), "without {}", action);
        // A send before anything is computed, a receive after all that needs it.
        if matches!(action, Action::Send(_)) { ranks[rank].insert(0, action) } else { ranks[rank].push(action) }
        prop_assert!(candle_pipe::schedule::Program::new(ranks, edges).is_err(), "misplaced {}", action);
    }
}
