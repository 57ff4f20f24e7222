//! Waiting for another process: first spinning, then yielding, then sleeping.
use std::time::{Duration, Instant};

/// The number of checks before yielding to other threads.
const SPINS: u32 = 200;
/// The number of checks between two readings of the clock.
const OFTEN: u32 = 32;
/// How long to check before sleeping between checks. A rank that sleeps too early holds up all others.
const AWAKE: Duration = Duration::from_millis(2);
/// How long each such sleep takes.
const NAP: Duration = Duration::from_micros(50);

/// One wait.
pub(super) struct Patience {
    began: Instant,
    looks: u32,
}

impl Patience {
    /// Begins a wait. If there are more ranks than cores (`crowded`), it yields from the start.
    pub(super) fn new(crowded: bool) -> Self {
        Self { began: Instant::now(), looks: if crowded { SPINS } else { 0 } }
    }

    /// Returns whether `timeout` has passed. The clock is read only now and then, since reading it costs time.
    pub(super) fn is_over(&self, timeout: Duration) -> bool {
        (self.looks >= SPINS || self.looks % OFTEN == OFTEN - 1) && self.began.elapsed() >= timeout
    }

    /// Pauses between two checks.
    pub(super) fn pause(&mut self) {
        if self.looks < SPINS {
            self.looks += 1;
            std::hint::spin_loop();
        } else if self.began.elapsed() < AWAKE {
            std::thread::yield_now();
        } else {
            std::thread::sleep(NAP);
        }
    }
}
