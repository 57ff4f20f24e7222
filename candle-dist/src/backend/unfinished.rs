//! Calls that were started.
use super::fresh::Results;
use crate::Result;
use std::time::Duration;

/// A collective or a message that was started; dropping it gives the result up, and lets the other ranks go on.
pub trait Unfinished: Send {
    /// Whether [`finish`](Self::finish) would return without waiting for another rank.
    fn is_ready(&self) -> Result<bool>;
    /// Waits for the other ranks and returns the results.
    fn finish(self: Box<Self>) -> Result<Results>;
    /// Sets how long [`finish`](Self::finish) may wait. Returns `false` where the engine cannot bound one wait; the
    /// caller then asks [`is_ready`](Self::is_ready) until the time is over.
    fn set_timeout(&mut self, _: Duration) -> bool {
        false
    }
}
