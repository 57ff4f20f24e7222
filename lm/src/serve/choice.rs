//! One text of an answer, from the engine's tokens to what a client reads.

use std::collections::VecDeque;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use candle_lm::generate::Stop;
use candle_lm::serve::{RequestError, RequestStream, ServeRequest, TokenEvent, TokenLogprob};
use candle_lm::stops::Stops;
use candle_lm::tokens::{self, TextStream};

use super::model::ServedModel;
use super::reply::{ReplyDelta, ReplyForm, ReplyReader};

/// One text that is to be written.
pub(super) struct ChoicePlan {
    pub(super) request: ServeRequest,
    pub(super) form: ReplyForm,
    /// The texts that end it.
    pub(super) stops: Vec<String>,
    /// The last tokens of the prompt.
    pub(super) tail: Vec<u32>,
    /// What of the prompt is told in front of it.
    pub(super) echo: Option<Vec<u32>>,
    /// Whether special tokens that say how a reply is to be read are read.
    pub(super) has_markers: bool,
}

/// A token that is told with its log-probability; none if nothing is known of it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ToldToken {
    pub(super) token: u32,
    pub(super) logprob: Option<TokenLogprob>,
    /// Where its text begins, in characters.
    pub(super) offset: usize,
    /// How many deltas of its step came before it.
    pub(super) deltas: usize,
}

/// What is new of a text.
#[derive(Debug, Default)]
pub(super) struct ChoiceStep {
    pub(super) deltas: Vec<ReplyDelta>,
    pub(super) tokens: Vec<ToldToken>,
    pub(super) end: Option<&'static str>,
}

/// What is counted of a text.
#[derive(Clone, Debug, Default)]
pub(super) struct ChoiceCounts {
    pub(super) tokens: usize,
    /// Those of them that are thoughts.
    pub(super) thoughts: usize,
    pub(super) cached: usize,
    pub(super) admitted: Option<Instant>,
    pub(super) begun: Option<Instant>,
    /// When the tokens were chosen that no metric has counted yet.
    pub(super) times: VecDeque<Instant>,
    pub(super) end: Option<&'static str>,
}

/// One text that is being written.
pub(super) struct Choice {
    index: usize,
    model: &'static ServedModel,
    /// None when its last event has been read, or no more are wanted.
    events: Option<RequestStream>,
    text: Option<TextStream<'static>>,
    stops: Option<Stops>,
    reader: ReplyReader,
    has_markers: bool,
    tells_tokens: bool,
    /// Whether the token that ends the text is told and counted: who scores texts reads as many
    /// log-probabilities as tokens that were asked for.
    tells_end: bool,
    echo: Option<Vec<u32>>,
    offset: usize,
    pub(super) counts: ChoiceCounts,
}

impl Choice {
    pub(super) fn new(
        index: usize,
        model: &'static ServedModel,
        events: RequestStream,
        plan: TextPlan,
    ) -> Self {
        Self {
            index,
            model,
            events: Some(events),
            text: Some(TextStream::new(&model.tokenizer, &plan.tail)),
            stops: Some(Stops::new(plan.stops)),
            reader: ReplyReader::new(plan.form),
            has_markers: plan.has_markers,
            tells_tokens: plan.tells_tokens,
            tells_end: plan.tells_tokens && plan.echo.is_some(),
            echo: plan.echo,
            offset: 0,
            counts: ChoiceCounts::default(),
        }
    }

    /// Its place among the texts of the answer.
    pub(super) fn place(&self) -> usize {
        self.index
    }

    /// Whether the text has ended.
    pub(super) fn is_over(&self) -> bool {
        self.events.is_none()
    }

    /// What is new of the text: all that has come, at once. A text that has begun is a step without anything.
    ///
    /// # Errors
    /// Why the engine failed, or a tokenizer.
    pub(super) fn poll_step(&mut self, context: &mut Context<'_>) -> Poll<Result<ChoiceStep, RequestError>> {
        let mut step = ChoiceStep::default();
        let Some(events) = &mut self.events else { return Poll::Pending };
        let mut event = ready!(events.poll_event(context));
        loop {
            match event {
                Some(TokenEvent::Begun { cached, admitted, prompt_logprobs }) => {
                    self.counts.cached = cached;
                    self.counts.admitted = Some(admitted);
                    self.counts.begun = Some(Instant::now());
                    self.tell_prompt(prompt_logprobs, &mut step);
                }
                Some(TokenEvent::Token { token, logprob, at }) => {
                    self.counts.tokens += 1;
                    self.counts.times.push_back(at);
                    if let Err(error) = self.push(token, logprob, &mut step) {
                        self.events = None;
                        return Poll::Ready(Err(RequestError::Logits(format!("{error:#}"))));
                    }
                }
                Some(TokenEvent::EndToken { token, logprob }) => {
                    if self.tells_end {
                        self.counts.tokens += 1;
                        self.tell(token, Some(logprob), step.deltas.len(), &mut step);
                    }
                }
                Some(TokenEvent::Ended(stop)) => {
                    let end = match stop {
                        Stop::End | Stop::Text => "stop",
                        Stop::Length | Stop::Context => "length",
                    };
                    self.finish(end, &mut step);
                }
                Some(TokenEvent::Failed(error)) => {
                    self.events = None;
                    return Poll::Ready(Err(error));
                }
                // A text has no embedding.
                Some(TokenEvent::Embedded(_)) | None => {
                    self.events = None;
                    return Poll::Ready(Err(RequestError::Stopped));
                }
            }
            let Some(events) = &mut self.events else { return Poll::Ready(Ok(step)) };
            match events.poll_event(context) {
                Poll::Ready(next) => event = next,
                Poll::Pending => return Poll::Ready(Ok(step)),
            }
        }
    }

    fn tell_prompt(&mut self, logprobs: Vec<TokenLogprob>, step: &mut ChoiceStep) {
        let Some(prompt) = self.echo.take() else { return };
        let text = self.model.tokenizer.decode(&prompt, true).unwrap_or_default();
        if self.tells_tokens {
            let known =
                std::iter::once(None).chain(logprobs.into_iter().map(Some)).chain(std::iter::repeat(None));
            for (&token, logprob) in prompt.iter().zip(known) {
                self.tell(token, logprob, step.deltas.len(), step);
            }
        }
        step.deltas.push(ReplyDelta::Text(text));
    }

    /// Tells a token that was read when there were so many `deltas`.
    fn tell(&mut self, token: u32, logprob: Option<TokenLogprob>, deltas: usize, step: &mut ChoiceStep) {
        step.tokens.push(ToldToken { token, logprob, offset: self.offset, deltas });
        if !tokens::is_silent(&self.model.tokenizer, token) {
            self.offset += String::from_utf8_lossy(self.model.bytes(token)).chars().count();
        }
    }

    fn push(
        &mut self,
        token: u32,
        logprob: Option<TokenLogprob>,
        step: &mut ChoiceStep,
    ) -> anyhow::Result<()> {
        let (Some(text), Some(stops)) = (&mut self.text, &mut self.stops) else { return Ok(()) };
        let mut piece = text.next(token)?;
        if let Some(marker) = self.model.markers.get(&token).filter(|_| self.has_markers) {
            piece.push_str(marker);
        }
        let (clear, is_over) = stops.next(&piece);
        let (is_hidden, deltas) = (self.reader.is_thinking(), step.deltas.len());
        self.reader.read(&clear, false, &mut step.deltas);
        if is_hidden || self.reader.is_thinking() {
            self.counts.thoughts += 1;
        } else if self.tells_tokens {
            self.tell(token, logprob, deltas, step);
        }
        if is_over {
            self.text = None;
            self.finish("stop", step);
        }
        Ok(())
    }

    /// Ends the text. The engine writes no more of it.
    fn finish(&mut self, end: &'static str, step: &mut ChoiceStep) {
        self.events = None;
        let rest = match (self.text.take(), self.stops.take()) {
            (Some(text), Some(stops)) => stops.rest(text, false).unwrap_or_default(),
            _ => String::new(),
        };
        self.reader.read(&rest, true, &mut step.deltas);
        let end = if end == "stop" && self.reader.calls() > 0 { "tool_calls" } else { end };
        step.end = Some(end);
        self.counts.end = Some(end);
    }
}

/// What is kept of a plan whose request the engine has.
pub(super) struct TextPlan {
    form: ReplyForm,
    stops: Vec<String>,
    tail: Vec<u32>,
    echo: Option<Vec<u32>>,
    has_markers: bool,
    tells_tokens: bool,
}

impl ChoicePlan {
    /// The request, and what is kept here.
    pub(super) fn split(self) -> (ServeRequest, TextPlan) {
        let Self { request, form, stops, tail, echo, has_markers } = self;
        let tells_tokens = request.logprobs.is_some();
        (request, TextPlan { form, stops, tail, echo, has_markers, tells_tokens })
    }
}
