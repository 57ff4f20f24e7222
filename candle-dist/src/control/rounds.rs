//! Compares the calls of a round once all members have entered: in debug mode, and always for NCCL.
use super::signature::RoundEntry;
use crate::Cause;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};

/// The rounds that some members have not entered, by group and number, and messages that only one side has entered.
#[derive(Debug, Default)]
pub(super) struct Rounds {
    collective: HashMap<(u64, u64), RoundCalls>,
    /// By channel and tag, oldest first. All entries of a queue are of the same side.
    messages: HashMap<(u64, u32), VecDeque<(usize, RoundEntry)>>,
}

/// The calls of the members in one round, in order of arrival.
#[derive(Debug, Default)]
pub(super) struct RoundCalls(Vec<(usize, RoundEntry)>);

/// Two calls that should be equal.
pub(super) struct Mismatch {
    pub(super) cause: Cause,
    /// The two ranks and their calls.
    pub(super) calls: [(usize, String); 2],
}

impl Rounds {
    /// Adds a rank's call. Returns all calls of the round if it is the last one.
    pub(super) fn enter(&mut self, rank: usize, signature: RoundEntry) -> Option<RoundCalls> {
        if let Some(tag) = signature.tag() {
            return self.enter_message(rank, tag, signature);
        }
        let members = signature.ranks.len();
        match self.collective.entry((signature.group, signature.round)) {
            Entry::Occupied(mut calls) => {
                calls.get_mut().0.push((rank, signature));
                (calls.get().0.len() >= members).then(|| calls.remove())
            }
            Entry::Vacant(_) if members <= 1 => Some(RoundCalls(vec![(rank, signature)])),
            Entry::Vacant(place) => {
                place.insert(RoundCalls(vec![(rank, signature)]));
                None
            }
        }
    }

    /// Matches the nth send with a tag to the nth receive with that tag, independently of other tags.
    fn enter_message(&mut self, rank: usize, tag: u32, signature: RoundEntry) -> Option<RoundCalls> {
        let key = (signature.group, tag);
        let queue = self.messages.entry(key).or_default();
        if queue.front().is_none_or(|(_, first)| first.is_send() == signature.is_send()) {
            queue.push_back((rank, signature));
            return None;
        }
        let first = queue.pop_front();
        if queue.is_empty() {
            self.messages.remove(&key);
        }
        Some(RoundCalls(first.into_iter().chain([(rank, signature)]).collect()))
    }

    /// Returns whether a member has entered a round that others have not.
    pub(super) fn has(&self, group: u64, round: u64) -> bool {
        self.collective.contains_key(&(group, round))
    }

    /// Returns the members that have not entered a round that others have entered.
    pub(super) fn missing(&self, group: u64, round: u64) -> Option<Vec<usize>> {
        let RoundCalls(calls) = self.collective.get(&(group, round))?;
        let has_come = |rank: &usize| calls.iter().any(|(other, _)| other == rank);
        Some(calls.first()?.1.ranks.iter().copied().filter(|rank| !has_come(rank)).collect())
    }
}

impl RoundCalls {
    /// Returns the ranks, each with the group or channel and the number under which it has entered.
    pub(super) fn members(&self) -> impl Iterator<Item = (usize, u64, u64)> {
        self.0.iter().map(|(rank, signature)| (*rank, signature.group, signature.round))
    }

    /// Returns the members.
    fn ranks(&self) -> &[usize] {
        self.0.first().map_or(&[], |(_, signature)| &signature.ranks)
    }

    /// Returns the first member, in group order, whose call differs from the first member's.
    pub(super) fn mismatch(&self) -> Option<Mismatch> {
        let place = |rank: usize| self.ranks().iter().position(|&member| member == rank);
        let mut calls: Vec<_> = self.0.iter().collect();
        calls.sort_by_key(|(rank, _)| place(*rank));
        let (reference, first) = calls.first()?;
        let (rank, other, what) =
            calls.iter().find_map(|(rank, call)| Some((*rank, call, first.difference(call)?)))?;
        let calls = [(*reference, first.text.clone()), (rank, other.text.clone())];
        Some(Mismatch { cause: Cause::Mismatch { rank, reference: *reference, what }, calls })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Collective;
    use crate::call::{Call, Op};

    fn message(op: Op, round: u64, tag: u32) -> RoundEntry {
        let side = match op {
            Op::Send => Collective::Send { to: 1, tag },
            _ => Collective::Recv { from: Some(0), tag },
        };
        RoundEntry::new(5, &[0, 1], round, &Call::new(side))
    }

    #[test]
    fn messages_are_matched_by_tag_in_any_order_and_leave_nothing() {
        let mut rounds = Rounds::default();
        // Two tags that share a count, received in the opposite order.
        assert!(rounds.enter(0, message(Op::Send, 0, 1)).is_none());
        assert!(rounds.enter(0, message(Op::Send, 1, 257)).is_none());
        for (received, tag, sent) in [(0, 257, 1), (1, 1, 0)] {
            let calls = rounds.enter(1, message(Op::Recv, received, tag)).unwrap();
            assert_eq!(calls.members().collect::<Vec<_>>(), [(0, 5, sent), (1, 5, received)]);
        }
        assert!(rounds.messages.is_empty() && rounds.collective.is_empty());
    }

    #[test]
    fn those_who_have_not_come_are_missing() {
        let mut rounds = Rounds::default();
        let barrier = || RoundEntry::new(7, &[4, 2, 9, 3], 6, &Call::new(Collective::Barrier));
        assert_eq!(rounds.missing(7, 6), None);
        assert!(rounds.enter(2, barrier()).is_none());
        assert!(rounds.enter(3, barrier()).is_none());
        assert_eq!(rounds.missing(7, 6), Some(vec![4, 9]));
    }
}
