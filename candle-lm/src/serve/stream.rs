//! What happens to a request, from the engine to its client.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::request::{RequestError, TokenLogprob};
use crate::generate::Stop;

/// One thing that happens to a request.
#[derive(Clone, Debug, PartialEq)]
pub enum TokenEvent {
    /// Its prompt is read. This comes once, before all tokens.
    Begun {
        /// How many tokens of the prompt were in the cache.
        cached: usize,
        /// When the request left the queue.
        admitted: Instant,
        /// The log-probabilities of the prompt's tokens, from the second one on, if they were asked for.
        prompt_logprobs: Vec<TokenLogprob>,
    },
    /// The text has one token more.
    Token {
        /// The token.
        token: u32,
        /// Its log-probability, if that was asked for.
        logprob: Option<TokenLogprob>,
        /// When it was chosen.
        at: Instant,
    },
    /// This token ends the text, and is no part of it. It is told with its log-probability if that was asked
    /// for, and not at all otherwise.
    EndToken {
        /// The token.
        token: u32,
        /// Its log-probability.
        logprob: TokenLogprob,
    },
    /// The embedding of the prompt, which an encoder gives. Nothing comes behind it.
    Embedded(Vec<f32>),
    /// The text has ended. Nothing comes behind it.
    Ended(Stop),
    /// The request has failed, alone or with all others. Nothing comes behind it.
    Failed(RequestError),
}

impl TokenEvent {
    fn is_last(&self) -> bool {
        matches!(self, Self::Embedded(_) | Self::Ended(_) | Self::Failed(_))
    }
}

/// Events that wait for their reader.
#[derive(Debug, Default)]
struct Mailbox {
    events: VecDeque<TokenEvent>,
    waker: Option<Waker>,
    /// Whether the last event was sent.
    is_ended: bool,
    /// Whether the stream was dropped.
    is_abandoned: bool,
}

#[derive(Debug, Default)]
struct SharedMailbox {
    mailbox: Mutex<Mailbox>,
    changed: Condvar,
}

/// The engine's end of a stream. If it is dropped before the last event, the request fails.
#[doc(hidden)]
#[derive(Debug)]
pub struct EventSender(Arc<SharedMailbox>);

/// What happens to one request. The next pass cancels a request whose stream was dropped.
///
/// The last event is one of [`TokenEvent::Ended`], [`TokenEvent::Embedded`] and [`TokenEvent::Failed`]. The engine never waits for a
/// reader: events wait here, and there are no more of them than the tokens that were asked for, and two.
#[derive(Debug)]
pub struct RequestStream(Arc<SharedMailbox>);

/// The two ends of a new stream.
pub(super) fn channel() -> (EventSender, RequestStream) {
    let shared = Arc::new(SharedMailbox::default());
    (EventSender(shared.clone()), RequestStream(shared))
}

impl SharedMailbox {
    fn send(&self, event: TokenEvent) {
        let mut mailbox = self.mailbox.lock();
        if mailbox.is_ended {
            return;
        }
        mailbox.is_ended = event.is_last();
        if !mailbox.is_abandoned {
            mailbox.events.push_back(event);
        }
        let waker = mailbox.waker.take();
        drop(mailbox);
        self.changed.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl EventSender {
    /// Sends an event. None comes behind the last one, and none to a stream that was dropped.
    pub fn send(&self, event: TokenEvent) {
        self.0.send(event);
    }

    /// Whether the stream was dropped.
    pub fn is_abandoned(&self) -> bool {
        self.0.mailbox.lock().is_abandoned
    }

    /// A sender for who only ends the request.
    pub(super) fn downgrade(&self) -> WeakSender {
        WeakSender(Arc::downgrade(&self.0))
    }
}

/// A sender that keeps nothing of its stream alive.
#[derive(Debug)]
pub(super) struct WeakSender(Weak<SharedMailbox>);

impl WeakSender {
    /// Whether nobody reads or writes the stream any more.
    pub(super) fn is_over(&self) -> bool {
        self.0.strong_count() == 0
    }

    /// Fails the request, unless it has ended.
    pub(super) fn fail(&self, error: RequestError) {
        if let Some(mailbox) = self.0.upgrade() {
            mailbox.send(TokenEvent::Failed(error));
        }
    }
}

impl Drop for EventSender {
    fn drop(&mut self) {
        self.send(TokenEvent::Failed(RequestError::World("the engine ended without a word".into())));
    }
}

impl RequestStream {
    /// The next event, as soon as there is one; `None` if none comes within `timeout`, or the last one has
    /// been read.
    pub fn next_event(&mut self, timeout: Duration) -> Option<TokenEvent> {
        let until = Instant::now().checked_add(timeout);
        let mut mailbox = self.0.mailbox.lock();
        loop {
            if let Some(event) = mailbox.events.pop_front() {
                return Some(event);
            }
            let is_late = match until {
                _ if mailbox.is_ended => true,
                Some(until) => self.0.changed.wait_until(&mut mailbox, until).timed_out(),
                None => {
                    self.0.changed.wait(&mut mailbox);
                    false
                }
            };
            if is_late {
                return mailbox.events.pop_front();
            }
        }
    }

    /// The next event, or `None` behind the last one. If there is none yet, the task of `context` is woken as
    /// soon as there is: no runtime is needed for that.
    ///
    /// ```
    /// use std::future::poll_fn;
    /// use candle_lm::serve::{RequestStream, TokenEvent};
    ///
    /// async fn next(stream: &mut RequestStream) -> Option<TokenEvent> {
    ///     poll_fn(|context| stream.poll_event(context)).await
    /// }
    /// # let _ = next;
    /// ```
    pub fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Option<TokenEvent>> {
        let mut mailbox = self.0.mailbox.lock();
        match mailbox.events.pop_front() {
            Some(event) => Poll::Ready(Some(event)),
            None if mailbox.is_ended => Poll::Ready(None),
            None => {
                mailbox.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }

    /// Whether the last event has been read.
    pub fn is_ended(&self) -> bool {
        let mailbox = self.0.mailbox.lock();
        mailbox.is_ended && mailbox.events.is_empty()
    }
}

impl Drop for RequestStream {
    fn drop(&mut self) {
        let mut mailbox = self.0.mailbox.lock();
        mailbox.is_abandoned = true;
        mailbox.events.clear();
        mailbox.waker = None;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::{TokenEvent, channel};
    use crate::generate::Stop;
    use crate::serve::RequestError;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Poll, Wake, Waker};
    use std::time::{Duration, Instant};

    #[derive(Default)]
    struct WakeCount(AtomicUsize);

    impl Wake for WakeCount {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn token(token: u32) -> TokenEvent {
        TokenEvent::Token { token, logprob: None, at: Instant::now() }
    }

    #[test]
    fn each_stream_has_one_end_and_nothing_behind_it() {
        let (sender, mut stream) = channel();
        assert_eq!(stream.next_event(Duration::ZERO), None);
        sender.send(token(1));
        sender.send(TokenEvent::Ended(Stop::Length));
        sender.send(token(2));
        drop(sender);
        assert!(matches!(stream.next_event(Duration::ZERO), Some(TokenEvent::Token { token: 1, .. })));
        assert!(!stream.is_ended());
        assert_eq!(stream.next_event(Duration::MAX), Some(TokenEvent::Ended(Stop::Length)));
        assert!(stream.is_ended());
        assert_eq!(stream.next_event(Duration::MAX), None);
    }

    #[test]
    fn a_dropped_engine_fails_the_request_and_wakes_its_reader() {
        let (sender, mut stream) = channel();
        let count = Arc::new(WakeCount::default());
        let waker = Waker::from(count.clone());
        let mut context = Context::from_waker(&waker);
        assert!(stream.poll_event(&mut context).is_pending());
        drop(sender);
        assert_eq!(count.0.load(Ordering::SeqCst), 1);
        assert!(matches!(
            stream.poll_event(&mut context),
            Poll::Ready(Some(TokenEvent::Failed(RequestError::World(_))))
        ));
        assert_eq!(stream.poll_event(&mut context), Poll::Ready(None));
    }

    #[test]
    fn a_dropped_stream_keeps_nothing() {
        let (sender, stream) = channel();
        sender.send(token(1));
        drop(stream);
        assert!(sender.is_abandoned());
        sender.send(token(2));
        assert!(sender.0.mailbox.lock().events.is_empty());
    }

    #[test]
    fn a_reader_that_waits_gets_what_comes() {
        let (sender, mut stream) = channel();
        let reader = std::thread::spawn(move || stream.next_event(Duration::from_secs(60)));
        std::thread::sleep(Duration::from_millis(20));
        sender.send(token(5));
        assert!(matches!(reader.join().unwrap(), Some(TokenEvent::Token { token: 5, .. })));
    }
}
