//! Compares the calls of ranks that are threads. NCCL does not: calls that differ end with wrong numbers, or never.
use crate::Cause;
use crate::backend::{Call, Op};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// The calls that some members of their group have made, by group and round.
#[derive(Debug, Default)]
pub(crate) struct Calls(Mutex<FxHashMap<(u64, u64), Round>>);

#[derive(Debug)]
struct Round {
    /// The member that came first, with its call.
    reference: usize,
    call: Arc<Call>,
    missing: usize,
}

impl Calls {
    /// Returns how the call of `rank` differs from that of the first of `members` in this round.
    pub(super) fn compare(&self, at: (u64, u64), members: usize, rank: usize, call: &Arc<Call>) -> Result<(), Cause> {
        let mut rounds = self.0.lock();
        let new = || Round { reference: rank, call: call.clone(), missing: members };
        let round = rounds.entry(at).or_insert_with(new);
        round.missing -= 1;
        let (reference, what) = (round.reference, difference(call, &round.call));
        if round.missing == 0 {
            rounds.remove(&at);
        }
        what.map_or(Ok(()), |what| Err(Cause::Mismatch { rank, reference, what }))
    }
}

/// Returns the first property in which two calls differ. The sides of a message name each other.
fn difference(call: &Call, reference: &Call) -> Option<&'static str> {
    let is_message = |call: &Call| matches!(call.op, Op::Send | Op::Recv);
    if call.op == reference.op || !is_message(call) || !is_message(reference) {
        return call.difference(reference);
    }
    let mut call = call.clone();
    (call.op, call.peer, call.form) = (reference.op, reference.peer, reference.form);
    // A sender knows its device, a receiver only that of the result.
    call.device = reference.device;
    call.difference(reference)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::ReduceOp;

    fn all_reduce(op: ReduceOp) -> Arc<Call> {
        Arc::new(Call { reduce: Some(op), ..Call::new(Op::AllReduce) })
    }

    #[test]
    fn calls_that_differ_are_found_and_rounds_are_forgotten() {
        let (calls, sum, max) = (Calls::default(), all_reduce(ReduceOp::Sum), all_reduce(ReduceOp::Max));
        assert_eq!(calls.compare((7, 0), 2, 0, &sum), Ok(()));
        assert_eq!(calls.compare((7, 1), 2, 0, &sum), Ok(()), "one rank may be ahead");
        let what = "reduction";
        assert_eq!(calls.compare((7, 0), 2, 1, &max), Err(Cause::Mismatch { rank: 1, reference: 0, what }));
        assert_eq!(calls.compare((7, 1), 2, 1, &sum), Ok(()));
        assert!(calls.0.lock().is_empty());
    }

    #[test]
    fn the_sides_of_a_message_are_equal_except_for_their_peers() {
        let calls = Calls::default();
        let side = |op, peer| Arc::new(Call { peer: Some(peer), ..Call::new(op) });
        assert_eq!(calls.compare((1, 0), 2, 0, &side(Op::Send, 1)), Ok(()));
        assert_eq!(calls.compare((1, 0), 2, 1, &side(Op::Recv, 0)), Ok(()));
        assert_eq!(calls.compare((1, 1), 2, 0, &side(Op::Send, 1)), Ok(()));
        let long = Arc::new(Call { shape: smallvec::smallvec![3], peer: Some(0), ..Call::new(Op::Recv) });
        assert!(matches!(calls.compare((1, 1), 2, 1, &long), Err(Cause::Mismatch { what: "shape", .. })));
    }
}
