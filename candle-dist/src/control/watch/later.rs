//! The calls of a process that are compared while it goes on. They are sent as digests, many in one message.
use super::super::message::HubRequest;
use super::super::signature::{RoundEntry, digest};
use crate::call::Call;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::sync::Arc;

/// How many calls are sent in one message. Those of the last moments are sent anyway, by `Watch::tell_calls`.
const BATCH: usize = 64;

/// The calls whose comparison this process has not heard of.
#[derive(Debug, Default)]
pub(super) struct LaterCalls {
    groups: FxHashMap<u64, LaterGroup>,
    count: usize,
    unsent: usize,
}

#[derive(Debug)]
struct LaterGroup {
    ranks: SmallVec<[usize; 8]>,
    /// Oldest first. The last `unsent` of them are not sent.
    calls: VecDeque<(u64, Arc<Call>)>,
    unsent: usize,
}

impl LaterCalls {
    /// Returns how many there are.
    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// Adds a call. Returns whether it is time to send.
    pub(super) fn push(&mut self, group: u64, ranks: &[usize], round: u64, call: &Arc<Call>) -> bool {
        let new = || LaterGroup { ranks: ranks.into(), calls: VecDeque::new(), unsent: 0 };
        let found = self.groups.entry(group).or_insert_with(new);
        found.calls.push_back((round, call.clone()));
        found.unsent += 1;
        (self.count, self.unsent) = (self.count + 1, self.unsent + 1);
        self.unsent >= BATCH
    }

    /// Takes the digests that are not sent.
    pub(super) fn take(&mut self) -> Vec<HubRequest> {
        if std::mem::take(&mut self.unsent) == 0 {
            return Vec::new();
        }
        let unsent = self.groups.iter_mut().filter(|(_, found)| found.unsent > 0);
        let request = |(&group, found): (&u64, &mut LaterGroup)| {
            let first = found.calls.len() - std::mem::take(&mut found.unsent);
            let calls = found.calls.range(first..).map(|(round, call)| (*round, digest(call))).collect();
            HubRequest::Calls { group, ranks: found.ranks.to_vec(), calls }
        };
        unsent.map(request).collect()
    }

    /// Returns a call to be shown to rank 0.
    pub(super) fn entry(&self, group: u64, round: u64) -> Option<RoundEntry> {
        let found = self.groups.get(&group)?;
        let (_, call) = found.calls.iter().find(|(other, _)| *other == round)?;
        Some(RoundEntry::new(group, &found.ranks, round, call))
    }

    /// Forgets calls that are equal: that of a round, and those before it if `with_earlier`.
    pub(super) fn settle(&mut self, group: u64, round: u64, with_earlier: bool) {
        let Some(found) = self.groups.get_mut(&group) else { return };
        let before = found.calls.len();
        found.calls.retain(|(other, _)| if with_earlier { *other > round } else { *other != round });
        self.count -= before - found.calls.len();
        if found.calls.is_empty() {
            self.groups.remove(&group);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Collective, ReduceOp};

    #[test]
    fn many_calls_are_one_message_and_each_can_be_shown() {
        let call = |op| Arc::new(Call::new(Collective::AllReduce(op)));
        let mut later = LaterCalls::default();
        for round in 0..BATCH as u64 {
            let is_time = later.push(7, &[3, 4], round, &call(ReduceOp::Sum));
            assert_eq!(is_time, round + 1 == BATCH as u64);
        }
        let [HubRequest::Calls { group: 7, ranks, calls }] = &later.take()[..] else { panic!("one message") };
        assert_eq!((&ranks[..], calls.len(), later.len()), (&[3, 4][..], BATCH, BATCH));
        assert!(calls.iter().all(|(_, it)| *it == calls[0].1), "equal calls have equal digests");
        assert!(later.take().is_empty());
        later.push(7, &[3, 4], 64, &call(ReduceOp::Max));
        let [HubRequest::Calls { calls: others, .. }] = &later.take()[..] else { panic!("one message") };
        assert!(others[0].0 == 64 && others[0].1 != calls[0].1);
        later.settle(7, 62, true);
        assert!(later.entry(7, 62).is_none() && later.entry(7, 63).is_some() && later.len() == 2);
        later.settle(7, 64, false);
        assert!(later.entry(7, 63).is_some() && later.len() == 1);
        later.settle(7, 63, true);
        assert!(later.groups.is_empty() && later.len() == 0);
    }
}
