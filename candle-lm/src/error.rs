//! What goes wrong: an input that cannot work, or something that was tried and failed.

use std::fmt;

/// An input cannot work: one sentence that says what the caller should change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputError(pub String);

impl fmt::Display for InputError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for InputError {}

/// An error of [`Lm`](crate::Lm).
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The caller should change something: the sentence says what.
    #[error(transparent)]
    Input(#[from] InputError),
    /// Something was tried and failed: files that cannot be read or run, ranks that do not answer. The text has the causes.
    #[error("{0:#}")]
    Failed(anyhow::Error),
}

/// The outcome of a call of [`Lm`](crate::Lm).
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl From<anyhow::Error> for Error {
    fn from(error: anyhow::Error) -> Self {
        // The causes are a part of the sentence.
        if error.is::<InputError>() {
            Self::Input(InputError(format!("{error:#}")))
        } else {
            Self::Failed(error)
        }
    }
}

impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        Self::Failed(error.into())
    }
}

impl From<candle_dist::Error> for Error {
    fn from(error: candle_dist::Error) -> Self {
        Self::Failed(error.into())
    }
}

impl From<candle_shard::Error> for Error {
    fn from(error: candle_shard::Error) -> Self {
        Self::Failed(error.into())
    }
}

/// The outcome of a check of an input.
pub(crate) type InputResult<T = ()> = std::result::Result<T, InputError>;

/// Fails with the formatted sentence unless the condition holds.
macro_rules! require {
    ($condition:expr, $($sentence:tt)+) => {
        if $condition {
        } else {
            return Err($crate::error::InputError(format!($($sentence)+)));
        }
    };
}
pub(crate) use require;
