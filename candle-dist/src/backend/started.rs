//! Started calls.
use super::fresh::Results;
use crate::Result;
use std::time::Duration;

/// A started collective or message. Dropping it discards the result, and lets the other ranks continue.
pub trait StartedCall: Send {
    /// Returns whether [`finish`](Self::finish) would return without waiting for another rank.
    fn is_ready(&self) -> Result<bool>;
    /// Waits for the other ranks and returns the results.
    fn finish(self: Box<Self>) -> Result<Results>;
    /// Sets how long [`finish`](Self::finish) may wait. Returns `false` if the backend cannot limit a single wait; the
    /// caller then polls [`is_ready`](Self::is_ready) until the timeout.
    fn set_timeout(&mut self, _: Duration) -> bool {
        false
    }
}
