//! One clock for the ranks of a group: the clock of the first rank.
//!
//! Threads of one process share a clock. Other ranks request the time of the first rank in several round trips, and use
//! the median of the offsets. The error of an offset is at most half of its round trip.
use crate::Result;
use candle_core::{DType, Device, Tensor};
use candle_dist::ProcessGroup;
use std::hash::{BuildHasher, RandomState};
use std::sync::OnceLock;
use std::time::Instant;

/// The number of requests of a rank.
const ROUNDS: usize = 9;

/// A clock's time in nanoseconds.
pub(super) type Nanos = i64;

/// The clock of the first rank, as far as this rank knows it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Clock {
    /// The offset from this process's clock.
    ahead: Nanos,
    /// The largest error of the offset.
    within: Nanos,
}

impl Clock {
    /// Compares the clocks of all ranks. Every rank calls it.
    pub(super) fn settle(group: &ProcessGroup) -> Result<Self> {
        Self::between(group, process(), &here)
    }

    /// Like [`settle`](Self::settle), with any clock `here` and any number of the process.
    fn between(group: &ProcessGroup, process: i64, here: &dyn Fn() -> Nanos) -> Result<Self> {
        if group.size() == 1 {
            return Ok(Self::default());
        }
        let processes = group.all_gather(&Tensor::new(&[process], &Device::Cpu)?, 0)?.to_vec1::<i64>()?;
        let apart = (1..group.size()).filter(|&rank| processes[rank] != processes[0]);
        for rank in apart {
            if group.rank() == 0 {
                answer(group, rank, here)?;
            } else if group.rank() == rank {
                return ask(group, here);
            }
        }
        Ok(Self::default())
    }

    /// Returns the current time.
    pub(super) fn now(&self) -> Nanos {
        here() + self.ahead
    }
}

/// Answers the requests of a rank for the time.
fn answer(group: &ProcessGroup, to: usize, here: &dyn Fn() -> Nanos) -> Result<()> {
    for _ in 0..ROUNDS {
        group.to_host(&group.recv(1, DType::I64, to)?)?;
        group.send(&Tensor::new(&[here()], &Device::Cpu)?, to)?;
    }
    Ok(())
}

/// Requests the time of the first rank, and returns its clock.
fn ask(group: &ProcessGroup, here: &dyn Fn() -> Nanos) -> Result<Clock> {
    let mut answers = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let sent = here();
        group.send(&Tensor::new(&[sent], &Device::Cpu)?, 0)?;
        let theirs = group.to_host(&group.recv(1, DType::I64, 0)?)?.to_vec1::<i64>()?[0];
        let came = here();
        // The answer was sent between these two times.
        let half = (came - sent + 1) / 2;
        answers.push(Clock { ahead: theirs - sent - half, within: half });
    }
    answers.sort_by_key(|answer| answer.ahead);
    Ok(answers[ROUNDS / 2])
}

/// Returns the time of this process's clock.
fn here() -> Nanos {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as Nanos
}

/// Returns a number that no other process has.
fn process() -> i64 {
    static PROCESS: OnceLock<i64> = OnceLock::new();
    *PROCESS.get_or_init(|| RandomState::new().hash_one(std::process::id()) as i64)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::{Clock, Nanos, ROUNDS, here};
    use crate::Result;
    use candle_dist::{Op, World, comm};

    const SECOND: Nanos = 1_000_000_000;

    #[test]
    fn clocks_that_started_apart_tell_one_time_within_half_a_round_trip() {
        // The clock of each rank is this many seconds behind the clock of this process; ranks 0 and 2 are one process.
        let late = [5000, -7, 5000, 0];
        let clocks = World::threads(4).run(|ctx| -> Result<Clock> {
            let mine = late[ctx.rank()];
            let (clock, sent) =
                comm::record(|| Clock::between(ctx.group(), mine, &move || here() - mine * SECOND));
            let messages = [2, 1, 0, 1][ctx.rank()] * ROUNDS;
            assert_eq!(sent.get(Op::Send).count, messages);
            clock
        });
        for (clock, late) in clocks.unwrap().iter().zip(late) {
            let off = (clock.ahead - (late - 5000) * SECOND).abs();
            assert!(off <= clock.within, "off by {off} ns, and within {} ns", clock.within);
            // Answers arrive soon, even on a busy machine.
            assert!(clock.within < 20 * SECOND, "{clock:?}");
        }
    }

    #[test]
    fn threads_of_one_process_have_one_clock_for_no_message() {
        World::threads(3)
            .run(|ctx| -> Result<()> {
                let (clock, sent) = comm::record(|| Clock::settle(ctx.group()));
                assert_eq!((clock?, sent.get(Op::Send).count), (Clock::default(), 0));
                Ok(())
            })
            .unwrap();
    }
}
