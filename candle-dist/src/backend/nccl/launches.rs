//! Calls that a thread of their own enqueues.
//!
//! NCCL connects two ranks that exchange data directly in their first call that does so, and that call waits for both. A call that is
//! only started must not wait, or ranks that start calls of two groups in unlike orders would wait for each other.
use super::transfer::DoneEvent;
use crate::{Error, Result};
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;

/// A call that is enqueued, or that will be.
pub(super) enum CallLaunch {
    Enqueued(DoneEvent),
    Later(Arc<LaterLaunch>),
}

impl CallLaunch {
    /// Returns the end of the call on the GPU, once it is enqueued.
    pub(super) fn wait(self) -> Result<DoneEvent> {
        match self {
            Self::Enqueued(done) => Ok(done),
            Self::Later(later) => later.take(),
        }
    }

    /// Returns whether the call is enqueued, and the GPU has reached its end.
    pub(super) fn is_complete(&self) -> Result<bool> {
        let is_complete = |done: &DoneEvent| done.try_is_complete().map_err(crate::backend::cuda::driver);
        match self {
            Self::Enqueued(done) => is_complete(done),
            // The wait for one that has failed ends at once.
            Self::Later(later) => match &*later.outcome.lock() {
                Some(Ok(done)) => is_complete(done),
                Some(Err(_)) => Ok(true),
                None => Ok(false),
            },
        }
    }
}

/// A call that a thread enqueues.
#[derive(Default)]
pub(super) struct LaterLaunch {
    outcome: Mutex<Option<Result<DoneEvent>>>,
    /// Whether the thread is done. The outcome may have been taken.
    is_over: Mutex<bool>,
    changed: Condvar,
}

impl LaterLaunch {
    /// Enqueues a call on a thread, after the one that comes before it in its group.
    pub(super) fn start(
        before: Option<Arc<Self>>,
        enqueue: impl FnOnce() -> Result<DoneEvent> + Send + 'static,
    ) -> Result<Arc<Self>> {
        let launch = Arc::new(Self::default());
        let made = launch.clone();
        let run = move || {
            before.into_iter().for_each(|before| before.wait());
            *made.outcome.lock() = Some(enqueue());
            *made.is_over.lock() = true;
            made.changed.notify_all();
        };
        let started = std::thread::Builder::new().name("nccl connect".to_string()).spawn(run);
        started.map_err(|error| Error::Unsupported(format!("no thread for a call: {error}")))?;
        Ok(launch)
    }

    pub(super) fn is_over(&self) -> bool {
        *self.is_over.lock()
    }

    /// Waits until the thread is done.
    pub(super) fn wait(&self) {
        let mut is_over = self.is_over.lock();
        while !*is_over {
            self.changed.wait(&mut is_over);
        }
    }

    fn take(&self) -> Result<DoneEvent> {
        self.wait();
        let gone = || Err(Error::Unsupported("a call whose end was taken before".to_string()));
        self.outcome.lock().take().unwrap_or_else(gone)
    }
}
