//! A rank's access to its world: failures, the calls of ranks, and small values.
use super::compare::{CallTable, LastCalls};
use super::posts::{ChannelEnd, ReceivePosts};
use super::values::ThreadValues;
use crate::backend::threads::WorldState;
use crate::backend::{Call, Op};
use crate::control::{Control, WatchGuard};
use crate::{Cause, Error, GroupFailure, Result};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A rank's access to its world, which consists of threads or of processes.
pub(crate) enum WorldWatch {
    /// The rank is a thread.
    Thread {
        /// The state that the threads share.
        world: Arc<WorldState>,
        /// The values that they exchange.
        values: Arc<ThreadValues>,
        /// The calls that they compare.
        calls: Arc<CallTable>,
        /// The receives that they have enqueued.
        posts: Arc<ReceivePosts>,
        /// This rank.
        rank: usize,
    },
    /// The rank is this process.
    Process(Arc<Control>, LastCalls),
}

/// A guard: the rank is in a call until this is dropped.
pub(super) enum WorldGuard<'a> {
    Thread(&'a WorldState, usize),
    Process(#[expect(dead_code, reason = "held for its drop")] WatchGuard<'a>),
}

impl Drop for WorldGuard<'_> {
    fn drop(&mut self) {
        if let Self::Thread(world, rank) = self {
            world.complete(*rank);
        }
    }
}

/// How long a message waits for its receive before it looks for failures.
const TICK: Duration = Duration::from_millis(20);

impl WorldWatch {
    /// Returns whether the ranks are threads of this process.
    pub(super) fn is_thread(&self) -> bool {
        matches!(self, Self::Thread { .. })
    }

    /// Tells rank `from` that this rank has enqueued the receive `number` of a channel.
    pub(super) fn post(&self, from: usize, channel: u64, number: u64) {
        match self {
            Self::Thread { posts, .. } => posts.note(channel, ChannelEnd::Receiver, number),
            Self::Process(control, _) => control.post(from, channel, number, false),
        }
    }

    /// Tells rank `to` that this rank has enqueued the message `number` of a channel.
    pub(super) fn note_sent(&self, to: usize, channel: u64, number: u64) {
        match self {
            Self::Thread { posts, .. } => posts.note(channel, ChannelEnd::Sender, number),
            Self::Process(control, _) => control.post(to, channel, number, true),
        }
    }

    /// Returns whether the message `number` of a channel is enqueued. Waits a little for it.
    pub(super) fn is_sent(&self, channel: u64, number: u64) -> bool {
        match self {
            Self::Thread { posts, .. } => posts.has(channel, ChannelEnd::Sender, number, TICK),
            Self::Process(control, _) => control.is_posted(channel, number, true, TICK),
        }
    }

    /// Forgets a channel on which this rank sends nothing more.
    pub(super) fn forget_posts(&self, channel: u64) {
        if let Self::Process(control, _) = self {
            control.forget_posts(channel);
        }
    }

    /// Does what is to be done a few times in each second.
    pub(super) fn tick(&self) {
        if let Self::Process(control, _) = self {
            control.tell_calls();
        }
    }

    /// Forgets channels on which this rank has received all that it will.
    pub(super) fn forget_receives(&self, channels: &[u64]) {
        match self {
            Self::Thread { posts, .. } => posts.forget(channels),
            Self::Process(control, _) => channels.iter().for_each(|&channel| control.forget_posts(channel)),
        }
    }

    /// Returns whether the receive `number` of a channel is enqueued. Waits a little for it.
    pub(super) fn is_awaited(&self, channel: u64, number: u64) -> bool {
        match self {
            Self::Thread { posts, .. } => posts.has(channel, ChannelEnd::Receiver, number, TICK),
            Self::Process(control, _) => control.is_posted(channel, number, false, TICK),
        }
    }

    /// Returns this rank in the world.
    pub(super) fn rank(&self) -> usize {
        match self {
            Self::Thread { rank, .. } => *rank,
            Self::Process(control, _) => control.rank(),
        }
    }

    /// Returns how long a rank may wait in one call.
    pub(super) fn timeout(&self) -> Duration {
        match self {
            Self::Thread { world, .. } => world.timeout(),
            Self::Process(control, _) => control.timeout(),
        }
    }

    /// Returns the failure that stopped the world, if any.
    pub(super) fn failure(&self) -> Option<Arc<GroupFailure>> {
        match self {
            Self::Thread { world, .. } => world.failure(),
            Self::Process(control, _) => control.failure(),
        }
    }

    /// Returns an error if the world has stopped.
    pub(super) fn check(&self) -> Result<()> {
        self.failure().map_or(Ok(()), |failure| Err(Error::Group(failure)))
    }

    /// Stops the world. Every rank gets the first cause.
    pub(super) fn fail(&self, cause: Cause) -> Error {
        match self {
            Self::Thread { world, .. } => world.fail(cause),
            Self::Process(control, _) => control.fail(cause),
        }
    }

    /// Stops the world because this rank cannot continue.
    pub(super) fn fail_with(&self, message: String) -> Error {
        self.fail(Cause::Failed { rank: self.rank(), message })
    }

    /// Stops the world because this rank has waited too long.
    pub(super) fn time_out(&self) -> Error {
        self.fail(Cause::TimedOut { rank: self.rank(), after: self.timeout() })
    }

    /// Records that this rank is in a call, until the guard is dropped.
    pub(super) fn enter(
        &self,
        group: u64,
        ranks: &[usize],
        round: u64,
        call: &Arc<Call>,
    ) -> Result<WorldGuard<'_>> {
        match self {
            Self::Thread { world, calls, rank, .. } => {
                world.check()?;
                world.begin(*rank, call);
                let inside = WorldGuard::Thread(world, *rank);
                match calls.compare((group, round), ranks, *rank, call) {
                    Ok(()) => Ok(inside),
                    // The failure says what this rank is in.
                    Err(cause) => Err(self.fail(cause)),
                }
            }
            Self::Process(control, awaited) => {
                let inside = WorldGuard::Process(control.enter_compared(group, ranks, round, call)?);
                if call.op() != Op::Send {
                    awaited.note(group, ranks, round);
                }
                Ok(inside)
            }
        }
    }

    /// Returns whether some members are known not to have made the call `round` of a group, which this rank has made. Processes do not
    /// know.
    pub(super) fn is_open(&self, group: u64, round: u64) -> bool {
        match self {
            Self::Thread { calls, .. } => calls.is_open((group, round)),
            Self::Process(..) => false,
        }
    }

    /// Forgets a group of `members` ranks with its channels, on which no call of this rank is under way.
    pub(super) fn forget(&self, group: u64, channels: &[u64], members: usize) {
        // Threads forget a call when all have made it.
        if let Self::Process(control, awaited) = self {
            channels.iter().chain([&group]).for_each(|&id| awaited.forget(id));
            control.forget(group, channels, members);
        }
    }

    /// Stops the world if a rank has returned and others wait in a call that it has not made.
    pub(super) fn look_for_deserters(&self) {
        let deserter = match self {
            Self::Thread { world, calls, .. } => calls.deserter(|rank| world.has_returned(rank)),
            Self::Process(control, _) if !control.has_anyone_left() => None,
            Self::Process(control, awaited) => {
                awaited.deserter(|rank, group, round| control.has_left(rank, group, round))
            }
        };
        if let Some(rank) = deserter {
            self.fail(Cause::Returned { rank });
        }
    }

    /// Returns whether a rank is known to have returned without the call `round` of a group or channel, which others have
    /// made.
    pub(super) fn has_left(&self, rank: usize, group: u64, round: u64) -> bool {
        match self {
            Self::Thread { world, calls, .. } => {
                world.has_returned(rank) && calls.lacks(rank, (group, round))
            }
            Self::Process(control, _) => control.has_left(rank, group, round),
        }
    }

    /// Sets the value of `key` for all ranks.
    pub(super) fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        match self {
            Self::Thread { values, .. } => {
                values.set(key, value);
                Ok(())
            }
            Self::Process(control, _) => control.set(key, value),
        }
    }

    /// Returns the value of `key`, which rank `from` sets. Waits for it, and fails if it cannot come any more.
    pub(super) fn get(&self, key: &str, from: usize) -> Result<Vec<u8>> {
        self.value(key, |world| world.has_returned(from).then_some(Cause::Returned { rank: from }))
    }

    /// Returns the value of `key`, which another rank sets even if its program has returned.
    pub(super) fn get_late(&self, key: &str) -> Result<Vec<u8>> {
        self.value(key, |_| None)
    }

    fn value(&self, key: &str, lost: impl Fn(&WorldState) -> Option<Cause>) -> Result<Vec<u8>> {
        let (world, values) = match self {
            Self::Thread { world, values, .. } => (world, values),
            Self::Process(control, _) => return control.get(key),
        };
        let began = Instant::now();
        let in_vain = || {
            if let Some(failure) = self.failure() {
                return Some(failure.cause.clone());
            }
            let late = || {
                let is_late = began.elapsed() >= self.timeout();
                is_late.then(|| Cause::TimedOut { rank: self.rank(), after: self.timeout() })
            };
            lost(world).or_else(late)
        };
        values.get(key, in_vain).map_err(|cause| self.fail(cause))
    }
}
