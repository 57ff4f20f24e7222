//! Spinning briefly, then parking, until a condition that other threads make true.
use super::sync::{AtomicUsize, Condvar, Mutex, Ordering, fence};
use std::time::{Duration, Instant};

/// Where threads park until somebody changes what they wait for.
///
/// The changer writes its atomics, then calls [`Event::notify`]; the waiter registers, re-reads the atomics under the
/// lock, and only then sleeps. The two sequentially consistent fences order "write, then look for sleepers" against
/// "register, then read", so one of them always sees the other.
#[derive(Default)]
pub(super) struct Event {
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
}

impl Event {
    /// Wakes all sleepers; call it after the change.
    pub(super) fn notify(&self) {
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            // Taking the lock lets a thread between its check and its sleep fall asleep first, so it is woken.
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

/// How long a rank polls before it parks: about as long as parking and waking take.
const POLL: Duration = Duration::from_micros(100);

/// Polls `ready` for a while before it is worth to sleep; tells whether it came true.
///
/// First with the core held, which costs least if the peer is close; then giving way in between, so that a peer that
/// shares this core gets on. Where ranks outnumber cores (`crowded`) it is likely to share it.
pub(super) fn poll(crowded: bool, ready: impl Fn() -> bool) -> bool {
    // A core that is given away comes back after about a microsecond: more than most small calls take.
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
