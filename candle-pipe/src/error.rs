//! Errors, derived from data that all ranks have, so that all ranks fail alike.
use crate::action::{Action, Compute, Pass};
use std::sync::Arc;

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a pipeline.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Communication failed.
    #[error(transparent)]
    Dist(#[from] candle_dist::Error),
    /// A sharded layer or tensor in a stage failed.
    #[cfg(feature = "shard")]
    #[error(transparent)]
    Shard(#[from] candle_shard::Error),
    /// candle refused an operation. `Debug` prints candle's backtrace, if there is one.
    #[error("{}", candle_dist::without_trace(.0))]
    Candle(Arc<candle_core::Error>),
    /// A value of an unexpected kind.
    #[error("value: {0}")]
    Value(String),
    /// Values that cannot be cut into microbatches or joined again.
    #[error("microbatches: {0}")]
    Microbatches(String),
    /// A model that is not a valid pipeline, or cannot be cut as requested.
    #[error("pipe: {0}")]
    Pipe(String),
    /// A node of a model failed.
    #[error("node {node:?}: {error}")]
    Node {
        /// The node's full name.
        node: String,
        /// The error in it.
        error: Box<Error>,
    },
    /// An action of a rank failed.
    #[error("rank {rank}: {action}: {error}")]
    Action {
        /// The rank of the world.
        rank: usize,
        /// The action, with stage and microbatch.
        action: String,
        /// The error in it.
        error: Box<Error>,
    },
    /// A schedule that is invalid or does not fit.
    #[error("schedule: {0}")]
    Schedule(String),
}

impl Error {
    /// Adds the rank and the action to an error; failures of the whole group name theirs already.
    pub(crate) fn in_action(self, rank: usize, action: &Action) -> Self {
        let what = action.computes().iter().map(|compute| {
            let Compute { stage, pass, microbatch } = compute;
            let pass = match pass {
                Pass::Forward => "forward",
                Pass::Backward => "backward",
                Pass::Input => "backward for inputs",
                Pass::Weight => "backward for weights",
            };
            format!(" (stage {stage}, {pass} of microbatch {microbatch})")
        });
        match self {
            Self::Dist(error @ candle_dist::Error::Group(_)) => Self::Dist(error),
            error => Self::Action {
                rank,
                action: format!("{action}{}", what.collect::<String>()),
                error: Box::new(error),
            },
        }
    }

    /// Returns the error without the rank and the action, for a process that runs all of them.
    pub(crate) fn out_of_action(self) -> Self {
        match self {
            Self::Action { error, .. } => *error,
            error => error,
        }
    }

    /// Adds the name of the node to an error; failures of the whole group are unchanged.
    pub(crate) fn at_node(self, node: &str) -> Self {
        match self {
            Self::Dist(error @ candle_dist::Error::Group(_)) => Self::Dist(error),
            error => Self::Node { node: node.to_owned(), error: Box::new(error) },
        }
    }
}

impl From<candle_core::Error> for Error {
    /// Restores the type of a communication error that passed through candle.
    fn from(error: candle_core::Error) -> Self {
        match candle_dist::Error::from(error) {
            candle_dist::Error::Candle(error) => Self::Candle(error),
            error => Self::Dist(error),
        }
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Dist(error) => error.into(),
            error => Self::wrap(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Error;
    use std::backtrace::Backtrace;

    #[test]
    fn an_error_of_candle_is_one_sentence_and_keeps_its_trace_for_debug() {
        // As candle makes it with `RUST_BACKTRACE=1`.
        let traced = candle_core::Error::WithBacktrace {
            inner: Box::new(candle_core::Error::Msg("no such dim".into())),
            backtrace: Box::new(Backtrace::force_capture()),
        };
        assert!(traced.to_string().lines().count() > 3);
        let error = Error::from(traced);
        assert_eq!(error.to_string(), "no such dim");
        assert!(format!("{error:?}").lines().count() > 3, "{error:?}");
        let at = error.at_node("layers.0");
        assert_eq!(at.to_string(), "node \"layers.0\": no such dim");
    }
}
