//! Error reports of processes that a launcher started: one of them prints, once, before any of them ends.

use std::fmt::Display;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use candle_dist::{Cause, GroupFailure, ProcessGroup};
use parking_lot::Mutex;

use crate::cli;

/// How often the watching thread checks.
const TICK: Duration = Duration::from_millis(10);
/// A watch that has not checked for this long was frozen; others count a process as lost after twice that.
const FROZEN: Duration = Duration::from_secs(5);
/// How long a process continues after SIGTERM, if it has not printed: Open MPI sends SIGKILL after a second.
const LINGER: Duration = Duration::from_millis(800);
/// How much later than another one a process may notice that rank 0 is gone: signs of life come every second.
const LAG: Duration = Duration::from_secs(3);

/// The single error report of this process.
#[derive(Debug, Default)]
pub(super) struct Voice {
    has_spoken: AtomicBool,
    is_over: AtomicBool,
    /// The time of the watch's last check; `None` before and after the watch.
    looked: Mutex<Option<Instant>>,
}

impl Voice {
    /// Prints why the program ends, unless a report was printed before or this process was frozen. In the latter case
    /// others have reported it as lost, and the launcher has woken it up to end it.
    pub(super) fn say(&self, why: impl Display) {
        self.notice_frost();
        if !self.has_spoken.swap(true, Ordering::AcqRel) {
            cli::tell("error", why);
        }
    }

    /// Prints why the world has failed if that is this rank's task, before it returns.
    ///
    /// Launchers end all processes when one ends with an error. So the other ranks return after the reporting rank has
    /// printed: rank 0 keeps them until all have ended. If rank 0 is gone, each rank prints after a delay of its own,
    /// so the end of an earlier rank ends the later ones first.
    pub(super) fn tell(&self, rank: usize, failure: &GroupFailure, why: impl Display) {
        if let Some(pause) = turn(rank, &failure.cause) {
            thread::sleep(pause);
            self.say(why);
        }
    }

    /// Suppresses later reports if this process was frozen.
    fn notice_frost(&self) {
        let looked = *self.looked.lock();
        if looked.is_some_and(|looked| looked.elapsed() > FROZEN) {
            self.has_spoken.store(true, Ordering::Release);
        }
    }

    /// Checks for a failure of the world until [`over_at_end`](Self::over_at_end), since this rank may be computing.
    pub(super) fn watch(&self, rank: usize, group: &ProcessGroup) {
        while !self.is_over.load(Ordering::Acquire) {
            self.notice_frost();
            *self.looked.lock() = Some(Instant::now());
            if let Some(failure) = group.failure() {
                self.looked.lock().take();
                // A panic has been printed already.
                if !matches!(failure.cause, Cause::Panicked { .. }) {
                    self.tell(rank, &failure, &failure);
                }
                break;
            }
            thread::sleep(TICK);
        }
        self.looked.lock().take();
    }

    /// Ends the watch when it is dropped.
    pub(super) fn over_at_end(&self) -> impl Drop {
        struct Over<'a>(&'a AtomicBool);
        impl Drop for Over<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Release);
            }
        }
        Over(&self.is_over)
    }
}

/// Delays the end that a launcher requests by SIGTERM. The launcher sends it when another process is gone, before the
/// ranks know of that.
pub(super) struct Grace {
    #[cfg(unix)]
    signals: signal_hook::iterator::Handle,
}

impl Grace {
    /// Watches for the signal until this is dropped.
    #[cfg(unix)]
    pub(super) fn start(voice: &Arc<Voice>) -> io::Result<Self> {
        use signal_hook::{consts::SIGTERM, iterator::Signals, low_level::emulate_default_handler};
        let mut pending = Signals::new([SIGTERM])?;
        let (signals, voice) = (pending.handle(), voice.clone());
        thread::Builder::new().name("signals".into()).spawn(move || {
            if pending.forever().next().is_some() {
                let end = Instant::now() + LINGER;
                while Instant::now() < end && !voice.has_spoken.load(Ordering::Acquire) {
                    thread::sleep(TICK);
                }
                // If that fails, the launcher's next signal is SIGKILL.
                let _ = emulate_default_handler(SIGTERM);
            }
        })?;
        Ok(Self { signals })
    }

    /// There are no such signals.
    #[cfg(not(unix))]
    pub(super) fn start(_: &Arc<Voice>) -> io::Result<Self> {
        Ok(Self {})
    }
}

#[cfg(unix)]
impl Drop for Grace {
    fn drop(&mut self) {
        self.signals.close();
    }
}

/// Returns the delay after which a rank prints a failure that all know: none for the failed rank, or else for the first
/// remaining one.
fn turn(rank: usize, cause: &Cause) -> Option<Duration> {
    let speaks = match *cause {
        Cause::Failed { rank: failed, .. } | Cause::Panicked { rank: failed, .. } => rank == failed,
        Cause::Lost { rank: 0, .. } => return Some(LAG * u32::try_from(rank.checked_sub(1)?).ok()?),
        _ => rank == 0,
    };
    speaks.then_some(Duration::ZERO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_was_frozen_says_nothing() {
        for (since, is_silent) in [(FROZEN * 2, true), (FROZEN / 2, false)] {
            let voice = Voice::default();
            *voice.looked.lock() = Instant::now().checked_sub(since);
            voice.notice_frost();
            assert_eq!(voice.has_spoken.load(Ordering::Acquire), is_silent);
        }
    }

    #[test]
    fn one_rank_speaks_at_once_and_it_is_one_that_is_left() {
        let lost = |rank| Cause::Lost { rank, how: String::new() };
        let failed = Cause::Failed { rank: 2, message: String::new() };
        let cases = [(lost(0), 1), (lost(1), 0), (lost(3), 0), (failed, 2), (Cause::Deadlock, 0)];
        for (cause, speaker) in cases {
            let at_once = (0..4).filter(|&rank| turn(rank, &cause) == Some(Duration::ZERO)).collect::<Vec<_>>();
            assert_eq!(at_once, [speaker], "{cause}");
        }
        assert_eq!([0, 2, 3].map(|rank| turn(rank, &lost(0))), [None, Some(LAG), Some(LAG * 2)]);
    }
}
