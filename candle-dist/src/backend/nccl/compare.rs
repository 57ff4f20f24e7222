//! Compares the calls of ranks that are threads, and knows which calls of a process wait for others. NCCL compares nothing:
//! calls that differ end with wrong numbers, or never.
use crate::Cause;
use crate::backend::{Call, Op};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::sync::Arc;

/// The calls that some members of their group have made, by group and round.
#[derive(Debug, Default)]
pub(crate) struct CallTable(Mutex<FxHashMap<(u64, u64), CallRound>>);

#[derive(Debug)]
struct CallRound {
    /// The member that came first, with its call.
    reference: usize,
    call: Arc<Call>,
    /// The members that have not come.
    missing: SmallVec<[usize; 8]>,
}

impl CallTable {
    /// Returns how the call of `rank` differs from that of the first of `members` in this round.
    pub(super) fn compare(
        &self,
        at: (u64, u64),
        members: &[usize],
        rank: usize,
        call: &Arc<Call>,
    ) -> Result<(), Cause> {
        let mut rounds = self.0.lock();
        let new = || CallRound { reference: rank, call: call.clone(), missing: members.into() };
        let round = rounds.entry(at).or_insert_with(new);
        round.missing.retain(|member| *member != rank);
        let (reference, what) = (round.reference, call.difference(&round.call));
        if round.missing.is_empty() {
            rounds.remove(&at);
        }
        what.map_or(Ok(()), |what| Err(Cause::Mismatch { rank, reference, what }))
    }

    /// Returns whether some members have made the call of a group and a round, and others have not.
    pub(super) fn is_open(&self, at: (u64, u64)) -> bool {
        self.0.lock().contains_key(&at)
    }

    /// Returns whether others have made the call of a group or channel and a round that `rank` has not made.
    pub(super) fn lacks(&self, rank: usize, at: (u64, u64)) -> bool {
        self.0.lock().get(&at).is_some_and(|round| round.missing.contains(&rank))
    }

    /// Returns a member that has returned without a call that others have made and wait in. A send waits for nobody.
    pub(super) fn deserter(&self, has_returned: impl Fn(usize) -> bool) -> Option<usize> {
        let rounds = self.0.lock();
        let awaited = rounds.values().filter(|round| round.call.op() != Op::Send);
        awaited.flat_map(|round| round.missing.iter().copied()).find(|&member| has_returned(member))
    }
}

/// The members of a group, and the number of its rounds.
type RoundKey = (SmallVec<[usize; 8]>, u64);

/// The last call of a process on each group and channel, unless it is a send, which waits for nobody.
#[derive(Debug, Default)]
pub(crate) struct LastCalls(Mutex<FxHashMap<u64, RoundKey>>);

impl LastCalls {
    /// Notes the call `round` of this process on a group or channel of `ranks`.
    pub(super) fn note(&self, group: u64, ranks: &[usize], round: u64) {
        self.0.lock().entry(group).or_insert_with(|| (ranks.into(), round)).1 = round;
    }

    /// Forgets a group or channel.
    pub(super) fn forget(&self, group: u64) {
        self.0.lock().remove(&group);
    }

    /// Returns a member that has ended without a call that this process has made.
    pub(super) fn deserter(&self, has_left: impl Fn(usize, u64, u64) -> bool) -> Option<usize> {
        let awaited = self.0.lock();
        let missing = |(&group, (ranks, round)): (&u64, &(SmallVec<[usize; 8]>, u64))| {
            ranks.iter().copied().find(|&rank| has_left(rank, group, *round))
        };
        awaited.iter().find_map(missing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{Collective, ReduceOp};

    fn all_reduce(op: ReduceOp) -> Arc<Call> {
        Arc::new(Call::new(Collective::AllReduce(op)))
    }

    #[test]
    fn calls_that_differ_are_found_and_rounds_are_forgotten() {
        let (calls, sum, max) = (CallTable::default(), all_reduce(ReduceOp::Sum), all_reduce(ReduceOp::Max));
        assert_eq!(calls.compare((7, 0), &[0, 1], 0, &sum), Ok(()));
        assert_eq!(calls.compare((7, 1), &[0, 1], 0, &sum), Ok(()), "one rank may be ahead");
        assert!(calls.is_open((7, 0)) && calls.is_open((7, 1)) && !calls.is_open((7, 2)));
        let what = "reduction";
        assert_eq!(
            calls.compare((7, 0), &[0, 1], 1, &max),
            Err(Cause::Mismatch { rank: 1, reference: 0, what })
        );
        assert_eq!(calls.compare((7, 1), &[0, 1], 1, &sum), Ok(()));
        assert!(calls.0.lock().is_empty() && !calls.is_open((7, 0)));
    }

    #[test]
    fn who_returns_is_missed_in_rounds_that_others_wait_in() {
        let (calls, sum) = (CallTable::default(), all_reduce(ReduceOp::Sum));
        assert_eq!(calls.compare((7, 0), &[4, 2], 2, &sum), Ok(()));
        assert_eq!(
            calls.compare((8, 0), &[2, 3], 2, &Arc::new(Call::new(Collective::Send { to: 0, tag: 0 }))),
            Ok(())
        );
        assert_eq!(calls.deserter(|rank| rank == 2 || rank == 3), None, "2 has come, and nobody waits for 3");
        assert_eq!(calls.deserter(|rank| rank == 4), Some(4));
        assert!(
            calls.lacks(3, (8, 0))
                && !calls.lacks(2, (8, 0))
                && !calls.lacks(3, (8, 1))
                && !calls.lacks(3, (7, 0))
        );
        assert_eq!(calls.compare((7, 0), &[4, 2], 4, &sum), Ok(()));
        assert_eq!(calls.deserter(|rank| rank == 4), None);
    }

    #[test]
    fn a_process_misses_members_that_ended_before_its_last_call() {
        let awaited = LastCalls::default();
        awaited.note(7, &[4, 2], 0);
        awaited.note(7, &[4, 2], 1);
        let ended = |rank, rounds| move |other, group, round| (other, group) == (rank, 7) && rounds <= round;
        assert_eq!(awaited.deserter(ended(4, 2)), None, "it has made both calls");
        assert_eq!(awaited.deserter(ended(4, 1)), Some(4));
        assert_eq!(awaited.deserter(ended(3, 0)), None, "it is no member");
        awaited.forget(7);
        assert_eq!(awaited.deserter(ended(4, 1)), None, "the group is gone");
        assert!(awaited.0.lock().is_empty());
    }

    #[test]
    fn the_sides_of_a_message_are_equal_except_for_their_peers() {
        let calls = CallTable::default();
        let send = || Arc::new(Call::new(Collective::Send { to: 1, tag: 0 }));
        let recv = Call::new(Collective::Recv { from: Some(0), tag: 0 });
        assert_eq!(calls.compare((1, 0), &[0, 1], 0, &send()), Ok(()));
        assert_eq!(calls.compare((1, 0), &[0, 1], 1, &Arc::new(recv.clone())), Ok(()));
        assert_eq!(calls.compare((1, 1), &[0, 1], 0, &send()), Ok(()));
        let long = Arc::new(Call { shape: smallvec::smallvec![3], ..recv });
        assert!(matches!(
            calls.compare((1, 1), &[0, 1], 1, &long),
            Err(Cause::Mismatch { what: "shape", .. })
        ));
    }
}
