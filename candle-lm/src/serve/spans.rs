//! Spans of a text, for who subscribes to those of the crate `tracing`.

use tracing::{Span, field, info, info_span};

use super::request::{RequestError, ServeRequest};
use super::text::RequestText;
use crate::generate::Stop;
use crate::scheduler::{PassPlan, Scheduler};
use crate::step::DecodeStep;

/// The span of a pass, which follows from those of its texts.
pub(super) fn of_pass(replicas: &[Scheduler<RequestText>], steps: &[DecodeStep], plans: &[PassPlan]) -> Span {
    let tokens: usize = steps.iter().map(DecodeStep::len).sum();
    let prompt: usize = plans.iter().map(|plan| plan.prompt).sum();
    let span = info_span!(parent: None, "pass", tokens, prompt_tokens = prompt);
    if !span.is_disabled() {
        for (replica, step) in replicas.iter().zip(steps) {
            let texts = step.spans().iter().filter_map(|of_text| replica.carried(of_text.slot));
            for text in texts {
                span.follows_from(text.span());
            }
        }
    }
    span
}

/// The span of a text, from its arrival to its end, and that of what happens to it now.
///
/// The second one is `queue` until the text has a slot, `prompt` until its prompt is read, and `write` until its end.
#[derive(Debug)]
pub(super) struct TextSpans {
    text: Span,
    now: Span,
}

impl TextSpans {
    /// The spans of a request that has arrived.
    pub(super) fn new(request: &ServeRequest) -> Self {
        let text = info_span!(
            parent: &request.span,
            "text",
            prompt_tokens = request.prompt.len(),
            max_tokens = request.max_tokens,
            adapter = request.adapter,
            cached_tokens = field::Empty,
            written_tokens = field::Empty,
            end = field::Empty,
        );
        let now = info_span!(parent: &text, "queue");
        Self { text, now }
    }

    /// The span of the whole text.
    pub(super) fn text(&self) -> &Span {
        &self.text
    }

    /// The text has a slot.
    pub(super) fn admit(&mut self) {
        self.now = info_span!(parent: &self.text, "prompt");
    }

    /// The prompt is read; so many of its tokens were in the cache.
    pub(super) fn begin(&mut self, cached: usize) {
        self.text.record("cached_tokens", cached);
        self.now = info_span!(parent: &self.text, "write");
    }

    /// The text has its first token.
    pub(super) fn tell_first_token(&self) {
        info!(parent: &self.now, "first token");
    }

    /// The text has ended.
    pub(super) fn end(&self, written: usize, end: &Result<Stop, RequestError>) {
        self.text.record("written_tokens", written);
        match end {
            Ok(stop) => self.text.record("end", field::debug(stop)),
            Err(error) => self.text.record("end", field::display(error)),
        };
    }
}
