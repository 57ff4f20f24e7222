//! What can go wrong, as values that are alike on every rank.
mod end;
mod failure;

pub(crate) use end::End;
pub use failure::{Cause, Doing, GroupFailure, RankReport};

use std::fmt;
use std::sync::Arc;

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
