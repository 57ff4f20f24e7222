//! How ranks end.
use super::failure::Cause;
use serde::{Deserialize, Serialize};

/// How a rank ended.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum End {
    Returned,
    Failed(String),
    Panicked(String),
}

impl End {
    /// Returns how the current thread ends, if its rank reported nothing.
    pub(crate) fn of_thread() -> Self {
        if std::thread::panicking() {
            Self::Panicked("(see the panic above)".to_string())
        } else {
            Self::Returned
        }
    }

    /// Returns why the world stops, if this end stops it at once. A plain return only fails ranks that wait for it.
    pub(crate) fn cause(&self, rank: usize) -> Option<Cause> {
        match self {
            Self::Returned => None,
            Self::Failed(message) => Some(Cause::Failed { rank, message: message.clone() }),
            Self::Panicked(message) => Some(Cause::Panicked { rank, message: message.clone() }),
        }
    }
}
