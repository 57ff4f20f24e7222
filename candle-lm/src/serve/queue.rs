//! Requests that wait for the engine.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::request::{RequestError, ServeRequest};
use super::spans::TextSpans;
use super::speed::{PassLoad, ReadingSpeed};
use super::stream::{self, EventSender, RequestStream, TokenEvent, WeakSender};

/// How much may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueLimits {
    /// The most requests that wait.
    pub requests: usize,
    /// The most tokens of their prompts together. Where none waits, those that come together may always wait.
    pub tokens: usize,
}

impl Default for QueueLimits {
    /// 512 requests, with a million tokens.
    fn default() -> Self {
        Self { requests: 512, tokens: 1 << 20 }
    }
}

/// Why a request was not taken.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SubmitError {
    /// The model is not read yet.
    #[error("the model is being read; send the request again later")]
    Loading,
    /// As many wait as may.
    #[error("{waiting} requests wait already; send the request again in {} s", retry_after.as_secs())]
    Full {
        /// How many wait.
        waiting: usize,
        /// In about what time those that wait will be read: 1 to 120 s.
        retry_after: Duration,
    },
    /// The server takes no more requests.
    #[error("the server is about to end and takes no more requests")]
    Draining,
    /// The ranks have failed; this is the cause.
    #[error("the model has failed: {0}")]
    Failed(Arc<str>),
    /// A text has room for fewer tokens, those that are to be written included: one at least, or none if none
    /// was asked for.
    #[error("the prompt has {tokens} tokens, and a text has room for {room}; shorten it")]
    TooLong {
        /// The tokens of the prompt.
        tokens: usize,
        /// The most tokens of a text.
        room: usize,
    },
    /// The request cannot work: the sentence says why.
    #[error("{0}")]
    Invalid(String),
}

/// What a server does.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServeStatus {
    /// The most tokens of a text; `None` until the model is read.
    pub room: Option<usize>,
    /// The texts that can be written at once.
    pub slots: usize,
    /// The adapters that requests may ask for.
    pub adapters: usize,
    /// The most bytes of all slots, on the ranks of all replicas that share a layer.
    pub cache_bytes: usize,
    /// The bytes that slots have, those of ended texts included.
    pub used_bytes: usize,
    /// The requests that have a slot.
    pub running: usize,
    /// The requests that wait for one, or for one again.
    pub waiting: usize,
    /// The tokens of the prompts of those that have had none.
    pub waiting_tokens: usize,
    /// How many times a request has lost its slot so far, because there was no memory for its next tokens.
    pub preemptions: u64,
    /// The passes of the model so far: a heartbeat while requests run.
    pub passes: u64,
    /// The tokens of prompts of all requests that had a slot so far.
    pub prompt_tokens: u64,
    /// Those of them that were in a cache.
    pub reused_tokens: u64,
    /// The tokens that were written so far.
    pub written_tokens: u64,
    /// The requests that have ended so far, failed and cancelled ones too.
    pub ended: u64,
    /// The time since the last pass ended, or since the first request behind a pause got its slot; `None`
    /// before the first one.
    pub since_pass: Option<Duration>,
    /// Whether new requests are refused because the server is about to end.
    pub is_draining: bool,
    /// Why all ranks have failed, if they have.
    pub failure: Option<Arc<str>>,
}

/// A request that waits.
#[doc(hidden)]
#[derive(Debug)]
pub struct WaitingRequest {
    /// What is asked for.
    pub request: ServeRequest,
    /// Where its events go.
    pub events: EventSender,
    pub(super) spans: TextSpans,
}

impl WaitingRequest {
    pub(super) fn new(request: ServeRequest, events: EventSender) -> Self {
        let spans = TextSpans::new(&request);
        Self { request, events, spans }
    }
}

/// What the front asks of the engine as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum QueueMode {
    /// To serve.
    Open,
    /// To end when all requests have.
    Draining,
    /// To end now.
    Stopping,
}

#[derive(Debug)]
struct QueueContents {
    limits: QueueLimits,
    /// The requests of each client, the oldest first.
    waiting: BTreeMap<u64, VecDeque<WaitingRequest>>,
    /// The clients that have some, in the order of their turns.
    turns: VecDeque<u64>,
    /// The ends of all requests that wait or have a slot; some of those are over.
    open: Vec<WeakSender>,
    requests: usize,
    tokens: usize,
    vocab_size: usize,
    mode: QueueMode,
    /// What the engine tells.
    status: ServeStatus,
    /// When the last pass ended, or a pause.
    last_pass: Option<Instant>,
    speed: ReadingSpeed,
    /// The tokens of texts with slots that are still to be read: all of those come before what waits.
    unread: usize,
}

#[derive(Debug)]
struct SharedQueue {
    state: Mutex<QueueContents>,
    changed: Condvar,
}

/// Requests on their way to the engine. It is cheap to clone, and all clones are one queue.
///
/// Requests of one client are served in the order in which they came. Clients take turns.
///
/// ```
/// use candle_lm::serve::{QueueLimits, RequestQueue, ServeRequest, SubmitError};
///
/// let queue = RequestQueue::new(QueueLimits { requests: 8, tokens: 1 << 16 });
/// // No rank has called `serve` yet.
/// assert_eq!(queue.submit(ServeRequest::new(vec![1], 4)).err(), Some(SubmitError::Loading));
/// queue.drain();
/// assert!(queue.status().is_draining);
/// ```
#[derive(Clone, Debug)]
pub struct RequestQueue(Arc<SharedQueue>);

impl RequestQueue {
    /// An empty queue.
    pub fn new(limits: QueueLimits) -> Self {
        let state = QueueContents {
            limits,
            waiting: BTreeMap::new(),
            turns: VecDeque::new(),
            open: Vec::new(),
            requests: 0,
            tokens: 0,
            vocab_size: 0,
            mode: QueueMode::Open,
            status: ServeStatus::default(),
            last_pass: None,
            speed: ReadingSpeed::default(),
            unread: 0,
        };
        Self(Arc::new(SharedQueue { state: Mutex::new(state), changed: Condvar::new() }))
    }

    /// Hands a request to the engine. It never waits.
    ///
    /// # Errors
    /// If the request cannot work, or the engine takes none now.
    pub fn submit(&self, request: ServeRequest) -> Result<RequestStream, SubmitError> {
        let mut streams = self.submit_all(vec![request])?;
        streams.pop().ok_or_else(|| SubmitError::Invalid("no request".into()))
    }

    /// Hands several requests to the engine, all of them or none. It never waits.
    ///
    /// # Errors
    /// If one of them cannot work, or the engine does not take all now.
    pub fn submit_all(&self, requests: Vec<ServeRequest>) -> Result<Vec<RequestStream>, SubmitError> {
        let mut state = self.0.state.lock();
        requests.iter().try_for_each(|request| state.check(request))?;
        let (count, tokens) = (requests.len(), requests.iter().map(|request| request.prompt.len()).sum());
        if state.is_full(count, tokens) {
            state.sweep(Instant::now());
        }
        if state.is_full(count, tokens) {
            if state.requests == 0 {
                let most = state.limits.requests.max(1);
                let said = format!("{count} texts at once, and the queue has room for {most}: ask for fewer");
                return Err(SubmitError::Invalid(said));
            }
            let retry_after = state.retry_after();
            return Err(SubmitError::Full { waiting: state.requests, retry_after });
        }
        let push = |request| {
            let (events, stream) = stream::channel();
            state.push(WaitingRequest::new(request, events));
            stream
        };
        let streams = requests.into_iter().map(push).collect();
        drop(state);
        self.0.changed.notify_all();
        Ok(streams)
    }

    /// Takes no more requests; the engine ends when the others have ended.
    pub fn drain(&self) {
        self.turn_to(QueueMode::Draining);
    }

    /// Takes no more requests; the engine ends all with an error at the next pass, and then itself.
    pub fn stop(&self) {
        self.turn_to(QueueMode::Stopping);
    }

    fn turn_to(&self, mode: QueueMode) {
        let mut state = self.0.state.lock();
        state.mode = state.mode.max(mode);
        drop(state);
        self.0.changed.notify_all();
    }

    /// Waits until requests are taken; returns false if they are not within `timeout`.
    ///
    /// # Errors
    /// If they never will be, because the engine has failed.
    pub fn wait_until_open(&self, timeout: Duration) -> Result<bool, SubmitError> {
        let until = Instant::now() + timeout;
        let mut state = self.0.state.lock();
        loop {
            if let Some(cause) = &state.status.failure {
                return Err(SubmitError::Failed(cause.clone()));
            }
            if state.status.room.is_some() {
                return Ok(true);
            }
            if self.0.changed.wait_until(&mut state, until).timed_out() {
                return Ok(false);
            }
        }
    }

    /// What the engine does now. It waits for no pass.
    pub fn status(&self) -> ServeStatus {
        let state = self.0.state.lock();
        // To the engine, those that wait again are running.
        let again = state.status.waiting;
        ServeStatus {
            running: state.status.running.saturating_sub(again),
            waiting: state.requests + again,
            waiting_tokens: state.tokens,
            since_pass: state.last_pass.map(|at| at.elapsed()),
            is_draining: state.mode > QueueMode::Open,
            ..state.status.clone()
        }
    }

    /// Takes requests from now on, for texts of up to `room` tokens of a vocabulary.
    #[doc(hidden)]
    pub fn open(&self, status: ServeStatus, vocab_size: usize) {
        let mut state = self.0.state.lock();
        (state.status, state.vocab_size) = (status, vocab_size);
        drop(state);
        self.0.changed.notify_all();
    }

    /// Whether all requests are to end now.
    #[doc(hidden)]
    pub fn is_stopped(&self) -> bool {
        self.mode() == QueueMode::Stopping
    }

    /// What the front asks of the engine as a whole.
    pub(super) fn mode(&self) -> QueueMode {
        self.0.state.lock().mode
    }

    /// Takes out the request whose turn it is, if one waits that was neither dropped nor is too late.
    #[doc(hidden)]
    pub fn take(&self, now: Instant) -> Option<WaitingRequest> {
        self.take_if(now, |_| true)
    }

    /// [Takes](Self::take) out the request whose turn it is, if there is room for it. Others wait for it.
    pub(super) fn take_if(
        &self,
        now: Instant,
        has_room: impl FnOnce(&ServeRequest) -> bool,
    ) -> Option<WaitingRequest> {
        let mut state = self.0.state.lock();
        state.sweep(now);
        let next = state.turns.front().and_then(|client| state.waiting.get(client)?.front())?;
        if has_room(&next.request) { state.take() } else { None }
    }

    /// Removes what was dropped or is too late.
    pub(super) fn sweep(&self, now: Instant) {
        self.0.state.lock().sweep(now);
    }

    /// Waits for a request, or for the end; returns false if neither comes within `timeout`.
    pub(super) fn wait(&self, timeout: Duration) -> bool {
        let until = Instant::now() + timeout;
        let mut state = self.0.state.lock();
        while state.requests == 0 && state.mode == QueueMode::Open {
            if self.0.changed.wait_until(&mut state, until).timed_out() {
                return false;
            }
        }
        true
    }

    /// Tells what the engine did, in a pass if there was one.
    pub(super) fn tell(&self, tell: impl FnOnce(&mut ServeStatus), pass: Option<PassLoad>) {
        let mut state = self.0.state.lock();
        let was_idle = state.status.running == 0;
        tell(&mut state.status);
        if pass.is_some() || (was_idle && state.status.running > 0) {
            state.last_pass = Some(Instant::now());
        }
        if let Some(pass) = pass {
            state.unread = pass.unread;
            // A pass that reads nothing holds up those that wait for slots.
            if pass.prompt > 0 || state.requests > 0 {
                state.speed.take(pass);
            }
        }
    }

    /// Fails all requests, those that wait, those that have a slot and those that come. It waits for no pass.
    pub(super) fn close(&self, error: RequestError) {
        let mut state = self.0.state.lock();
        state.mode = QueueMode::Stopping;
        if let RequestError::World(cause) = &error
            && state.status.failure.is_none()
        {
            state.status.failure = Some(cause.clone());
        }
        (state.status.running, state.status.waiting) = (0, 0);
        while let Some(waiting) = state.take() {
            state.status.ended += 1;
            waiting.spans.end(0, &Err(error.clone()));
            waiting.events.send(TokenEvent::Failed(error.clone()));
        }
        let open = std::mem::take(&mut state.open);
        drop(state);
        self.0.changed.notify_all();
        open.iter().for_each(|request| request.fail(error.clone()));
    }
}

impl QueueContents {
    fn check(&self, request: &ServeRequest) -> Result<(), SubmitError> {
        if let Some(cause) = &self.status.failure {
            return Err(SubmitError::Failed(cause.clone()));
        }
        if self.mode > QueueMode::Open {
            return Err(SubmitError::Draining);
        }
        let Some(room) = self.status.room else { return Err(SubmitError::Loading) };
        let tokens = request.prompt.len();
        if tokens + request.max_tokens.min(1) > room {
            return Err(SubmitError::TooLong { tokens, room });
        }
        let invalid = |sentence: String| Err(SubmitError::Invalid(sentence));
        if tokens == 0 {
            return invalid("the prompt has no tokens; give some text to go on from".into());
        }
        let vocab_size = self.vocab_size;
        let named = request.prompt.iter().chain(request.logit_bias.keys()).chain(&request.stop_tokens);
        if let Some(token) = named.copied().find(|&token| token as usize >= vocab_size) {
            return invalid(format!("token {token}: the model has {vocab_size} tokens"));
        }
        let adapters = self.status.adapters;
        if let Some(number) = request.adapter.filter(|&number| number >= adapters) {
            return invalid(format!("adapter {number}: the model has {adapters}, from 0"));
        }
        if let Some((token, bias)) = request.logit_bias.iter().find(|(_, bias)| !bias.is_finite()) {
            return invalid(format!("the bias {bias} of token {token} is no number"));
        }
        if request.logprobs.is_some_and(|top| top > vocab_size) {
            return invalid(format!("log-probabilities of more tokens than the model's {vocab_size}"));
        }
        match request.sampling.check() {
            Ok(()) => Ok(()),
            Err(error) => invalid(error.0),
        }
    }

    /// Whether there is no room for so many requests more with so many tokens together.
    fn is_full(&self, count: usize, tokens: usize) -> bool {
        let QueueLimits { requests, tokens: most } = self.limits;
        self.requests + count > requests.max(1)
            || (self.requests > 0 && self.tokens.saturating_add(tokens) > most)
    }

    fn retry_after(&self) -> Duration {
        let seconds = self.speed.seconds_of(self.unread.saturating_add(self.tokens)).unwrap_or(1.0);
        Duration::from_secs(seconds.ceil().clamp(1.0, 120.0) as u64)
    }

    fn push(&mut self, waiting: WaitingRequest) {
        let client = waiting.request.client;
        if self.open.len() > 2 * (self.requests + self.status.slots) {
            self.open.retain(|request| !request.is_over());
        }
        self.open.push(waiting.events.downgrade());
        self.requests += 1;
        self.tokens += waiting.request.prompt.len();
        let of_client = self.waiting.entry(client).or_default();
        if of_client.is_empty() {
            self.turns.push_back(client);
        }
        of_client.push_back(waiting);
    }

    fn take(&mut self) -> Option<WaitingRequest> {
        let client = self.turns.pop_front()?;
        let of_client = self.waiting.get_mut(&client)?;
        let taken = of_client.pop_front()?;
        if of_client.is_empty() {
            self.waiting.remove(&client);
        } else {
            self.turns.push_back(client);
        }
        self.requests -= 1;
        self.tokens -= taken.request.prompt.len();
        Some(taken)
    }

    /// Removes requests that were dropped, and fails those that are too late.
    fn sweep(&mut self, now: Instant) {
        let (mut requests, mut tokens) = (0, 0);
        let mut ended = 0;
        for of_client in self.waiting.values_mut() {
            of_client.retain(|WaitingRequest { request, events, spans }| {
                let is_late = request.deadline.is_some_and(|deadline| deadline <= now);
                if is_late {
                    spans.end(0, &Err(RequestError::Deadline));
                    events.send(TokenEvent::Failed(RequestError::Deadline));
                }
                let stays = !is_late && !events.is_abandoned();
                if stays {
                    requests += 1;
                    tokens += request.prompt.len();
                } else {
                    ended += 1;
                }
                stays
            });
        }
        (self.requests, self.tokens) = (requests, tokens);
        self.status.ended += ended;
        self.waiting.retain(|_, of_client| !of_client.is_empty());
        let waiting = &self.waiting;
        self.turns.retain(|client| waiting.contains_key(client));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests;
