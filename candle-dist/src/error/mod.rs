//! What can go wrong, as values that are alike on every rank.
use crate::backend::Call;
use itertools::Itertools;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// The result of everything in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a process group, a mesh, or the tensor library under them.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The arguments of a call are wrong; no data was moved and the group stays usable.
    #[error("rank {rank}: {op}: {reason}")]
    InvalidArgument {
        /// The rank that made the call.
        rank: usize,
        /// The call.
        op: &'static str,
        /// What is wrong and how to mend it.
        reason: String,
    },
    /// The arguments of a call that concerns no group are wrong.
    #[error("{op}: {reason}")]
    Invalid {
        /// The call.
        op: &'static str,
        /// What is wrong and how to mend it.
        reason: String,
    },
    /// The ranks of a world no longer agree, or one of them is gone: the same value on every rank.
    #[error("{0}")]
    Group(Arc<GroupFailure>),
    /// A mesh was described or used wrongly; decided from arguments alone, so alike on every rank.
    #[error("device mesh: {0}")]
    Mesh(String),
    /// The processes of a world did not come together.
    #[error("init: {0}")]
    Init(String),
    /// This build or backend cannot do what was asked.
    #[error("unsupported: {0}")]
    Unsupported(String),
    /// candle refused an operation on local data. `Debug` prints candle's backtrace, where there is one.
    #[error("{}", without_trace(.0))]
    Candle(Arc<candle_core::Error>),
}

impl From<candle_core::Error> for Error {
    /// An error of this crate that went through candle, as in a backward pass, comes out as what it was.
    fn from(error: candle_core::Error) -> Self {
        carried(&error).unwrap_or_else(|| Self::Candle(Arc::new(error)))
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            // The trace of an error that others hold, too, stays with them.
            Error::Candle(error) => Arc::try_unwrap(error).unwrap_or_else(|error| Self::Msg(without_trace(&error))),
            error => Self::WrappedContext { wrapped: Box::new(Carried(error)), context: "in candle-dist".into() },
        }
    }
}

/// What an error of candle says, without the backtrace that it prints where `RUST_BACKTRACE` is set.
///
/// ```
/// use candle_core::{Error, Tensor};
/// use candle_dist::without_trace;
///
/// let error = Tensor::zeros(2, candle_core::DType::F32, &candle_core::Device::Cpu)?.reshape(3).unwrap_err();
/// assert_eq!(without_trace(&error).lines().count(), 1);
/// # Ok::<(), Error>(())
/// ```
pub fn without_trace(error: &candle_core::Error) -> String {
    use candle_core::Error::{Context, WithBacktrace, WithPath};
    match error {
        WithBacktrace { inner, .. } => without_trace(inner),
        Context { inner, context } => format!("{context}: {}", without_trace(inner)),
        WithPath { inner, path } => format!("path: {path:?} {}", without_trace(inner)),
        other => other.to_string(),
    }
}

/// A message without the backtrace that candle's errors print behind it.
pub(crate) fn cut_trace(message: &str) -> &str {
    const FIRST_FRAME: &str = "\n   0: ";
    message.find(FIRST_FRAME).map_or(message, |at| &message[..at])
}

/// An error on its way through candle, which prints the `Debug` form.
#[derive(thiserror::Error)]
#[error("{0}")]
struct Carried(Error);

impl fmt::Debug for Carried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The error of this crate that a candle error carries, if it does.
fn carried(error: &candle_core::Error) -> Option<Error> {
    match error {
        candle_core::Error::WithBacktrace { inner, .. }
        | candle_core::Error::Context { inner, .. }
        | candle_core::Error::WithPath { inner, .. } => carried(inner),
        candle_core::Error::WrappedContext { wrapped, .. } => Some(wrapped.downcast_ref::<Carried>()?.0.clone()),
        _ => None,
    }
}

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

#[cfg(test)]
mod tests {
    use super::{Error, cut_trace};
    use std::backtrace::Backtrace;

    /// An error as candle makes it where `RUST_BACKTRACE=1`.
    fn traced() -> candle_core::Error {
        let inner = candle_core::Error::Msg("no such dim".into());
        let traced = |inner| candle_core::Error::WithBacktrace {
            inner: Box::new(inner),
            backtrace: Box::new(Backtrace::force_capture()),
        };
        traced(traced(inner).context("in a layer"))
    }

    #[test]
    fn an_error_of_candle_is_one_sentence_and_keeps_its_trace_for_debug() {
        let error = Error::from(traced());
        assert_eq!(error.to_string(), "in a layer: no such dim");
        assert!(format!("{error:?}").lines().count() > 3, "{error:?}");
        // Through candle and back.
        let back = Error::from(candle_core::Error::from(error.clone()));
        assert_eq!(back.to_string(), "in a layer: no such dim");
        let text = traced().to_string();
        assert!(text.lines().count() > 3 && cut_trace(&text).lines().count() <= 2, "{text}");
    }
}
