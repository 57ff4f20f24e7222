//! The thread that makes requests of bodies: it parses, renders templates, cuts texts into tokens and compiles grammars.
//!
//! All of that may take long for a large body, and the thread of connections must not wait for it.

use std::sync::mpsc::{self, SyncSender, TrySendError};
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::access::Client;
use super::api_error::{ApiError, ApiResult};
use super::model::ServedModel;
use super::parameters::ServeLimits;

/// What a request is read with.
pub(super) struct RequestContext<'a> {
    pub(super) model: &'a ServedModel,
    pub(super) limits: &'a ServeLimits,
    pub(super) client: &'a Client,
    /// When it arrived.
    pub(super) arrival: Instant,
    /// The most tokens of a text.
    pub(super) room: usize,
}

impl RequestContext<'_> {
    /// What the fields of texts are read with.
    pub(super) fn of_parameters(&self) -> (&ServedModel, &ServeLimits, &Client, Instant) {
        (self.model, self.limits, self.client, self.arrival)
    }

    /// Refuses a text that cannot have few enough tokens, before it is cut into them.
    pub(super) fn check_bytes(&self, bytes: usize, param: &'static str) -> ApiResult<()> {
        // Some tokenizers have tokens of hundreds of spaces: a text of these has few tokens.
        let most = self.room.saturating_mul(self.model.longest_token);
        if bytes > most { Err(ApiError::surely_too_long(self.room, bytes, param)) } else { Ok(()) }
    }
}

type PrepJob = Box<dyn FnOnce() + Send>;

/// The thread, and a bounded line of bodies in front of it.
pub(super) struct PrepThread(SyncSender<PrepJob>);

impl PrepThread {
    /// Starts the thread, before which up to `most` bodies wait.
    ///
    /// # Errors
    /// If the system has no thread.
    pub(super) fn start(most: usize) -> std::io::Result<Self> {
        let (sender, jobs) = mpsc::sync_channel::<PrepJob>(most);
        // It ends with its sender.
        thread::Builder::new()
            .name("lm prep".into())
            .stack_size(16 << 20)
            .spawn(move || jobs.iter().for_each(|job| job()))?;
        Ok(Self(sender))
    }

    /// Runs `f` on the thread, unless the client leaves before.
    ///
    /// # Errors
    /// If too many bodies wait, or `f` panics.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        f: impl FnOnce() -> ApiResult<T> + Send + 'static,
    ) -> ApiResult<T> {
        let (sender, made) = oneshot::channel();
        let job = Box::new(move || {
            if sender.is_closed() {
                return;
            }
            let made = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f));
            let made =
                made.unwrap_or_else(|_| Err(ApiError::internal("The server failed to read this request.")));
            sender.send(made).ok();
        });
        self.0.try_send(job).map_err(|error| match error {
            TrySendError::Full(_) => {
                ApiError::busy("Too many requests are being read.", Duration::from_secs(1))
            }
            TrySendError::Disconnected(_) => ApiError::internal("The server failed to read this request."),
        })?;
        made.await.unwrap_or_else(|_| Err(ApiError::internal("The server failed to read this request.")))
    }
}
