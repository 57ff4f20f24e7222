//! How much goes into one message.
use crate::error::End;

/// The most counts of rounds in one message, which then has less than 1 MiB.
pub(super) const MAX_ROUNDS: usize = 16 << 10;
/// The longest message of an error, in bytes.
pub(super) const MAX_MESSAGE: usize = 16 << 10;
/// The longest text of what a rank is doing, in bytes: those of thousands of ranks go into one message.
pub(super) const MAX_STATE: usize = 1 << 10;

/// A text of at most `limit` bytes and a mark that it was longer.
pub(super) fn clipped(mut text: String, limit: usize) -> String {
    if text.len() > limit {
        let end = (0..=limit).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
    text
}

impl End {
    /// The end with a message of at most `limit` bytes.
    pub(super) fn clipped(self, limit: usize) -> Self {
        match self {
            Self::Returned => Self::Returned,
            Self::Failed(message) => Self::Failed(clipped(message, limit)),
            Self::Panicked(message) => Self::Panicked(clipped(message, limit)),
        }
    }
}
