//! Streams of server-sent events, which a client reads while the texts are written.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::http::{HeaderValue, Response, header};
use candle_lm::serve::RequestError;
use http_body::Frame;
use tokio::time::{Instant, Sleep, sleep};

use super::api_error::ApiError;
use super::choice::{Choice, ChoiceStep};
use super::metrics::RequestRecord;

/// After so much silence a client, and what is between it and here, learns that the text is still being written.
const PING: Duration = Duration::from_secs(15);

/// What a stream says, in the form that its clients parse.
pub(super) trait EventWriter: Send {
    /// What comes before all texts.
    fn begin(&mut self, events: &mut VecDeque<String>);

    /// What is new of a text.
    fn step(&mut self, index: usize, step: ChoiceStep, events: &mut VecDeque<String>);

    /// What comes behind all texts.
    fn end(&mut self, choices: &[Choice], events: &mut VecDeque<String>);

    /// What comes instead of the rest of the texts.
    fn fail(&mut self, error: &ApiError, events: &mut VecDeque<String>);
}

/// The body of a stream. Dropped, it cancels what is not written yet.
pub(super) struct EventBody {
    writer: Box<dyn EventWriter>,
    choices: Vec<Choice>,
    ready: VecDeque<String>,
    is_over: bool,
    ping: Pin<Box<Sleep>>,
    record: RequestRecord,
}

impl EventBody {
    /// A stream of texts of which the first steps are there already.
    pub(super) fn new(
        writer: Box<dyn EventWriter>,
        choices: Vec<Choice>,
        first: Vec<(usize, ChoiceStep)>,
        record: RequestRecord,
    ) -> Self {
        let ping = Box::pin(sleep(PING));
        let mut body = Self { writer, choices, ready: VecDeque::new(), is_over: false, ping, record };
        body.writer.begin(&mut body.ready);
        for (index, step) in first {
            body.writer.step(index, step, &mut body.ready);
        }
        body.end_if_over();
        body
    }

    /// The response.
    pub(super) fn response(self) -> Response<Body> {
        let mut response = Response::new(Body::new(self));
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
        response
    }

    fn end_if_over(&mut self) {
        if self.is_over || !self.choices.iter().all(Choice::is_over) {
            return;
        }
        self.is_over = true;
        self.writer.end(&self.choices, &mut self.ready);
        self.ready.push_back("data: [DONE]\n\n".into());
        self.record.finish(&mut self.choices, 200);
    }

    fn fail(&mut self, error: &RequestError) {
        let error = ApiError::of_request(error);
        self.is_over = true;
        self.writer.fail(&error, &mut self.ready);
        self.ready.push_back("data: [DONE]\n\n".into());
        self.record.finish(&mut self.choices, error.status.as_u16());
        self.choices.clear();
    }
}

impl HttpBody for EventBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        for index in 0..this.choices.len() {
            if this.is_over || this.choices[index].is_over() {
                continue;
            }
            match this.choices[index].poll_step(context) {
                Poll::Pending => {}
                Poll::Ready(Ok(step)) => {
                    this.record.note(&mut this.choices[index]);
                    this.writer.step(index, step, &mut this.ready);
                }
                Poll::Ready(Err(error)) => this.fail(&error),
            }
        }
        this.end_if_over();
        if !this.ready.is_empty() {
            this.ping.as_mut().reset(Instant::now() + PING);
            let events: String = this.ready.drain(..).collect();
            return Poll::Ready(Some(Ok(Frame::data(events.into()))));
        }
        if this.is_over {
            return Poll::Ready(None);
        }
        if this.ping.as_mut().poll(context).is_ready() {
            this.ping.as_mut().reset(Instant::now() + PING);
            return Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b":\n\n")))));
        }
        Poll::Pending
    }
}
