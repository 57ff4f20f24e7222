//! The lanes of a rank, of all its groups: the end of the rank closes them and waits for their messages.
use super::limit::LaneStatus;
use super::rank::PendingCall;
use crate::{Error, Result};
use candle_core::Tensor;
use cudarc::driver::CudaEvent;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::Instant;

/// A message for the courier of a lane.
pub(super) struct CourierMessage {
    pub(super) tensor: Tensor,
    /// Marks when the data is ready.
    pub(super) ready: CudaEvent,
    /// Until it is enqueued.
    pub(super) unsent: PendingCall,
}

/// What closes a lane. Its rank keeps it until all messages are delivered or dropped.
pub(super) struct LaneEnd {
    /// `None` after it is closed.
    queue: Mutex<Option<Sender<CourierMessage>>>,
    courier: Mutex<Option<JoinHandle<()>>>,
    sending: Arc<LaneStatus>,
}

impl LaneEnd {
    pub(super) fn new(
        queue: Sender<CourierMessage>,
        courier: JoinHandle<()>,
        sending: Arc<LaneStatus>,
    ) -> Self {
        Self { queue: Mutex::new(Some(queue)), courier: Mutex::new(Some(courier)), sending }
    }

    /// Hands a message to the courier. Returns whether it takes messages.
    pub(super) fn push(&self, message: CourierMessage) -> bool {
        self.queue.lock().as_ref().is_some_and(|queue| queue.send(message).is_ok())
    }

    /// Closes the lane, without waiting. The courier still delivers its messages, unless the world fails.
    pub(super) fn close(&self) {
        let _ = self.sending.closed.set(Instant::now());
        *self.queue.lock() = None;
    }

    /// Returns whether the courier has ended.
    fn is_over(&self) -> bool {
        self.courier.lock().as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until the courier has ended.
    fn join(&self) {
        let courier = self.courier.lock().take();
        // It reports its own errors.
        let _ = courier.map(JoinHandle::join);
    }
}

/// The sending ends of a rank's lanes.
#[derive(Default)]
pub(super) struct LaneSet(Mutex<LaneState>);

#[derive(Default)]
struct LaneState {
    ends: Vec<Arc<LaneEnd>>,
    /// Whether the rank has ended.
    is_over: bool,
}

/// Returns the error of a send after the end.
fn over() -> Error {
    Error::Unsupported("a send of a rank that has ended; send before the rank returns".to_string())
}

impl LaneSet {
    /// Returns an error if the rank has ended.
    pub(super) fn check(&self) -> Result<()> {
        if self.0.lock().is_over { Err(over()) } else { Ok(()) }
    }

    /// Keeps a lane until its messages are delivered. Closes it if the rank has ended.
    pub(super) fn keep(&self, end: &Arc<LaneEnd>) -> Result<()> {
        let mut state = self.0.lock();
        if state.is_over {
            end.close();
            return Err(over());
        }
        state.ends.push(end.clone());
        Ok(())
    }

    /// Forgets lanes whose couriers have ended.
    pub(super) fn tidy(&self) {
        self.0.lock().ends.retain(|end| !end.is_over());
    }

    /// Closes all lanes, and waits until their messages are delivered or dropped.
    pub(super) fn end(&self) {
        let ends = {
            let mut state = self.0.lock();
            state.is_over = true;
            std::mem::take(&mut state.ends)
        };
        // All are closed first, so that their waits overlap. None is waited for under a lock.
        ends.iter().for_each(|end| end.close());
        ends.iter().for_each(|end| end.join());
    }
}
