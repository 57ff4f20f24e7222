//! Error reports of processes that a launcher started: one of them prints, once, before any of them ends.

use std::fmt::Display;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use candle_dist::init::LaunchInfo;
use candle_dist::{Cause, Error, GroupFailure, ProcessGroup};
use parking_lot::Mutex;

use super::stop::StopSignal;
use crate::cli;

/// How often the watching thread checks.
const TICK: Duration = Duration::from_millis(10);
/// How long a process continues after SIGTERM, if it has not printed: Open MPI sends SIGKILL after a second.
const LINGER: Duration = Duration::from_millis(800);
/// When a process speaks that may not have to: the launcher has ended it by then if another one has spoken. Two processes find
/// that a third one is lost within a quarter of a second of each other.
const TURN: Duration = Duration::from_millis(1200);
/// The time in which such processes speak, one after the other.
const SPREAD: Duration = Duration::from_millis(200);
/// The same for errors of a start, where a launcher has more to end and nothing else waits.
const TURN_AT_START: Duration = Duration::from_secs(3);

/// The single error report of this process.
#[derive(Debug)]
pub(super) struct Voice {
    /// A watch that has not checked for this long was frozen; others count a process as lost after twice that.
    frozen: Duration,
    has_spoken: AtomicBool,
    /// Whether the launcher ends this process, because another one has ended.
    is_ended: AtomicBool,
    is_over: AtomicBool,
    /// The time of the watch's last check; `None` before and after the watch.
    looked: Mutex<Option<Instant>>,
    /// When this process was last found to have been frozen.
    thawed: Mutex<Option<Instant>>,
}

impl Voice {
    /// Creates that of a process that counts as lost after so much silence.
    pub(super) fn new(lost_after: Duration) -> Self {
        Self {
            frozen: lost_after / 2,
            has_spoken: AtomicBool::default(),
            is_ended: AtomicBool::default(),
            is_over: AtomicBool::default(),
            looked: Mutex::default(),
            thawed: Mutex::default(),
        }
    }

    /// Prints why the program ends, unless a report was printed before. If this process was frozen just now, others may have
    /// reported it as lost, and the launcher has woken it up to end it: then it waits for that.
    pub(super) fn say(&self, why: impl Display) {
        self.notice_frost();
        if self.is_thawing() {
            thread::sleep(TURN + SPREAD);
            if self.is_ended.load(Ordering::Acquire) {
                return;
            }
        }
        if !self.has_spoken.swap(true, Ordering::AcqRel) {
            cli::tell("error", why);
        }
    }

    /// Prints why the world has failed if that is this rank's task, before it returns.
    ///
    /// Launchers end all processes when one ends with an error. So the other ranks return after the reporting rank has
    /// printed: rank 0 keeps them until all have ended. If rank 0 is gone, each rank prints after a delay of its own,
    /// so the end of the first one ends the later ones before. All are over soon, also where no launcher ends them.
    pub(super) fn tell(&self, rank: usize, failure: &GroupFailure, why: impl Display) {
        if let Some(pause) = turn(rank, failure.ranks.len(), &failure.cause) {
            self.say_after(pause, why);
        }
    }

    /// Prints why this rank ends, though the world has not failed. All ranks may end for this reason, so rank 0 speaks first, and
    /// others only if no `failure` of the world follows.
    pub(super) fn tell_own(
        &self,
        (rank, size): (usize, usize),
        failure: impl Fn() -> Option<Arc<GroupFailure>>,
        why: impl Display,
    ) {
        if rank > 0 {
            thread::sleep(later(rank, size));
        }
        match failure() {
            Some(failure) => self.tell(rank, &failure, why),
            None => self.say(why),
        }
    }

    /// Prints why the program ends after a pause, unless the launcher ends this process meanwhile: who ended first has spoken.
    fn say_after(&self, pause: Duration, why: impl Display) {
        thread::sleep(pause);
        if pause.is_zero() || !self.is_ended.load(Ordering::Acquire) {
            self.say(why);
        }
    }

    /// Prints why the world has not started, if that is this rank's task, before it returns.
    pub(super) fn tell_start(&self, info: &LaunchInfo, error: &Error) {
        match turn_at_start([info.rank, info.local_rank, info.local_size], error) {
            Some(pause) => self.say_after(pause, error),
            // This end may end those that speak.
            None => thread::sleep(TURN_AT_START),
        }
    }

    /// Makes reports wait for a while if this process was frozen.
    fn notice_frost(&self) {
        let looked = *self.looked.lock();
        if looked.is_some_and(|looked| looked.elapsed() > self.frozen) {
            *self.thawed.lock() = Some(Instant::now());
        }
    }

    fn is_thawing(&self) -> bool {
        self.thawed.lock().is_some_and(|thawed| thawed.elapsed() < self.frozen)
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
            for _ in pending.forever() {
                voice.is_ended.store(true, Ordering::Release);
                // A program that stops by itself is ended by a second signal, or by SIGKILL.
                if StopSignal::is_awaited() {
                    continue;
                }
                let end = Instant::now() + LINGER;
                while Instant::now() < end && !voice.has_spoken.load(Ordering::Acquire) {
                    thread::sleep(TICK);
                }
                // If that fails, the launcher's next signal is SIGKILL.
                let _ = emulate_default_handler(SIGTERM);
                break;
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
fn turn(rank: usize, size: usize, cause: &Cause) -> Option<Duration> {
    let speaks = match *cause {
        Cause::Failed { rank: failed, .. } | Cause::Panicked { rank: failed, .. } => rank == failed,
        // Nobody knows which others are gone with it.
        Cause::Lost { rank: 0, .. } if rank > 1 => return Some(later(rank, size)),
        Cause::Lost { rank: 0, .. } => rank == 1,
        _ => rank == 0,
    };
    speaks.then_some(Duration::ZERO)
}

/// Returns the delay after which a process prints why it does not start, by its rank, its rank on its host, and their number:
/// rank 0 what all have heard of it, the first one of a host what its others find too, and each what it alone may know.
fn turn_at_start([rank, local_rank, local_size]: [usize; 3], error: &Error) -> Option<Duration> {
    let speaks = match error {
        Error::NotStarted(_) => rank == 0,
        Error::Unreachable(_) if local_rank == 0 => true,
        _ if rank > 0 => return Some(later_at_start(local_rank, local_size)),
        _ => true,
    };
    speaks.then_some(Duration::ZERO)
}

/// Returns the delay of the `nth` process that may not have to speak at the start.
pub(super) fn later_at_start(nth: usize, size: usize) -> Duration {
    TURN_AT_START + later(nth, size)
}

/// Returns the delay of the `nth` process that may not have to speak.
fn later(nth: usize, size: usize) -> Duration {
    TURN + SPREAD.mul_f64(nth.min(size) as f64 / size.max(1) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_was_frozen_waits_for_its_end() {
        let frozen = Duration::from_secs(5);
        for (since, is_silent) in [(frozen * 2, true), (frozen / 2, false)] {
            let voice = Voice::new(frozen * 2);
            *voice.looked.lock() = Instant::now().checked_sub(since);
            voice.notice_frost();
            assert_eq!(voice.is_thawing(), is_silent);
        }
    }

    #[test]
    fn a_job_that_goes_on_after_a_frost_says_why_it_ends() {
        let voice = Voice::new(Duration::from_secs(10));
        *voice.looked.lock() = Instant::now().checked_sub(Duration::from_secs(60));
        voice.is_ended.store(true, Ordering::Release);
        voice.say("the end of a process that others have lost");
        assert!(!voice.has_spoken.load(Ordering::Acquire));
        voice.is_ended.store(false, Ordering::Release);
        *voice.looked.lock() = Some(Instant::now());
        *voice.thawed.lock() = Instant::now().checked_sub(Duration::from_secs(30));
        voice.say("an error of a job that goes on");
        assert!(voice.has_spoken.load(Ordering::Acquire));
    }

    #[test]
    fn one_rank_speaks_at_once_and_it_is_one_that_is_left() {
        let lost = |rank| Cause::Lost { rank, how: String::new() };
        let failed = Cause::Failed { rank: 2, message: String::new() };
        let cases = [(lost(0), 1), (lost(1), 0), (lost(3), 0), (failed, 2), (Cause::Deadlock, 0)];
        for (cause, speaker) in cases {
            let at_once =
                (0..4).filter(|&rank| turn(rank, 4, &cause) == Some(Duration::ZERO)).collect::<Vec<_>>();
            assert_eq!(at_once, [speaker], "{cause}");
        }
        assert_eq!(turn(0, 4, &lost(0)), None);
    }

    /// A rank counts as lost after ten seconds, and all others are to end within twelve.
    #[test]
    fn all_have_spoken_soon_when_rank_0_is_lost() {
        let lost = Cause::Lost { rank: 0, how: String::new() };
        for size in [3, 4, 8, 100, 10_000] {
            let turns: Vec<_> = (2..size).map(|rank| turn(rank, size, &lost).unwrap()).collect();
            assert!(turns.iter().all(|turn| (TURN..=TURN + SPREAD).contains(turn)), "{size}");
            assert!(turns.is_sorted() && turns.windows(2).all(|pair| pair[0] < pair[1]), "{size}");
        }
        assert!(LINGER < TURN && TURN + SPREAD < Duration::from_secs(2));
    }

    #[test]
    fn who_waits_for_its_turn_is_silent_when_the_launcher_ends_it() {
        for (pause, speaks) in [(Duration::ZERO, true), (Duration::from_millis(1), false)] {
            let voice = Voice::new(Duration::from_secs(10));
            voice.is_ended.store(true, Ordering::Release);
            voice.say_after(pause, "the end of a process that the launcher ends");
            assert_eq!(voice.has_spoken.load(Ordering::Acquire), speaks, "{pause:?}");
        }
    }

    #[test]
    fn an_error_of_the_start_is_printed_by_those_who_alone_may_know_it() {
        // Two hosts with two ranks each.
        let who = |error: fn(String) -> Error| {
            let places = [[0, 0, 2], [1, 1, 2], [2, 0, 2], [3, 1, 2]];
            places.map(|place| turn_at_start(place, &error(String::new())).map(|turn| turn.is_zero()))
        };
        assert_eq!(who(Error::NotStarted), [Some(true), None, None, None]);
        assert_eq!(who(Error::Unreachable), [Some(true), Some(false), Some(true), Some(false)]);
        assert_eq!(who(Error::Init), [Some(true), Some(false), Some(false), Some(false)]);
    }
}
