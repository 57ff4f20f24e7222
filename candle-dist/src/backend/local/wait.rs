//! Spinning briefly, then parking, until a condition that other threads make true.
use parking_lot::{Condvar, Mutex};
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::time::Duration;

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

/// Polls `ready` for some microseconds before it is worth a system call; `crowded` says that ranks outnumber cores,
/// where spinning keeps the awaited thread from running.
pub(super) fn spin(crowded: bool, ready: impl Fn() -> bool) -> bool {
    let (spins, yields) = if crowded { (50, 4) } else { (3000, 0) };
    for _ in 0..spins {
        if ready() {
            return true;
        }
        std::hint::spin_loop();
    }
    for _ in 0..yields {
        std::thread::yield_now();
        if ready() {
            return true;
        }
    }
    false
}
