//! Compares the calls that ranks go on after, by digests: rank 0 gets a number for each call, many in one message. It asks for the
//! calls themselves only where numbers differ, or where a member waits for its own call to be compared.
use std::collections::{HashMap, VecDeque};

/// The calls of groups that not all members have reported.
#[derive(Debug, Default)]
pub(super) struct CallDigests(HashMap<u64, GroupDigests>);

#[derive(Debug, Default)]
struct GroupDigests {
    members: Vec<usize>,
    /// The rounds and digests of each member, oldest first.
    calls: HashMap<usize, VecDeque<(u64, u64)>>,
    /// The round whose calls the members are asked for. Those after it wait.
    asked: Option<u64>,
}

/// What rank 0 does next for a group.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum DigestOutcome {
    /// All of these members have made equal calls up to this round.
    Equal(Vec<usize>, u64),
    /// These members shall show their calls of this round.
    Show(Vec<usize>, u64),
}

impl CallDigests {
    /// Adds the calls of a member. `is_shown` says whether another member has shown its call of a round; then this one shall too.
    pub(super) fn add(
        &mut self,
        rank: usize,
        group: u64,
        members: &[usize],
        calls: Vec<(u64, u64)>,
        is_shown: impl Fn(u64) -> bool,
    ) -> Vec<DigestOutcome> {
        let found = self.0.entry(group).or_default();
        if found.members.is_empty() {
            found.members = members.to_vec();
        }
        let (shown, others): (Vec<_>, Vec<_>) = calls.into_iter().partition(|(round, _)| is_shown(*round));
        found.calls.entry(rank).or_default().extend(others);
        let show = shown.into_iter().map(|(round, _)| DigestOutcome::Show(vec![rank], round));
        show.chain(self.compare(group)).collect()
    }

    /// A member shows its call of a round. The others that have made it shall show theirs.
    pub(super) fn show(&mut self, group: u64, round: u64) -> Option<DigestOutcome> {
        let found = self.0.get_mut(&group)?;
        let mut ranks = Vec::new();
        for (&rank, calls) in &mut found.calls {
            if let Some(at) = calls.iter().position(|(other, _)| *other == round) {
                calls.remove(at);
                ranks.push(rank);
            }
        }
        (!ranks.is_empty()).then_some(DigestOutcome::Show(ranks, round))
    }

    /// All members have shown their calls of a round, which are equal.
    pub(super) fn settle(&mut self, group: u64, round: u64) -> Vec<DigestOutcome> {
        if let Some(found) = self.0.get_mut(&group)
            && found.asked == Some(round)
        {
            found.asked = None;
        }
        self.compare(group)
    }

    /// Compares the calls that all members have reported.
    fn compare(&mut self, group: u64) -> Vec<DigestOutcome> {
        let Some(GroupDigests { members, calls, asked }) = self.0.get_mut(&group) else { return Vec::new() };
        let mut outcomes = Vec::new();
        let mut equal = None;
        while asked.is_none() {
            let firsts = members.iter().map(|member| calls.get(member)?.front().copied());
            let Some(firsts) = firsts.collect::<Option<Vec<_>>>() else { break };
            let Some(&first) = firsts.first() else { break };
            if firsts.iter().all(|other| *other == first) {
                equal = Some(first.0);
            } else {
                // The calls of the earliest round among them, which some may not have made.
                let round = firsts.iter().map(|(round, _)| *round).fold(first.0, u64::min);
                let of = |(member, (at, _)): (&usize, &(u64, u64))| (*at == round).then_some(*member);
                outcomes
                    .push(DigestOutcome::Show(members.iter().zip(&firsts).filter_map(of).collect(), round));
                *asked = Some(round);
            }
            let done = asked.or(equal);
            for calls in calls.values_mut() {
                if calls.front().is_some_and(|(round, _)| Some(*round) == done) {
                    calls.pop_front();
                }
            }
        }
        outcomes.splice(0..0, equal.map(|round| DigestOutcome::Equal(members.clone(), round)));
        if asked.is_none() && calls.values().all(VecDeque::is_empty) {
            self.0.remove(&group);
        }
        outcomes
    }
}

#[cfg(test)]
mod tests {
    use super::DigestOutcome::{Equal, Show};
    use super::*;

    const NOBODY: fn(u64) -> bool = |_| false;

    #[test]
    fn equal_calls_are_settled_by_their_numbers_and_leave_nothing() {
        let mut all = CallDigests::default();
        assert_eq!(all.add(2, 7, &[2, 5], vec![(0, 10), (1, 11), (3, 13)], NOBODY), []);
        assert_eq!(all.add(5, 7, &[2, 5], vec![(0, 10), (1, 11)], NOBODY), [Equal(vec![2, 5], 1)]);
        assert_eq!(all.add(5, 7, &[2, 5], vec![(3, 13), (4, 14)], NOBODY), [Equal(vec![2, 5], 3)]);
        assert_eq!(all.add(2, 7, &[2, 5], vec![(4, 14)], NOBODY), [Equal(vec![2, 5], 4)]);
        assert!(all.0.is_empty());
    }

    #[test]
    fn calls_whose_numbers_differ_are_asked_for_and_hold_up_later_ones() {
        let mut all = CallDigests::default();
        assert_eq!(all.add(0, 7, &[0, 1], vec![(0, 1), (1, 2), (2, 3)], NOBODY), []);
        let outcome = all.add(1, 7, &[0, 1], vec![(0, 1), (1, 9), (2, 3)], NOBODY);
        assert_eq!(outcome, [Equal(vec![0, 1], 0), Show(vec![0, 1], 1)]);
        assert_eq!(all.show(7, 1), None, "both show what they were asked for");
        assert_eq!(all.settle(7, 1), [Equal(vec![0, 1], 2)], "their numbers differed, and they did not");
        assert!(all.0.is_empty());
    }

    #[test]
    fn who_waits_for_its_call_gets_those_of_the_others() {
        let mut all = CallDigests::default();
        assert_eq!(all.add(0, 7, &[0, 1, 2], vec![(0, 1), (1, 2)], NOBODY), []);
        assert_eq!(all.show(7, 1), Some(Show(vec![0], 1)), "rank 1 has shown its call");
        assert_eq!(all.add(2, 7, &[0, 1, 2], vec![(0, 1), (1, 2)], |round| round == 1), [Show(vec![2], 1)]);
        assert_eq!(all.add(1, 7, &[0, 1, 2], vec![(0, 1)], NOBODY), [Equal(vec![0, 1, 2], 0)]);
        assert!(all.0.is_empty());
    }
}
