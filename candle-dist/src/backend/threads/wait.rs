//! Waits for a condition that other threads make true: spins briefly, then parks.
use super::sync::{AtomicUsize, Condvar, Mutex, Ordering, fence};
use std::time::{Duration, Instant};

/// Parks threads until another thread changes the condition.
///
/// The changing thread writes its atomics, then calls [`EventCount::notify`]. The waiting thread registers, re-reads the
/// atomics under the lock, and only then sleeps. Two sequentially consistent fences order "write, then look for
/// sleepers" against "register, then read", so one of the threads always sees the other.
#[derive(Default)]
pub(super) struct EventCount {
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
}

impl EventCount {
    /// Wakes all sleepers; call it after the change.
    pub(super) fn notify(&self) {
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            // Taking the lock lets a thread between its check and its sleep fall asleep first, so that it is woken.
            drop(self.lock.lock());
            self.wake.notify_all();
        }
    }

    /// Sleeps until notified, at most for `limit`, unless `ready` already holds.
    pub(super) fn sleep(&self, limit: Duration, ready: impl Fn() -> bool) {
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let mut guard = self.lock.lock();
        if !ready() {
            self.wake.wait_for(&mut guard, limit);
        }
        drop(guard);
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
    }
}

/// How long a rank polls before it parks: about the cost of parking and waking.
const POLL: Duration = Duration::from_micros(100);

/// Polls `ready` for a while before sleeping; returns whether it became true.
///
/// First without yielding, which is cheapest if the peer is close; then with yields, so that a peer on this core can
/// run. If ranks outnumber cores (`crowded`), the peer is likely on this core.
pub(super) fn poll(crowded: bool, ready: impl Fn() -> bool) -> bool {
    // A yielded core comes back after about a microsecond, which is longer than most small calls.
    let spins = if crowded { 30 } else { 1000 };
    for _ in 0..spins {
        if ready() {
            return true;
        }
        std::hint::spin_loop();
    }
    let began = Instant::now();
    while began.elapsed() < POLL {
        std::thread::yield_now();
        if ready() {
            return true;
        }
    }
    false
}
