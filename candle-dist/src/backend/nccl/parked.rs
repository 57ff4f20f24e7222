//! Communicators that nobody uses any more, until they can be freed.
//!
//! To free one, NCCL frees page-locked memory and unmaps memory of GPUs (`commFree`), and CUDA may wait there for all work of the GPU
//! and of the GPUs that can access its memory. Among threads, the last member that frees its part does so for all. A kernel of another
//! communicator may wait at that moment for the very rank that frees. So a communicator that is dropped is parked. Parked ones are freed
//! when the last rank of the process has ended; and before that in moments in which no call of any rank here is under way, if there
//! are more than [`KEPT`] of each rank, and all their members here have dropped them.
use super::comm::CommState;
use super::handle::{Handle, async_state, destroy, finalize};
use super::rank::{NcclRank, PollPause};
use cudarc::nccl::sys::ncclResult_t;
use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How many parked communicators of a rank are kept until the world ends.
const KEPT: usize = 8;

/// How long NCCL may take to finalize idle communicators.
const FAREWELL: Duration = Duration::from_secs(10);

/// The parked communicators of the ranks of this process that are in one world.
pub(crate) struct ParkedComms {
    parked: Mutex<Vec<Arc<CommState>>>,
    ranks: Mutex<Vec<Weak<NcclRank>>>,
    /// How many ranks have not ended.
    left: AtomicUsize,
    /// Read by who makes calls or communicators.
    calls: RwLock<()>,
}

impl ParkedComms {
    /// Creates the place for a world of which this process has so many ranks.
    pub(crate) fn new(ranks: usize) -> Arc<Self> {
        let left = AtomicUsize::new(ranks);
        Arc::new(Self { parked: Mutex::default(), ranks: Mutex::default(), left, calls: RwLock::new(()) })
    }

    pub(super) fn add(&self, rank: Weak<NcclRank>) {
        self.ranks.lock().push(rank);
    }

    /// Keeps communicators from being freed until the guard is dropped.
    pub(super) fn calls(&self) -> RwLockReadGuard<'_, ()> {
        // The writer never waits, so readers may wait for each other.
        self.calls.read_recursive()
    }

    /// Keeps a communicator whose calls have ended until it can be freed.
    pub(super) fn park(&self, comm: Arc<CommState>) {
        self.parked.lock().push(comm);
        if self.left.load(Ordering::Acquire) == 0 {
            self.free(std::mem::take(&mut *self.parked.lock()), true);
        }
    }

    /// Frees parked communicators if there are many, and no call of a rank here is under way.
    pub(super) fn tidy(&self) {
        let ranks: Vec<_> = self.ranks.lock().iter().filter_map(Weak::upgrade).collect();
        if self.parked.lock().len() <= KEPT * ranks.len() {
            return;
        }
        let Some(_quiet) = self.calls.try_write() else { return };
        if ranks.iter().all(|rank| rank.is_idle()) {
            let taken = take_whole(&mut self.parked.lock(), |comm| comm.name(), |comm| comm.members_here());
            // Processes do not wait for each other here: their GPUs do not.
            self.free(taken, false);
        }
    }

    /// A rank ends. With the last one, all parked communicators end.
    pub(super) fn end(&self) {
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.free(std::mem::take(&mut *self.parked.lock()), true);
        }
    }

    /// Frees communicators, after their members have finalized them together if they shall.
    fn free(&self, comms: Vec<Arc<CommState>>, together: bool) {
        let taken = comms.iter().filter_map(|comm| Some((comm, comm.take()?)));
        let taken: Vec<(&Arc<CommState>, Handle)> = taken.collect();
        let (began, mut patience) = (Instant::now(), PollPause::default());
        let mut states: Vec<ncclResult_t> = taken
            .iter()
            .map(|(_, handle)| if together { finalize(handle) } else { ncclResult_t::ncclSuccess })
            .collect();
        while states.contains(&ncclResult_t::ncclInProgress) && began.elapsed() < FAREWELL {
            patience.pause();
            for ((_, handle), state) in taken.iter().zip(&mut states) {
                if *state == ncclResult_t::ncclInProgress {
                    *state = async_state(Some(handle));
                }
            }
        }
        for ((comm, handle), state) in taken.into_iter().zip(states) {
            match state {
                ncclResult_t::ncclSuccess => destroy(handle),
                _ => comm.abort_taken(handle),
            }
        }
    }
}

/// Takes the entries of each name of which there are as many as it has members here.
fn take_whole<T>(parked: &mut Vec<T>, name: impl Fn(&T) -> u64, members: impl Fn(&T) -> usize) -> Vec<T> {
    let mut counts: BTreeMap<u64, usize> = BTreeMap::new();
    parked.iter().for_each(|entry| *counts.entry(name(entry)).or_default() += 1);
    let is_whole = |entry: &T| counts.get(&name(entry)).is_some_and(|&count| count >= members(entry));
    let (whole, others) = std::mem::take(parked).into_iter().partition(is_whole);
    *parked = others;
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_all_members_have_parked_is_taken() {
        let mut parked = vec![(7, 2), (8, 3), (7, 2), (8, 3), (9, 1)];
        assert_eq!(take_whole(&mut parked, |it| it.0, |it| it.1), [(7, 2), (7, 2), (9, 1)]);
        assert_eq!(parked, [(8, 3), (8, 3)], "one member still uses it");
    }
}
