//! Limits on the size of one message.
use crate::error::End;

/// The maximum number of round counts in one message, which keeps it below 1 MiB.
pub(super) const MAX_ROUNDS: usize = 16 << 10;
/// The maximum length of an error message, in bytes.
pub(super) const MAX_MESSAGE: usize = 16 << 10;
/// The maximum length of a rank's report, in bytes. One message holds the reports of thousands of ranks.
pub(super) const MAX_STATE: usize = 1 << 10;

/// Cuts a text to at most `limit` bytes and marks the cut.
pub(super) fn clipped(mut text: String, limit: usize) -> String {
    if text.len() > limit {
        let end = (0..=limit).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
    text
}

impl End {
    /// Cuts the error message to at most `limit` bytes.
    pub(super) fn clipped(self, limit: usize) -> Self {
        match self {
            Self::Returned => Self::Returned,
            Self::Failed(message) => Self::Failed(clipped(message, limit)),
            Self::Panicked(message) => Self::Panicked(clipped(message, limit)),
        }
    }
}
