//! What calls come after on the GPU, and how long they may wait for other ranks.
use crate::Result;
use crate::backend::cuda::driver;
use cudarc::driver::{CudaEvent, CudaStream};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// What a call comes after on the GPU.
#[derive(Default)]
pub(super) struct PriorWork {
    pub(super) events: Arc<Vec<CudaEvent>>,
    /// The streams that also wait for a call that fails.
    pub(super) streams: Vec<Arc<CudaStream>>,
}

impl PriorWork {
    /// Returns the present work of streams.
    pub(super) fn on(streams: &[Arc<CudaStream>]) -> Result<Self> {
        let events = streams.iter().map(|stream| stream.record_event(None)).collect::<Result<_, _>>();
        Ok(Self { events: Arc::new(events.map_err(driver)?), streams: streams.to_vec() })
    }

    pub(super) fn of(event: CudaEvent) -> Self {
        Self { events: Arc::new(vec![event]), streams: Vec::new() }
    }
}

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
