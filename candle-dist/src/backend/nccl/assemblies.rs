//! Calls of ranks of one process that share a GPU: no member puts a call on it before all of them are ready.
//!
//! A kernel of NCCL's waits for those of the other members, and NCCL lets a stream of its own wait for each kernel (`ncclLaunchFinish`). The
//! streams of all ranks of a process are dealt to the same few hardware queues of their GPU. So such a wait may stand in front of what
//! another member computes before its own part of the same call, and neither ends. CUDA also waits for all work of a GPU by itself, for
//! instance to load a kernel.
//!
//! So the host waits twice in each call: until what comes before it has ended on the GPU, on all members, and until all of them have
//! enqueued it. In between a member puts nothing else on the GPU, and after that the call ends by itself. This costs time, but
//! ranks share a GPU only to try programs. Processes have queues of their own.
use parking_lot::{Condvar, Mutex};
use rustc_hash::FxHashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// How long a member waits for the others before it looks for failures.
const TICK: Duration = Duration::from_millis(20);

/// A point of a call that all members pass together.
#[derive(Debug, Clone, Copy)]
pub(super) enum CallPoint {
    /// What comes before the call has ended.
    Ready,
    /// The call is on the GPU.
    Enqueued,
}

/// The communicators of a process whose ranks share a GPU, by name.
#[derive(Debug, Default)]
pub(crate) struct AssemblyTable(Mutex<FxHashMap<u64, Weak<CallAssembly>>>);

/// Where the members of a communicator meet for their calls.
#[derive(Debug)]
struct CallAssembly {
    /// How many calls each member has come to, at both points.
    counts: Mutex<Vec<[u64; 2]>>,
    changed: Condvar,
}

/// A member of a communicator that meets the others for each call.
#[derive(Debug)]
pub(super) struct CallMember {
    me: usize,
    assembly: Arc<CallAssembly>,
}

impl AssemblyTable {
    /// Returns the member `me` of the `size` members of a communicator.
    pub(super) fn member(&self, name: u64, size: usize, me: usize) -> CallMember {
        let mut table = self.0.lock();
        let assembly = table.get(&name).and_then(Weak::upgrade).unwrap_or_else(|| {
            table.retain(|_, assembly| assembly.strong_count() > 0);
            let new =
                Arc::new(CallAssembly { counts: Mutex::new(vec![[0; 2]; size]), changed: Condvar::new() });
            table.insert(name, Arc::downgrade(&new));
            new
        });
        CallMember { me, assembly }
    }
}

impl CallMember {
    /// This member comes to a point of its next call. Returns the number of the call.
    pub(super) fn come(&self, point: CallPoint) -> u64 {
        let count = {
            let mut counts = self.assembly.counts.lock();
            let count = &mut counts[self.me][point as usize];
            *count += 1;
            *count
        };
        self.assembly.changed.notify_all();
        count - 1
    }

    /// Returns whether all members have come to this point of a call. Waits a little for them.
    pub(super) fn are_all_here(&self, point: CallPoint, call: u64) -> bool {
        let some_lack = |counts: &mut Vec<[u64; 2]>| counts.iter().any(|of| of[point as usize] <= call);
        let mut counts = self.assembly.counts.lock();
        self.assembly.changed.wait_while_for(&mut counts, some_lack, TICK);
        !some_lack(&mut counts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_meet_for_each_call_and_leave_nothing() {
        let table = AssemblyTable::default();
        let (first, second) = (table.member(7, 2, 0), table.member(7, 2, 1));
        assert_eq!(first.come(CallPoint::Ready), 0);
        assert!(!first.are_all_here(CallPoint::Ready, 0));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| while !first.are_all_here(CallPoint::Ready, 0) {});
            second.come(CallPoint::Ready);
            waiting.join().expect("no panic");
        });
        assert!(!second.are_all_here(CallPoint::Enqueued, 0), "the points are apart");
        assert_eq!(second.come(CallPoint::Ready), 1, "the next call");
        assert!(first.are_all_here(CallPoint::Ready, 0) && !first.are_all_here(CallPoint::Ready, 1));
        // One member may leave before the other one has looked.
        second.come(CallPoint::Enqueued);
        drop(second);
        assert_eq!(first.come(CallPoint::Enqueued), 0);
        assert!(first.are_all_here(CallPoint::Enqueued, 0));
        drop(first);
        table.member(8, 1, 0);
        assert_eq!(table.0.lock().len(), 1);
    }
}
