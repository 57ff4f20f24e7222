//! Why a world stopped.
use crate::call::Call;
use itertools::Itertools;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Why a world stopped, and what each of its ranks was doing then.
#[derive(Debug, Clone)]
pub struct GroupFailure {
    /// What happened first.
    pub cause: Cause,
    /// One entry for every rank of the world, in rank order.
    pub ranks: Vec<RankReport>,
}

/// The first thing that went wrong in a world.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cause {
    /// Two ranks of a group made different calls in the same round.
    Mismatch {
        /// A rank (global) whose call differs from the first member's.
        rank: usize,
        /// The first member of the group (global).
        reference: usize,
        /// What differs: the op, dtype, shape, root, dim, sizes or reduction.
        what: &'static str,
    },
    /// A rank ended while others waited for it.
    Returned {
        /// The rank that ended.
        rank: usize,
    },
    /// A rank ended with an error while others waited for it.
    Failed {
        /// The rank that failed.
        rank: usize,
        /// Its error.
        message: String,
    },
    /// A rank panicked.
    Panicked {
        /// The rank that panicked.
        rank: usize,
        /// The panic's message.
        message: String,
    },
    /// A rank's process is gone, or can no longer be reached.
    Lost {
        /// The rank whose process it was.
        rank: usize,
        /// How that showed.
        how: String,
    },
    /// Every rank that still runs waits for another: no call can ever complete.
    Deadlock,
    /// A rank waited longer than the world's timeout.
    TimedOut {
        /// The rank that gave up.
        rank: usize,
        /// How long it waited.
        after: Duration,
    },
    /// Ranks did not come to a monitored barrier in time.
    Missing {
        /// All that did not come (global).
        ranks: Vec<usize>,
        /// How long the others waited.
        after: Duration,
    },
}

/// What one rank was doing when its world stopped.
#[derive(Debug, Clone)]
pub struct RankReport {
    /// The rank, counted in the world.
    pub rank: usize,
    /// Its state.
    pub doing: Doing,
}

/// The state of a rank, as far as its communication shows it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Doing {
    /// It is inside this communication call.
    In(Arc<Call>),
    /// It runs code of its own; this is the last call that it completed, if any.
    Running(Option<Arc<Call>>),
    /// It returned.
    Returned,
    /// It returned an error.
    Failed(String),
    /// It panicked.
    Panicked(String),
    /// Where ranks are processes: what it says of itself, in the words of the states above.
    Says(String),
    /// Its process is gone, or can no longer be reached.
    Lost(String),
    /// Its process did not answer in time.
    Silent,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mismatch { rank, reference, what } => write!(
                f,
                "rank {rank} and rank {reference} made different calls ({what} differs); every rank of a group must make the same calls in the same order"
            ),
            Self::Returned { rank } => write!(f, "rank {rank} returned while other ranks wait for it"),
            Self::Failed { rank, message } => write!(f, "rank {rank} failed: {message}"),
            Self::Panicked { rank, message } => write!(f, "rank {rank} panicked: {message}"),
            Self::Lost { rank, how } => write!(f, "rank {rank} was lost: {how}"),
            Self::Deadlock => write!(f, "every running rank waits for another one; no call can complete"),
            Self::TimedOut { rank, after } => write!(f, "rank {rank} waited longer than the timeout of {after:?}"),
            Self::Missing { ranks, after } => {
                let (noun, list) = (if ranks.len() == 1 { "rank" } else { "ranks" }, ranks.iter().format(", "));
                write!(f, "{noun} {list} did not come to the barrier within {after:?}")
            }
        }
    }
}

impl fmt::Display for RankReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}: ", self.rank)?;
        match &self.doing {
            Doing::In(call) => write!(f, "in {call}"),
            Doing::Running(Some(call)) => write!(f, "running, last completed {call}"),
            Doing::Running(None) => write!(f, "running, no call yet"),
            Doing::Returned => write!(f, "returned"),
            Doing::Failed(message) => write!(f, "returned an error: {}", message.lines().next().unwrap_or("")),
            Doing::Panicked(message) => write!(f, "panicked: {}", message.lines().next().unwrap_or("")),
            Doing::Says(state) => f.write_str(state),
            Doing::Lost(how) => write!(f, "lost: {how}"),
            Doing::Silent => write!(f, "no answer"),
        }
    }
}

impl fmt::Display for GroupFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n  {}", self.cause, self.ranks.iter().format("\n  "))
    }
}
