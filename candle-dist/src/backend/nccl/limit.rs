//! How long calls may wait for other ranks.
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// How long a call may wait for other ranks.
pub(super) enum Limit {
    /// For the timeout of the world, which then ends.
    Timeout,
    /// Until the receiver takes it. After the sender has closed its end, for the timeout, or until the receiver has
    /// returned without it; the message is then dropped. Nobody waits in a send, so the world goes on.
    Send(Arc<LaneStatus>),
}

/// What the ends of a lane know about its messages.
pub(super) struct LaneStatus {
    pub(super) channel: u64,
    /// The receiver, as a rank of the world.
    pub(super) to: usize,
    /// When the sender has closed its end.
    pub(super) closed: OnceLock<Instant>,
    /// Whether messages were dropped, because nobody will receive them.
    pub(super) dropped: AtomicBool,
}

impl LaneStatus {
    pub(super) fn new(channel: u64, to: usize) -> Arc<Self> {
        Arc::new(Self { channel, to, closed: OnceLock::new(), dropped: AtomicBool::new(false) })
    }
}
