//! The chunks of streams of texts and of conversations.

use std::collections::VecDeque;

use serde_json::{Value, json};

use super::answer::{self, AnswerFrame, AnswerKind};
use super::api_error::ApiError;
use super::choice::{Choice, ChoiceStep};
use super::events::EventWriter;
use super::model::ServedModel;
use super::reply::ReplyDelta;

/// Writes the chunks of a stream.
pub(super) struct ChunkWriter {
    frame: AnswerFrame,
    model: &'static ServedModel,
    /// The calls that each choice has begun.
    calls: Vec<usize>,
    includes_usage: bool,
    tells_tokens: bool,
}

impl ChunkWriter {
    /// Writes so many texts.
    pub(super) fn new(
        frame: AnswerFrame,
        model: &'static ServedModel,
        texts: usize,
        (includes_usage, tells_tokens): (bool, bool),
    ) -> Self {
        Self { frame, model, calls: vec![0; texts], includes_usage, tells_tokens }
    }

    fn push(
        &self,
        index: usize,
        (delta, logprobs): (Value, Value),
        end: Option<&'static str>,
        events: &mut VecDeque<String>,
    ) {
        let choice = match self.frame.kind {
            AnswerKind::Completion => {
                json!({"index": index, "text": delta, "logprobs": logprobs, "finish_reason": end})
            }
            _ => json!({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": end}),
        };
        push_event(&self.frame.chunk(choice, self.includes_usage), events);
    }

    /// The place of a choice's last call.
    fn call(&self, index: usize) -> usize {
        self.calls.get(index).map_or(0, |calls| calls.saturating_sub(1))
    }
}

fn push_event(value: &Value, events: &mut VecDeque<String>) {
    events.push_back(format!("data: {value}\n\n"));
}

impl EventWriter for ChunkWriter {
    fn begin(&mut self, events: &mut VecDeque<String>) {
        if self.frame.kind == AnswerKind::Chat {
            for index in 0..self.calls.len() {
                let delta = json!({"role": "assistant", "content": ""});
                self.push(index, (delta, Value::Null), None, events);
            }
        }
    }

    fn step(&mut self, index: usize, step: ChoiceStep, events: &mut VecDeque<String>) {
        let logprobs = match step.tokens.is_empty() || !self.tells_tokens {
            true => Value::Null,
            false => answer::logprobs(self.frame.kind, self.model, &step.tokens),
        };
        let is_chat = self.frame.kind == AnswerKind::Chat;
        let (mut text, mut thought) = (String::new(), String::new());
        let mut deltas = Vec::new();
        // What comes in one step is told at once.
        for delta in step.deltas {
            let function = |place: usize, function: Value| json!({"tool_calls": [{"index": place, "function": function}]});
            match delta {
                ReplyDelta::Text(more) => text.push_str(&more),
                ReplyDelta::Thought(more) => thought.push_str(&more),
                ReplyDelta::Call(call) => {
                    if let Some(calls) = self.calls.get_mut(index) {
                        *calls += 1;
                    }
                    let place = self.call(index);
                    let mut begun = function(place, json!({"name": call.name, "arguments": ""}));
                    begun["tool_calls"][0]["id"] = json!(answer::call_id(self.model));
                    begun["tool_calls"][0]["type"] = json!("function");
                    deltas.push(begun);
                    if !call.arguments.is_empty() {
                        deltas.push(function(place, json!({"arguments": call.arguments})));
                    }
                }
                ReplyDelta::Arguments(more) => {
                    deltas.push(function(self.call(index), json!({"arguments": more})));
                }
                ReplyDelta::ExtraCall => {}
            }
        }
        if !thought.is_empty() {
            self.push(index, (json!({"reasoning_content": thought}), Value::Null), None, events);
        }
        if !text.is_empty() || !logprobs.is_null() {
            let delta = if is_chat { json!({"content": text}) } else { json!(text) };
            self.push(index, (delta, logprobs), None, events);
        }
        for delta in deltas {
            self.push(index, (delta, Value::Null), None, events);
        }
        if step.end.is_some() {
            let delta = if is_chat { json!({}) } else { json!("") };
            self.push(index, (delta, Value::Null), step.end, events);
        }
    }

    fn end(&mut self, choices: &[Choice], events: &mut VecDeque<String>) {
        if self.includes_usage {
            push_event(&self.frame.usage_chunk(choices), events);
        }
    }

    fn fail(&mut self, error: &ApiError, events: &mut VecDeque<String>) {
        push_event(&error.json(), events);
    }
}
