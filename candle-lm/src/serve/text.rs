//! The text of one request, on rank 0.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use anyhow::{Result, anyhow};
use candle_shard::nn::RowAdapters;
use tracing::Span;

use super::queue::WaitingRequest;
use super::request::{RequestError, ServeRequest, TokenConstraint, TokenLogprob, TokenMask};
use super::spans::TextSpans;
use super::stream::{EventSender, TokenEvent};
use crate::generate::Stop;
use crate::pass::{RowBasis, RowNumbers, TokenBasis};
use crate::sample::Sampler;
use crate::scheduler::{PassRows, SlotText};
use crate::writing::{TextWriter, top};

/// The least log-probability that is told, which means "very unlikely". JSON has no infinite numbers.
const LEAST_LOGPROB: f32 = -9999.0;

/// A request that has a slot.
pub(super) struct RequestText {
    writer: TextWriter,
    events: EventSender,
    spans: TextSpans,
    /// The tokens that end it.
    ends: BTreeSet<u32>,
    logit_bias: BTreeMap<u32, f32>,
    logprobs: Option<usize>,
    deadline: Option<Instant>,
    constraint: Option<Box<dyn TokenConstraint>>,
    admitted: Instant,
    is_begun: bool,
    /// The prompt, if log-probabilities of its tokens are told, and those of the tokens so far, from the
    /// second one on.
    prompt: Vec<u32>,
    prompt_logprobs: Vec<TokenLogprob>,
}

/// Where a text is behind a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TextProgress {
    /// Its prompt is not read yet.
    Reading,
    /// This token came.
    Wrote(u32),
    /// It has ended.
    Ended {
        /// Whether the cache may be used on.
        is_sound: bool,
    },
}

impl RequestText {
    /// The text of a request, which the tokens `ends` of the model end, in a slot of `room` tokens.
    pub(super) fn new(
        WaitingRequest { request, events, mut spans }: WaitingRequest,
        ends: &BTreeSet<u32>,
        room: usize,
    ) -> SlotText<Self> {
        spans.admit();
        let ServeRequest { prompt, max_tokens, sampling, prompt_logprobs: wants_all, .. } = request;
        let mut all = request.stop_tokens;
        if !request.ignore_eos {
            all.extend(ends);
        }
        let carried = Self {
            writer: TextWriter::new(&prompt, max_tokens, room, Sampler::new(sampling)),
            events,
            spans,
            ends: all,
            logit_bias: request.logit_bias,
            logprobs: request.logprobs,
            deadline: request.deadline,
            constraint: request.constraint,
            admitted: Instant::now(),
            is_begun: false,
            prompt: if wants_all { prompt.clone() } else { Vec::new() },
            prompt_logprobs: Vec::new(),
        };
        let adapters = request.adapter.map_or(RowAdapters::Model, RowAdapters::One);
        let mut text = SlotText::new(prompt, carried);
        (text.salt, text.adapters, text.wants_all) = (request.cache_salt, adapters, wants_all);
        text
    }

    /// Whether nobody reads what is written.
    pub(super) fn is_abandoned(&self) -> bool {
        self.events.is_abandoned()
    }

    /// Whether its prompt is read.
    pub(super) fn is_begun(&self) -> bool {
        self.is_begun
    }

    /// The span of the text.
    pub(super) fn span(&self) -> &Span {
        self.spans.text()
    }

    /// How many tokens were written.
    pub(super) fn written(&self) -> usize {
        self.writer.tokens.len()
    }

    /// Whether its time is over.
    pub(super) fn is_late(&self, now: Instant) -> bool {
        self.deadline.is_some_and(|deadline| deadline <= now)
    }

    /// Tells the last event.
    pub(super) fn finish(&self, end: Result<Stop, RequestError>) {
        self.spans.end(self.written(), &end);
        self.events.send(end.map_or_else(TokenEvent::Failed, TokenEvent::Ended));
    }

    /// What is read of the logits of its rows in a pass.
    pub(super) fn basis(&self, rows: &PassRows) -> TokenBasis {
        let is_changed = !self.logit_bias.is_empty() || self.constraint.is_some();
        if !self.prompt.is_empty() {
            TokenBasis::All
        } else if !rows.is_next {
            TokenBasis::Largest
        } else if is_changed || self.logprobs.is_some() {
            TokenBasis::All
        } else {
            self.writer.basis()
        }
    }

    /// Whether what was read of the logits of its rows decides the next token.
    pub(super) fn is_decided_by(&self, read: &RowNumbers, rows: &PassRows) -> bool {
        let row = rows.first + rows.rows.saturating_sub(1);
        !rows.is_next || read.row(row).is_ok_and(|row| self.writer.is_decided_by(row))
    }

    /// Takes what was read of the logits of its rows in a pass; `reused` tokens of the prompt were not computed.
    pub(super) fn advance(
        &mut self,
        read: &RowNumbers,
        rows: &PassRows,
        reused: usize,
        mask: &mut TokenMask,
    ) -> TextProgress {
        match self.try_advance(read, rows, reused, mask) {
            Ok(progress) => progress,
            Err(error) => {
                self.finish(Err(error));
                TextProgress::Ended { is_sound: false }
            }
        }
    }

    fn try_advance(
        &mut self,
        read: &RowNumbers,
        rows: &PassRows,
        reused: usize,
        mask: &mut TokenMask,
    ) -> Result<TextProgress, RequestError> {
        let told = |error: anyhow::Error| RequestError::Logits(format!("{error:#}"));
        let row = |at| read.row(at).map_err(told);
        let ended = |text: &Self, stop| {
            text.finish(Ok(stop));
            Ok(TextProgress::Ended { is_sound: true })
        };
        if !self.prompt.is_empty() {
            // A text that has lost its slot begins again.
            self.prompt_logprobs.truncate(rows.start);
            for at in rows.first..rows.first + rows.rows {
                let target = self.prompt.get(1 + self.prompt_logprobs.len());
                if let (Some(&token), RowBasis::All(row)) = (target, row(at)?) {
                    self.prompt_logprobs.push(logprob(row, token, self.logprobs.unwrap_or(0))?);
                }
            }
        }
        if !rows.is_next {
            return Ok(TextProgress::Reading);
        }
        if !self.is_begun {
            self.is_begun = true;
            self.prompt = Vec::new();
            self.spans.begin(reused);
            let prompt_logprobs = std::mem::take(&mut self.prompt_logprobs);
            self.events.send(TokenEvent::Begun { cached: reused, admitted: self.admitted, prompt_logprobs });
            if let Some(stop) = self.writer.stop() {
                return ended(self, stop);
            }
        }
        let given = row(rows.first + rows.rows.saturating_sub(1))?;
        let mut changed = Vec::<f32>::new();
        if let RowBasis::All(logits) = given
            && (!self.logit_bias.is_empty() || self.constraint.is_some())
        {
            changed.extend(logits);
        }
        for (&token, bias) in &self.logit_bias {
            // What is no finite number stays one, and is told.
            if let Some(logit) = changed.get_mut(token as usize).filter(|logit| logit.is_finite()) {
                *logit = (*logit + bias).clamp(f32::MIN, f32::MAX);
            }
        }
        if !self.constrain(&mut changed, mask)? {
            return ended(self, Stop::End);
        }
        let chosen_by = if changed.is_empty() { given } else { RowBasis::All(&changed) };
        let token = self.writer.choose(chosen_by).map_err(told)?;
        let told = match (self.logprobs, given) {
            (Some(count), RowBasis::All(logits)) => Some(logprob(logits, token, count)?),
            _ => None,
        };
        if let Some(constraint) = &mut self.constraint {
            guarded(|| constraint.accept(token))?;
        }
        let (events, at) = (&self.events, Instant::now());
        if self.writer.tokens.is_empty() {
            self.spans.tell_first_token();
        }
        if let Some(logprob) = told.clone().filter(|_| self.ends.contains(&token)) {
            events.send(TokenEvent::EndToken { token, logprob });
        }
        let stop = self.writer.take(token, &self.ends, |token| {
            events.send(TokenEvent::Token { token, logprob: told, at });
            Ok(true)
        });
        match stop.map_err(|error| RequestError::Logits(format!("{error:#}")))? {
            Some(stop) => ended(self, stop),
            None => Ok(TextProgress::Wrote(token)),
        }
    }

    /// Leaves the logits of tokens that may follow; returns false if none may.
    fn constrain(&mut self, logits: &mut [f32], mask: &mut TokenMask) -> Result<bool, RequestError> {
        let Some(constraint) = &mut self.constraint else { return Ok(true) };
        mask.clear();
        guarded(|| constraint.mask(mask))?;
        let mut is_any = false;
        for (logit, token) in logits.iter_mut().zip(0..) {
            match mask.allows(token) {
                true => is_any = true,
                // What is no number stays one, and is told.
                false if logit.is_nan() || *logit == f32::INFINITY => {}
                false => *logit = f32::NEG_INFINITY,
            }
        }
        Ok(is_any)
    }
}

/// Runs a call of a constraint, whose panic is an error.
fn guarded(call: impl FnOnce() -> Result<()>) -> Result<(), RequestError> {
    let made = catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_| Err(anyhow!("it panicked")));
    made.map_err(|error| RequestError::Constraint(format!("{error:#}")))
}

/// The log-probability of a token by the logits of its place, and those of the `count` likeliest tokens.
fn logprob(logits: &[f32], token: u32, count: usize) -> Result<TokenLogprob, RequestError> {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if !most.is_finite() || logits.iter().any(|logit| logit.is_nan()) {
        let reason =
            "the logits of a token are no finite numbers; check the weights, or compute in a wider dtype";
        return Err(RequestError::Logits(reason.into()));
    }
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - most).exp()).sum();
    let of = |logit: f32| ((f64::from(logit - most) - sum.ln()) as f32).max(LEAST_LOGPROB);
    let own = logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
    let top = top(logits, count).into_iter().map(|(token, logit)| (token, of(logit))).collect();
    Ok(TokenLogprob { logprob: of(own), top })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::{LEAST_LOGPROB, RequestText, TextProgress, WaitingRequest, logprob};
    use crate::generate::Stop;
    use crate::pass::RowNumbers;
    use crate::scheduler::PassRows;
    use crate::serve::stream::{TokenEvent, channel};
    use crate::serve::{RequestError, ServeRequest, TokenMask};
    use std::collections::BTreeSet;
    use std::time::Duration;

    /// What comes of a request by the logits of one pass, without what begins it.
    fn passed(request: ServeRequest, logits: &[f32]) -> (TextProgress, Vec<TokenEvent>) {
        let (events, mut stream) = channel();
        let mut text =
            RequestText::new(WaitingRequest::new(request, events), &BTreeSet::from([2]), 10).carried;
        let mut mask = TokenMask::new(logits.len());
        let rows = PassRows { slot: 0, first: 0, rows: 1, start: 0, is_next: true };
        let progress = text.advance(&RowNumbers::All(logits.to_vec(), logits.len()), &rows, 0, &mut mask);
        let begun = stream.next_event(Duration::ZERO);
        assert!(matches!(begun, Some(TokenEvent::Begun { .. })), "{begun:?}");
        (progress, std::iter::from_fn(|| stream.next_event(Duration::ZERO)).collect())
    }

    #[test]
    fn a_bias_hides_no_logit_that_is_no_number() {
        let biased = |logits: &[f32]| {
            let request = ServeRequest { logit_bias: [(1, 100.0)].into(), ..ServeRequest::new(vec![0], 3) };
            passed(request, logits)
        };
        for odd in [f32::NAN, f32::INFINITY] {
            let (progress, events) = biased(&[0.0, odd, 1.0]);
            assert_eq!(progress, TextProgress::Ended { is_sound: false });
            assert!(matches!(events[..], [TokenEvent::Failed(RequestError::Logits(_))]), "{events:?}");
        }
        assert_eq!(biased(&[0.0, f32::MAX, 1.0]).0, TextProgress::Wrote(1));
        assert_eq!(biased(&[0.5, f32::NEG_INFINITY, 0.0]).0, TextProgress::Wrote(0));
    }

    #[test]
    fn a_prompt_that_is_read_again_tells_its_log_probabilities_once() {
        let (events, mut stream) = channel();
        let prompt = vec![0, 1, 2, 1];
        let request =
            ServeRequest { logprobs: Some(0), prompt_logprobs: true, ..ServeRequest::new(prompt.clone(), 0) };
        let mut text = RequestText::new(WaitingRequest::new(request, events), &BTreeSet::new(), 10).carried;
        let mut mask = TokenMask::new(3);
        // It loses its slot behind the second pass, and is read in other chunks then.
        for span in [0..1, 1..3, 0..2, 2..4] {
            let logits: Vec<f32> = span.clone().flat_map(|at| [at as f32, 0.0, 0.5]).collect();
            let (start, is_next) = (span.start, span.end == prompt.len());
            let rows = PassRows { slot: 0, first: 0, rows: span.len(), start, is_next };
            text.advance(&RowNumbers::All(logits, 3), &rows, 0, &mut mask);
        }
        let Some(TokenEvent::Begun { prompt_logprobs, .. }) = stream.next_event(Duration::ZERO) else {
            panic!("the prompt is read")
        };
        let want: Vec<f32> =
            (0..3).map(|at| logprob(&[at as f32, 0.0, 0.5], prompt[at + 1], 0).unwrap().logprob).collect();
        assert_eq!(prompt_logprobs.iter().map(|told| told.logprob).collect::<Vec<_>>(), want);
    }

    #[test]
    fn the_token_that_ends_a_text_is_told_with_its_log_probability() {
        for logprobs in [None, Some(1)] {
            let (_, events) =
                passed(ServeRequest { logprobs, ..ServeRequest::new(vec![0], 3) }, &[0.0, 0.0, 9.0]);
            match (logprobs, &events[..]) {
                (None, [TokenEvent::Ended(Stop::End)]) => {}
                (Some(_), [TokenEvent::EndToken { token: 2, logprob }, TokenEvent::Ended(Stop::End)]) => {
                    assert!(logprob.logprob > -0.01 && logprob.top == [(2, logprob.logprob)], "{logprob:?}");
                }
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn log_probabilities_are_finite_and_add_up_to_one() {
        let logits = [1.0f32, f32::NEG_INFINITY, 3.0, -1e30, 3.0];
        let all = logprob(&logits, 1, 5).unwrap();
        assert_eq!(all.logprob, LEAST_LOGPROB);
        let tokens: Vec<u32> = all.top.iter().map(|(token, _)| *token).collect();
        assert_eq!(tokens, [2, 4, 0, 3, 1]);
        let sum: f64 = all.top.iter().map(|(_, logprob)| f64::from(*logprob).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-6 && all.top.iter().all(|(_, logprob)| *logprob >= LEAST_LOGPROB));
        assert_eq!(logprob(&logits, 2, 0).unwrap().top, []);
        for odd in [f32::NAN, f32::INFINITY] {
            assert!(matches!(logprob(&[0.0, odd], 0, 1), Err(RequestError::Logits(_))));
        }
        assert!(logprob(&[f32::NEG_INFINITY; 2], 0, 1).is_err());
    }
}
