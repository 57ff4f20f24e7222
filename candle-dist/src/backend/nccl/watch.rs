//! What a rank knows of its world beside the data: failures, what the others are in, and small values.
use crate::backend::Call;
use crate::backend::local::WorldState;
use crate::control::{Control, Entered};
use crate::{Cause, Error, GroupFailure, Result};
use parking_lot::{Condvar, Mutex};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often somebody who waits looks whether the world has failed.
const TICK: Duration = Duration::from_millis(20);

/// One rank's view of its world: threads of this process, or processes.
pub(crate) enum Watch {
    /// The rank is a thread.
    Thread {
        /// What the threads share.
        world: Arc<WorldState>,
        /// What they tell each other.
        values: Arc<Values>,
        /// This one.
        rank: usize,
    },
    /// The rank is this process.
    Process(Arc<Control>),
}

/// Values that threads give each other by name.
#[derive(Debug, Default)]
pub(crate) struct Values {
    known: Mutex<HashMap<String, Vec<u8>>>,
    changed: Condvar,
}

/// A rank is in a call until this is dropped.
pub(super) enum Inside<'a> {
    Thread(&'a WorldState, usize),
    Process(#[expect(dead_code, reason = "held for its drop")] Entered<'a>),
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        if let Self::Thread(world, rank) = self {
            world.complete(*rank);
        }
    }
}

impl Watch {
    /// This rank in the world.
    pub(super) fn rank(&self) -> usize {
        match self {
            Self::Thread { rank, .. } => *rank,
            Self::Process(control) => control.rank(),
        }
    }

    /// How long a rank may wait in one call.
    pub(super) fn timeout(&self) -> Duration {
        match self {
            Self::Thread { world, .. } => world.timeout(),
            Self::Process(control) => control.timeout(),
        }
    }

    /// The failure that stopped the world, if one did.
    pub(super) fn failure(&self) -> Option<Arc<GroupFailure>> {
        match self {
            Self::Thread { world, .. } => world.failure(),
            Self::Process(control) => control.failure(),
        }
    }

    /// An error if the world has stopped.
    pub(super) fn check(&self) -> Result<()> {
        self.failure().map_or(Ok(()), |failure| Err(Error::Group(failure)))
    }

    /// Stops the world; the first cause wins and is what every rank gets.
    pub(super) fn fail(&self, cause: Cause) -> Error {
        match self {
            Self::Thread { world, .. } => world.fail(cause),
            Self::Process(control) => control.fail(cause),
        }
    }

    /// Stops the world because this rank cannot go on.
    pub(super) fn fail_with(&self, message: String) -> Error {
        self.fail(Cause::Failed { rank: self.rank(), message })
    }

    /// Stops the world because this rank has waited too long.
    pub(super) fn time_out(&self) -> Error {
        self.fail(Cause::TimedOut { rank: self.rank(), after: self.timeout() })
    }

    /// Notes that this rank is in a call, until the guard is dropped.
    pub(super) fn enter(&self, group: u64, ranks: &[usize], round: u64, call: &Arc<Call>) -> Result<Inside<'_>> {
        match self {
            Self::Thread { world, rank, .. } => {
                world.check()?;
                world.begin(*rank, call.clone());
                Ok(Inside::Thread(world, *rank))
            }
            Self::Process(control) => Ok(Inside::Process(control.enter(group, ranks, round, call)?)),
        }
    }

    /// Gives all ranks the `value` of `key`.
    pub(super) fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        match self {
            Self::Thread { values, .. } => {
                values.known.lock().insert(key.to_string(), value.to_vec());
                values.changed.notify_all();
                Ok(())
            }
            Self::Process(control) => control.set(key, value),
        }
    }

    /// The value of `key`, which rank `from` sets: waits for it, or for the reason why it will not come.
    pub(super) fn get(&self, key: &str, from: usize) -> Result<Vec<u8>> {
        let (world, values) = match self {
            Self::Thread { world, values, .. } => (world, values),
            Self::Process(control) => return control.get(key),
        };
        let began = Instant::now();
        let mut known = values.known.lock();
        loop {
            // A rank's last act before its end may be to set it: so first its end, then the value.
            let gone = world.has_returned(from);
            if let Some(value) = known.get(key) {
                return Ok(value.clone());
            }
            self.check()?;
            if gone {
                drop(known);
                return Err(self.fail(Cause::Returned { rank: from }));
            }
            if began.elapsed() >= self.timeout() {
                drop(known);
                return Err(self.time_out());
            }
            values.changed.wait_for(&mut known, TICK);
        }
    }
}
