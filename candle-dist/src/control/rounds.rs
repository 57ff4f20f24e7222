//! The calls of debug mode, compared when all members have made theirs.
use super::signature::Signature;
use crate::Cause;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// The rounds that some members have yet to enter, by group and number.
#[derive(Debug, Default)]
pub(super) struct Rounds(HashMap<(u64, u64), Calls>);

/// What the members call in one round, as they came.
#[derive(Debug, Default)]
pub(super) struct Calls(Vec<(usize, Signature)>);

/// Two calls that should have been alike.
pub(super) struct Mismatch {
    pub(super) cause: Cause,
    /// The two ranks and what they called.
    pub(super) calls: [(usize, String); 2],
}

impl Rounds {
    /// Notes a rank's call; returns all of the round if it is the last.
    pub(super) fn enter(&mut self, rank: usize, signature: Signature) -> Option<Calls> {
        let members = signature.ranks.len();
        let entry = self.0.entry((signature.group, signature.round));
        match entry {
            Entry::Occupied(mut calls) => {
                calls.get_mut().0.push((rank, signature));
                (calls.get().0.len() >= members).then(|| calls.remove())
            }
            Entry::Vacant(_) if members <= 1 => Some(Calls(vec![(rank, signature)])),
            Entry::Vacant(place) => {
                place.insert(Calls(vec![(rank, signature)]));
                None
            }
        }
    }
}

impl Calls {
    /// The members.
    pub(super) fn ranks(&self) -> &[usize] {
        self.0.first().map_or(&[], |(_, signature)| &signature.ranks)
    }

    /// The first member whose call differs from the first one's, in the group's order.
    pub(super) fn mismatch(&self) -> Option<Mismatch> {
        let place = |rank: usize| self.ranks().iter().position(|&member| member == rank);
        let mut calls: Vec<_> = self.0.iter().collect();
        calls.sort_by_key(|(rank, _)| place(*rank));
        let (reference, first) = calls.first()?;
        let (rank, other, what) = calls.iter().find_map(|(rank, call)| Some((*rank, call, first.difference(call)?)))?;
        let calls = [(*reference, first.text.clone()), (rank, other.text.clone())];
        Some(Mismatch { cause: Cause::Mismatch { rank, reference: *reference, what }, calls })
    }
}
