//! How to wait for another process: with the core held, then giving way, then asleep.
use std::time::{Duration, Instant};

/// How often to look again before giving way to other threads.
const SPINS: u32 = 200;
/// How often to look without asking for the time.
const OFTEN: u32 = 32;
/// How long to look again and again before sleeping in between: most messages of 256 KiB have come by then.
const AWAKE: Duration = Duration::from_micros(200);
/// How long to sleep then.
const NAP: Duration = Duration::from_micros(50);

/// One wait.
pub(super) struct Patience {
    began: Instant,
    looks: u32,
}

impl Patience {
    /// The beginning of a wait; where ranks outnumber cores (`crowded`) it gives way from the start.
    pub(super) fn new(crowded: bool) -> Self {
        Self { began: Instant::now(), looks: if crowded { SPINS } else { 0 } }
    }

    /// Whether it has been as long as `timeout`; asked now and then, for the time is not for nothing.
    pub(super) fn is_over(&self, timeout: Duration) -> bool {
        (self.looks >= SPINS || self.looks % OFTEN == OFTEN - 1) && self.began.elapsed() >= timeout
    }

    /// Pauses between two looks.
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
