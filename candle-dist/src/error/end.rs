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
    /// How a rank ends whose thread says nothing of it.
    pub(crate) fn of_thread() -> Self {
        if std::thread::panicking() { Self::Panicked("(see the panic above)".to_string()) } else { Self::Returned }
    }

    /// Why the world stops, if this stops it at once; a plain return only stops those who wait for the rank.
    pub(crate) fn cause(&self, rank: usize) -> Option<Cause> {
        match self {
            Self::Returned => None,
            Self::Failed(message) => Some(Cause::Failed { rank, message: message.clone() }),
            Self::Panicked(message) => Some(Cause::Panicked { rank, message: message.clone() }),
        }
    }
}
