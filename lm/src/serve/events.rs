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
use serde_json::{Value, json};
use tokio::time::{Instant, Sleep, sleep};

use super::answer::{self, AnswerFrame, AnswerKind};
use super::api_error::ApiError;
use super::choice::{Choice, ChoiceStep};
use super::metrics::RequestRecord;
use super::model::ServedModel;
use super::reply::ReplyDelta;

/// After so much silence a client, and what is between it and here, learns that the text is still being written.
const PING: Duration = Duration::from_secs(15);

/// The body of a stream. Dropped, it cancels what is not written yet.
pub(super) struct EventBody {
    frame: AnswerFrame,
    model: &'static ServedModel,
    choices: Vec<Choice>,
    /// The calls that each choice has begun.
    calls: Vec<usize>,
    includes_usage: bool,
    tells_tokens: bool,
    ready: VecDeque<String>,
    is_over: bool,
    ping: Pin<Box<Sleep>>,
    record: RequestRecord,
}

impl EventBody {
    /// A stream of texts of which the first steps are there already.
    pub(super) fn new(
        frame: AnswerFrame,
        model: &'static ServedModel,
        choices: Vec<Choice>,
        first: Vec<(usize, ChoiceStep)>,
        (includes_usage, tells_tokens): (bool, bool),
        record: RequestRecord,
    ) -> Self {
        let calls = vec![0; choices.len()];
        let mut body = Self {
            frame,
            model,
            choices,
            calls,
            includes_usage,
            tells_tokens,
            ready: VecDeque::new(),
            is_over: false,
            ping: Box::pin(sleep(PING)),
            record,
        };
        if body.frame.kind == AnswerKind::Chat {
            for index in 0..body.choices.len() {
                body.push(index, json!({"role": "assistant", "content": ""}), Value::Null, None);
            }
        }
        for (index, step) in first {
            body.push_step(index, step);
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

    fn push_event(&mut self, value: &Value) {
        self.ready.push_back(format!("data: {value}\n\n"));
    }

    fn push(&mut self, index: usize, delta: Value, logprobs: Value, end: Option<&'static str>) {
        let choice = match self.frame.kind {
            AnswerKind::Chat => {
                json!({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": end})
            }
            AnswerKind::Completion => {
                json!({"index": index, "text": delta, "logprobs": logprobs, "finish_reason": end})
            }
        };
        let chunk = self.frame.chunk(choice, self.includes_usage);
        self.push_event(&chunk);
    }

    fn push_step(&mut self, index: usize, step: ChoiceStep) {
        let mut logprobs = match step.tokens.is_empty() || !self.tells_tokens {
            true => Value::Null,
            false => answer::logprobs(self.frame.kind, self.model, &step.tokens),
        };
        let is_chat = self.frame.kind == AnswerKind::Chat;
        let (mut text, mut thought) = (String::new(), String::new());
        let mut deltas = Vec::new();
        // What comes in one step is told at once.
        for delta in step.deltas {
            match delta {
                ReplyDelta::Text(more) => text.push_str(&more),
                ReplyDelta::Thought(more) => thought.push_str(&more),
                ReplyDelta::Call(call) => {
                    let place = self.calls.get_mut(index).map_or(0, |calls| {
                        *calls += 1;
                        *calls - 1
                    });
                    let function =
                        |function: Value| json!({"tool_calls": [{"index": place, "function": function}]});
                    let mut begun = function(json!({"name": call.name, "arguments": ""}));
                    begun["tool_calls"][0]["id"] = json!(answer::call_id(self.model));
                    begun["tool_calls"][0]["type"] = json!("function");
                    deltas.push(begun);
                    if !call.arguments.is_empty() {
                        deltas.push(function(json!({"arguments": call.arguments})));
                    }
                }
                ReplyDelta::Arguments(more) => {
                    let place = self.calls.get(index).map_or(0, |calls| calls.saturating_sub(1));
                    deltas.push(json!({"tool_calls": [{"index": place, "function": {"arguments": more}}]}));
                }
            }
        }
        if !thought.is_empty() {
            self.push(index, json!({"reasoning_content": thought}), Value::Null, None);
        }
        if !text.is_empty() || !logprobs.is_null() {
            let delta = if is_chat { json!({"content": text}) } else { json!(text) };
            self.push(index, delta, logprobs.take(), None);
        }
        for delta in deltas {
            self.push(index, delta, Value::Null, None);
        }
        if step.end.is_some() {
            let delta = if is_chat { json!({}) } else { json!("") };
            self.push(index, delta, Value::Null, step.end);
        }
    }

    fn end_if_over(&mut self) {
        if self.is_over || !self.choices.iter().all(Choice::is_over) {
            return;
        }
        self.is_over = true;
        if self.includes_usage {
            let usage = self.frame.usage_chunk(&self.choices);
            self.push_event(&usage);
        }
        self.ready.push_back("data: [DONE]\n\n".into());
        self.record.finish(&mut self.choices, 200);
    }

    fn fail(&mut self, error: &RequestError) {
        let error = ApiError::of_request(error);
        self.is_over = true;
        self.push_event(&error.json());
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
                    this.push_step(index, step);
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
