//! Why a world stopped.
use super::printable;
use crate::call::Call;
use itertools::Itertools;
use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Why a world stopped, and what each of its ranks was doing at that time.
#[derive(Debug, Clone)]
pub struct GroupFailure {
    /// The first thing that went wrong.
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
        /// The property that differs, such as the op, dtype, shape, root, dim, sizes or reduction.
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
        /// The error message.
        message: String,
    },
    /// A rank panicked.
    Panicked {
        /// The rank that panicked.
        rank: usize,
        /// The panic message.
        message: String,
    },
    /// The process of a rank is gone or cannot be reached.
    Lost {
        /// The rank of that process.
        rank: usize,
        /// How the loss was noticed.
        how: String,
    },
    /// Every running rank waits for another one, so no call can complete.
    Deadlock,
    /// A rank waited longer than the world's timeout.
    TimedOut {
        /// The rank that timed out.
        rank: usize,
        /// How long it waited.
        after: Duration,
    },
    /// Two threads of a rank made calls on one group at the same time, whose order is then a matter of luck.
    Concurrent {
        /// The rank of the threads.
        rank: usize,
        /// The source locations of the calls, as `file:line`.
        sites: [String; 2],
    },
    /// Some ranks did not reach a monitored barrier in time.
    Missing {
        /// All ranks that did not reach the barrier (global).
        ranks: Vec<usize>,
        /// How long the others waited.
        after: Duration,
    },
}

/// What one rank was doing when its world stopped.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RankReport {
    /// The rank in the world.
    pub rank: usize,
    /// The state of the rank.
    pub doing: RankStatus,
}

/// The state of a rank, as seen from its communication.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum RankStatus {
    /// The rank is in this communication call.
    In(Arc<Call>),
    /// The rank runs its own code. This is the last call that it completed, if any.
    Running(Option<Arc<Call>>),
    /// The rank returned.
    Returned,
    /// The rank returned an error.
    Failed(String),
    /// The rank panicked.
    Panicked(String),
    /// The rank is another process. This is its own description of one of the states above.
    Says(String),
    /// The process of the rank is gone or cannot be reached.
    Lost(String),
    /// The process of the rank did not answer in time.
    Silent,
}

/// The former name of [`RankStatus`].
#[deprecated(since = "0.1.0", note = "renamed to RankStatus")]
pub type Doing = RankStatus;

impl Cause {
    /// Returns the rank that the cause names, or the first one that is missing.
    ///
    /// After a mismatch it is a rank whose call differs from that of the group's first member, and either may be wrong.
    /// Ranks that wait for each other or too long are no culprits.
    ///
    /// ```
    /// use candle_dist::Cause;
    ///
    /// assert_eq!(Cause::Returned { rank: 3 }.culprit(), Some(3));
    /// assert_eq!(Cause::Deadlock.culprit(), None);
    /// ```
    pub fn culprit(&self) -> Option<usize> {
        match self {
            Self::Mismatch { rank, .. } | Self::Returned { rank } => Some(*rank),
            Self::Failed { rank, .. } | Self::Panicked { rank, .. } | Self::Lost { rank, .. } => Some(*rank),
            Self::Concurrent { rank, .. } => Some(*rank),
            Self::Missing { ranks, .. } => ranks.first().copied(),
            Self::Deadlock | Self::TimedOut { .. } => None,
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mismatch { rank, reference, what } => write!(
                f,
                "rank {rank} and rank {reference} made different calls ({what} differs); every rank of a group must make the same calls in the same order"
            ),
            Self::Returned { rank } => write!(f, "rank {rank} returned while other ranks wait for it"),
            Self::Failed { rank, message } => write!(f, "rank {rank} failed: {}", printable(message)),
            Self::Panicked { rank, message } => write!(f, "rank {rank} panicked: {}", printable(message)),
            Self::Lost { rank, how } => write!(f, "rank {rank} was lost: {}", printable(how)),
            Self::Concurrent { rank, sites: [first, second] } => write!(
                f,
                "rank {rank} made two calls on one group at the same time, at {first} and at {second}; give each thread a group of its own (ProcessGroup::subgroup), or let one call end before the next one begins"
            ),
            Self::Deadlock => write!(f, "every running rank waits for another one; no call can complete"),
            Self::TimedOut { rank, after } => {
                write!(f, "rank {rank} waited longer than the timeout of {after:?}")
            }
            Self::Missing { ranks, after } => {
                let (noun, list) =
                    (if ranks.len() == 1 { "rank" } else { "ranks" }, ranks.iter().format(", "));
                write!(f, "{noun} {list} did not come to the barrier within {after:?}")
            }
        }
    }
}

fn first_line(message: &str) -> Cow<'_, str> {
    printable(message.lines().next().unwrap_or(""))
}

impl fmt::Display for RankReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}: ", self.rank)?;
        match &self.doing {
            RankStatus::In(call) => write!(f, "in {call}"),
            RankStatus::Running(Some(call)) => write!(f, "running, last completed {call}"),
            RankStatus::Running(None) => write!(f, "running, no call yet"),
            RankStatus::Returned => write!(f, "returned"),
            RankStatus::Failed(message) => write!(f, "returned an error: {}", first_line(message)),
            RankStatus::Panicked(message) => write!(f, "panicked: {}", first_line(message)),
            RankStatus::Says(state) => f.write_str(&printable(state)),
            RankStatus::Lost(how) => write!(f, "lost: {}", printable(how)),
            RankStatus::Silent => write!(f, "no answer"),
        }
    }
}

impl fmt::Display for GroupFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n  {}", self.cause, self.ranks.iter().format("\n  "))
    }
}
