//! Errors, derived from global metadata so that every rank fails alike.
use candle_dist::without_trace;
use std::panic::Location;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a distributed tensor, an op, a layer or a plan.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Communication failed, or a mesh was used wrongly.
    #[error(transparent)]
    Dist(#[from] candle_dist::Error),
    /// candle refused an operation on a local shard. `Debug` prints candle's backtrace, if there is one.
    #[error("{}", without_trace(.0))]
    Candle(Arc<candle_core::Error>),
    /// Arguments that an op does not support.
    #[error("{op}: {reason}")]
    Op {
        /// The op.
        op: &'static str,
        /// The shapes or placements that do not fit, and how to fix them.
        reason: String,
    },
    /// Placements that do not describe a layout of the tensor on the mesh.
    #[error("layout: {0}")]
    Layout(String),
    /// A parallelization plan that does not fit the model or the mesh.
    #[error("plan: {0}")]
    Plan(String),
    /// A file that is missing, damaged, or does not have the expected content.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The tensor that does not fit, and how to fix it.
        reason: String,
    },
}

impl Error {
    pub(crate) fn op<T>(op: &'static str, reason: impl Into<String>) -> Result<T> {
        Err(Self::Op { op, reason: reason.into() })
    }

    /// Names the line of the program in an error of an op.
    pub(crate) fn called_at(self, site: &Location<'_>) -> Self {
        let at = format!("{}:{}", site.file(), site.line());
        match self {
            Self::Op { op, reason } if !reason.contains(&at) => {
                Self::Op { op, reason: format!("{reason}, called at {at}") }
            }
            error => error,
        }
    }

    /// Names a layer and the line of the program in an error of one of the layer's ops.
    pub(crate) fn in_layer(self, path: &str, site: &Location<'_>) -> Self {
        match self.called_at(site) {
            Self::Op { op, reason } if !path.is_empty() => {
                Self::Op { op, reason: format!("{reason}, in layer {path}") }
            }
            error => error,
        }
    }

    pub(crate) fn file(path: impl AsRef<Path>, reason: impl Into<String>) -> Self {
        Self::File { path: path.as_ref().into(), reason: reason.into() }
    }
}

impl From<candle_core::Error> for Error {
    /// Restores the type of a communication error that passed through candle, as in a backward pass.
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
