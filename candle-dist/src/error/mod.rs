//! Errors, which are equal on every rank.
//!
#![doc = include_str!("README.md")]

mod end;
mod failure;
mod printable;

pub(crate) use end::End;
#[allow(deprecated)]
pub use failure::Doing;
pub use failure::{Cause, GroupFailure, RankReport, RankStatus};
pub use printable::printable;

use std::fmt;
use std::sync::Arc;

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a process group, a mesh, or candle.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The arguments of a call are wrong. No data was moved, and the group stays usable.
    #[error("rank {rank}: {op}: {reason}")]
    InvalidArgument {
        /// The rank that made the call.
        rank: usize,
        /// The name of the call.
        op: &'static str,
        /// What is wrong and how to fix it.
        reason: String,
    },
    /// The arguments of a call outside of any group are wrong.
    #[error("{op}: {reason}")]
    Invalid {
        /// The name of the call.
        op: &'static str,
        /// What is wrong and how to fix it.
        reason: String,
    },
    /// The world stopped, because its ranks disagree or one of them ended. The value is the same on every rank.
    #[error("{0}")]
    Group(Arc<GroupFailure>),
    /// A mesh was described or used wrongly. Arguments alone decide this, so all ranks get the same error.
    #[error("device mesh: {0}")]
    Mesh(String),
    /// The processes of a world could not start it.
    #[error("init: {0}")]
    Init(String),
    /// The processes of a world could not start it. Rank 0 has told all of them the reason.
    #[error("init: {0}")]
    NotStarted(String),
    /// This process could not reach rank 0, or rank 0 did not let it in. The others of its host may have the same error.
    #[error("init: {0}")]
    Unreachable(String),
    /// This build or backend does not support the request.
    #[error("unsupported: {0}")]
    Unsupported(String),
    /// A candle operation on local data failed. `Debug` prints candle's backtrace if there is one.
    #[error("{}", without_trace(.0))]
    Candle(Arc<candle_core::Error>),
}

impl From<candle_core::Error> for Error {
    /// Converts the error. An error of this crate that passed through candle comes back unchanged.
    fn from(error: candle_core::Error) -> Self {
        carried(&error).unwrap_or_else(|| Self::Candle(Arc::new(error)))
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            // If others hold the error too, they keep its backtrace.
            Error::Candle(error) => {
                Arc::try_unwrap(error).unwrap_or_else(|error| Self::Msg(without_trace(&error)))
            }
            error => Self::WrappedContext {
                wrapped: Box::new(ErrorCarrier(error)),
                context: "in candle-dist".into(),
            },
        }
    }
}

/// Returns the message of a candle error without the backtrace that candle adds when `RUST_BACKTRACE` is set.
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

/// Removes the backtrace that candle appends to its messages.
pub(crate) fn cut_trace(message: &str) -> &str {
    const FIRST_FRAME: &str = "\n   0: ";
    message.find(FIRST_FRAME).map_or(message, |at| &message[..at])
}

/// An error of this crate that passes through candle, which prints it with `Debug`.
#[derive(thiserror::Error)]
#[error("{0}")]
struct ErrorCarrier(Error);

impl fmt::Debug for ErrorCarrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Returns the error of this crate inside a candle error, if there is one.
fn carried(error: &candle_core::Error) -> Option<Error> {
    match error {
        candle_core::Error::WithBacktrace { inner, .. }
        | candle_core::Error::Context { inner, .. }
        | candle_core::Error::WithPath { inner, .. } => carried(inner),
        candle_core::Error::WrappedContext { wrapped, .. } => {
            Some(wrapped.downcast_ref::<ErrorCarrier>()?.0.clone())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::{Error, cut_trace};
    use std::backtrace::Backtrace;

    /// Returns an error as candle makes it with `RUST_BACKTRACE=1`.
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
        // Convert to a candle error and back.
        let back = Error::from(candle_core::Error::from(error.clone()));
        assert_eq!(back.to_string(), "in a layer: no such dim");
        let text = traced().to_string();
        assert!(text.lines().count() > 3 && cut_trace(&text).lines().count() <= 2, "{text}");
    }
}
