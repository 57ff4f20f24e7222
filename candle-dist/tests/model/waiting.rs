//! The waiting of ranks that are threads.
//!
//! `wait.rs` and `loan.rs` are the same files that the backend uses, compiled here with loom's primitives. Sleeps never
//! time out here, so a lost wake-up is a deadlock, which loom reports. The round is a replica of `rounds.rs` and `rendezvous.rs` with
//! loom's cells in place of tensors: a read that races with a write is an error.
#[allow(dead_code)] // polling only takes time
#[path = "../../src/backend/threads/wait.rs"]
mod wait;

#[path = "../../src/backend/threads/loan.rs"]
mod loan;

/// The primitives that `wait.rs` and `loan.rs` use: parking_lot's API over loom's primitives.
mod sync {
    pub(super) use loom::cell::{ConstPtr, UnsafeCell};
    pub(super) use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
    use std::time::Duration;

    #[derive(Default)]
    pub(super) struct Mutex<T>(loom::sync::Mutex<T>);

    /// Holds the lock, except inside a wait.
    pub(super) struct MutexGuard<'a, T>(Option<loom::sync::MutexGuard<'a, T>>);

    impl<T> Mutex<T> {
        pub(super) fn lock(&self) -> MutexGuard<'_, T> {
            MutexGuard(Some(self.0.lock().unwrap()))
        }
    }

    #[derive(Default)]
    pub(super) struct Condvar(loom::sync::Condvar);

    impl Condvar {
        pub(super) fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, _: Duration) {
            guard.0 = guard.0.take().map(|held| self.0.wait(held).unwrap());
        }

        pub(super) fn notify_all(&self) {
            self.0.notify_all();
        }
    }
}

use super::explore;
use loan::Loan;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use loom::thread;
use std::time::Duration;
use wait::EventCount;

const FOREVER: Duration = Duration::MAX;

/// Sleeps until `ready`, like the loop of `GroupState::wait`.
fn wait_until(event: &EventCount, ready: impl Fn() -> bool) {
    while !ready() {
        event.sleep(FOREVER, &ready);
    }
}

#[test]
fn no_change_is_slept_through() {
    explore(None, || {
        let shared = Arc::new((AtomicBool::new(false), EventCount::default()));
        let changer = {
            let shared = shared.clone();
            thread::spawn(move || {
                // Weaker than in the backend, because the guarantees of the fences do not depend on it.
                shared.0.store(true, Ordering::Relaxed);
                shared.1.notify();
            })
        };
        wait_until(&shared.1, || shared.0.load(Ordering::Relaxed));
        changer.join().unwrap();
    });
}

#[test]
fn every_sleeper_wakes() {
    explore(Some(3), || {
        let shared = Arc::new((AtomicBool::new(false), EventCount::default()));
        let sleepers: Vec<_> = (0..2)
            .map(|_| {
                let shared = shared.clone();
                thread::spawn(move || wait_until(&shared.1, || shared.0.load(Ordering::Relaxed)))
            })
            .collect();
        shared.0.store(true, Ordering::Relaxed);
        shared.1.notify();
        for sleeper in sleepers {
            sleeper.join().unwrap();
        }
    });
}

/// A replica of a group and one of its rounds, with the atomics of `GroupState::start`, `finish` and `wait`.
struct Round {
    operands: Vec<UnsafeCell<usize>>,
    /// By member: what it lends to all, here a one.
    loans: Vec<Loan<usize>>,
    /// By member: the offer is there, and the member has left.
    entered: Vec<AtomicBool>,
    left: Vec<AtomicBool>,
    /// How many loans of started calls were taken back.
    freed: AtomicUsize,
    /// Of the world: a rank has returned or failed.
    ended: AtomicBool,
    failed: AtomicBool,
    event: EventCount,
}

impl Round {
    fn new(members: usize) -> Arc<Self> {
        Arc::new(Self {
            operands: (0..members).map(|_| UnsafeCell::new(0)).collect(),
            loans: (0..members).map(|_| Loan::new(1)).collect(),
            entered: (0..members).map(|_| AtomicBool::new(false)).collect(),
            left: (0..members).map(|_| AtomicBool::new(false)).collect(),
            freed: AtomicUsize::new(0),
            ended: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            event: EventCount::default(),
        })
    }

    fn write(&self, me: usize, value: usize) {
        // SAFETY: loom tracks the access, and fails the test if another access is concurrent.
        self.operands[me].with_mut(|operand| unsafe { *operand = value });
    }

    fn read_all(&self) -> usize {
        // SAFETY: as in `write`, for the loans too.
        let loans: Vec<_> = self.loans.iter().map(|loan| unsafe { loan.read() }).collect();
        assert!(loans.iter().all(|lent| **lent == 1), "they last until all have left");
        // SAFETY: as in `write`.
        self.operands.iter().map(|operand| operand.with(|operand| unsafe { *operand })).sum()
    }

    /// Waits for the marks of all members. Returns `false` if the world fails or a member ends first.
    fn wait_for_all(&self, marks: &[AtomicBool]) -> bool {
        let complete = || marks.iter().all(|mark| mark.load(Ordering::Acquire));
        let in_vain = || self.failed.load(Ordering::Acquire) || self.ended.load(Ordering::Acquire);
        wait_until(&self.event, || complete() || in_vain());
        complete()
    }

    /// One blocking call of member `me`, which returns the sum of all operands.
    fn meet(&self, me: usize, value: usize) -> Option<usize> {
        let sum = self.read_in_turn(me, value)?;
        self.wait_for_all(&self.left).then(|| {
            // SAFETY: as in `write`.
            assert_eq!(unsafe { self.loans[me].end() }, 1);
            sum
        })
    }

    /// The part of a call that a started one has too: offers an operand, reads all, and leaves.
    fn read_in_turn(&self, me: usize, value: usize) -> Option<usize> {
        self.write(me, value);
        self.entered[me].store(true, Ordering::Release);
        self.event.notify();
        let sum = self.wait_for_all(&self.entered).then(|| self.read_all())?;
        self.left[me].swap(true, Ordering::AcqRel);
        self.event.notify();
        Some(sum)
    }

    /// One started call of member `me`, whose operands are freed by a member that sees that all have left.
    fn meet_without_waiting(&self, me: usize, value: usize) {
        assert!(self.read_in_turn(me, value).is_some());
        if self.left.iter().all(|mark| mark.load(Ordering::Acquire)) {
            // Both may see it, and one of them gets what was lent.
            // SAFETY: as in `write`.
            let freed = self.loans.iter().map(|loan| unsafe { loan.end() }).sum();
            self.freed.fetch_add(freed, Ordering::Relaxed);
        }
    }

    /// Ends a rank, and tells the groups like `WorldState::end`.
    fn end(&self, how: &AtomicBool) {
        how.store(true, Ordering::Release);
        self.event.notify();
    }
}

#[test]
fn members_of_a_round_read_all_operands_and_may_write_again_after_it() {
    for members in 2..=3 {
        explore(Some(2), move || {
            let round = Round::new(members);
            let ranks: Vec<_> = (1..members)
                .map(|me| {
                    let round = round.clone();
                    thread::spawn(move || member(&round, me))
                })
                .collect();
            member(&round, 0);
            for rank in ranks {
                rank.join().unwrap();
            }
        });
    }
}

/// A call, and then an optimizer that writes to the operand.
fn member(round: &Round, me: usize) {
    let members = round.operands.len();
    assert_eq!(round.meet(me, me + 1), Some(members * (members + 1) / 2));
    round.write(me, 9);
}

#[test]
fn the_last_one_that_leaves_frees_the_operands() {
    explore(Some(3), || {
        let round = Round::new(2);
        let other = {
            let round = round.clone();
            thread::spawn(move || round.meet_without_waiting(1, 1))
        };
        round.meet_without_waiting(0, 1);
        other.join().unwrap();
        assert_eq!(round.freed.load(Ordering::Relaxed), 2);
    });
}

#[test]
fn the_end_of_a_rank_wakes_those_that_wait_for_it() {
    for fails in [false, true] {
        explore(Some(2), move || {
            let round = Round::new(3);
            let waiting: Vec<_> = (0..2)
                .map(|me| {
                    let round = round.clone();
                    thread::spawn(move || round.meet(me, 1))
                })
                .collect();
            round.end(if fails { &round.failed } else { &round.ended });
            for rank in waiting {
                assert_eq!(rank.join().unwrap(), None);
            }
        });
    }
}
