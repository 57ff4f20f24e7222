//! The object of a response, and the events of its stream.

use std::collections::VecDeque;

use candle_lm::tokens;
use serde_json::{Value, json};

use super::answer::{self, AnswerKind, fresh_id};
use super::api_error::ApiError;
use super::choice::{Choice, ChoiceStep};
use super::events::EventWriter;
use super::model::ServedModel;
use super::reply::ReplyDelta;
use super::token_queue::TokenQueue;

/// What an item of a response is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ItemKind {
    Message,
    Thoughts,
    Call,
}

/// A response that is being written: its items, of which the last one may be open.
pub(super) struct ResponseWriter {
    model: &'static ServedModel,
    response: Value,
    prompt_tokens: usize,
    tells_tokens: bool,
    items: Vec<Value>,
    open: Option<ItemKind>,
    /// The log-probabilities of the open message.
    told: Vec<Value>,
    /// Those of tokens whose text is not clear yet.
    untold: TokenQueue<Value>,
    end: Option<&'static str>,
    sequence: u64,
}

impl ResponseWriter {
    /// Writes into the object of a response that has not begun.
    pub(super) fn new(
        model: &'static ServedModel,
        response: Value,
        prompt_tokens: usize,
        tells_tokens: bool,
    ) -> Self {
        Self {
            model,
            response,
            prompt_tokens,
            tells_tokens,
            items: Vec::new(),
            open: None,
            told: Vec::new(),
            untold: TokenQueue::default(),
            end: None,
            sequence: 0,
        }
    }

    /// The whole object, when the response has ended.
    pub(super) fn into_response(self) -> Value {
        self.response
    }

    fn push(&mut self, kind: &str, fields: Value, events: &mut VecDeque<String>) {
        let mut event = json!({"type": kind, "sequence_number": self.sequence});
        if let (Some(event), Value::Object(fields)) = (event.as_object_mut(), fields) {
            event.extend(fields);
        }
        self.sequence += 1;
        events.push_back(format!("event: {kind}\ndata: {event}\n\n"));
    }

    /// An event of the last item.
    fn push_of_item(&mut self, kind: &str, fields: Value, events: &mut VecDeque<String>) {
        let mut of_item = json!({"output_index": self.items.len().saturating_sub(1)});
        if let (Some(of_item), Value::Object(fields)) = (of_item.as_object_mut(), fields) {
            of_item.extend(fields);
        }
        self.push(kind, of_item, events);
    }

    /// An event of the only part of the last item.
    fn push_of_part(&mut self, kind: &str, fields: Value, events: &mut VecDeque<String>) {
        let mut of_part = json!({"item_id": self.item_id(), "content_index": 0});
        if let (Some(of_part), Value::Object(fields)) = (of_part.as_object_mut(), fields) {
            of_part.extend(fields);
        }
        self.push_of_item(kind, of_part, events);
    }

    fn item_id(&self) -> Value {
        self.items.last().map(|item| item["id"].clone()).unwrap_or_default()
    }

    fn item(&self) -> Value {
        self.items.last().cloned().unwrap_or_default()
    }

    /// Appends to a text of the last item.
    fn append(&mut self, place: &str, more: &str) {
        if let Some(Value::String(text)) = self.items.last_mut().and_then(|item| item.pointer_mut(place)) {
            text.push_str(more);
        }
    }

    fn begin_item(&mut self, kind: ItemKind, item: Value, events: &mut VecDeque<String>) {
        self.close("completed", events);
        self.items.push(item);
        self.open = Some(kind);
        let item = self.item();
        self.push_of_item("response.output_item.added", json!({"item": item}), events);
    }

    /// Makes the open item one of this kind, with a part for its text.
    fn turn_to(&mut self, kind: ItemKind, events: &mut VecDeque<String>) {
        if self.open == Some(kind) {
            return;
        }
        let id = |prefix: &str| fresh_id(prefix).replace('-', "_");
        let (item, part) = match kind {
            ItemKind::Thoughts => (
                json!({"id": id("rs"), "type": "reasoning", "status": "in_progress", "summary": [], "content": []}),
                json!({"type": "reasoning_text", "text": ""}),
            ),
            _ => (
                json!({"id": id("msg"), "type": "message", "role": "assistant", "status": "in_progress", "content": []}),
                json!({"type": "output_text", "text": "", "annotations": [], "logprobs": []}),
            ),
        };
        self.begin_item(kind, item, events);
        if let Some(last) = self.items.last_mut() {
            last["content"] = json!([part]);
        }
        self.push_of_part("response.content_part.added", json!({"part": part}), events);
    }

    /// Closes the open item.
    fn close(&mut self, status: &str, events: &mut VecDeque<String>) {
        let Some(kind) = self.open.take() else { return };
        let told = std::mem::take(&mut self.told);
        if let Some(last) = self.items.last_mut() {
            last["status"] = json!(status);
            if kind == ItemKind::Message {
                last["content"][0]["logprobs"] = json!(told);
            }
        }
        let item = self.item();
        if kind == ItemKind::Call {
            let done = json!({"item_id": item["id"], "name": item["name"], "arguments": item["arguments"]});
            self.push_of_item("response.function_call_arguments.done", done, events);
        } else {
            let part = &item["content"][0];
            let (name, done) = match kind {
                ItemKind::Message => {
                    ("response.output_text.done", json!({"text": part["text"], "logprobs": told}))
                }
                _ => ("response.reasoning_text.done", json!({"text": part["text"]})),
            };
            self.push_of_part(name, done, events);
            self.push_of_part("response.content_part.done", json!({"part": part}), events);
        }
        self.push_of_item("response.output_item.done", json!({"item": item}), events);
    }

    fn push_delta(&mut self, delta: ReplyDelta, events: &mut VecDeque<String>) {
        match delta {
            ReplyDelta::Text(more) if !more.is_empty() => {
                self.turn_to(ItemKind::Message, events);
                self.append("/content/0/text", &more);
                let logprobs = self.untold.take(&more);
                self.told.extend(logprobs.iter().cloned());
                let delta = json!({"delta": more, "logprobs": logprobs});
                self.push_of_part("response.output_text.delta", delta, events);
            }
            ReplyDelta::Thought(more) if !more.is_empty() => {
                self.untold.clear();
                self.turn_to(ItemKind::Thoughts, events);
                self.append("/content/0/text", &more);
                self.push_of_part("response.reasoning_text.delta", json!({"delta": more}), events);
            }
            ReplyDelta::Call(call) => {
                self.untold.clear();
                let item = json!({
                    "id": fresh_id("fc").replace('-', "_"), "type": "function_call", "status": "in_progress",
                    "call_id": answer::call_id(self.model), "name": call.name, "arguments": "",
                });
                self.begin_item(ItemKind::Call, item, events);
                self.push_delta(ReplyDelta::Arguments(call.arguments), events);
            }
            ReplyDelta::Arguments(more) if !more.is_empty() && self.open == Some(ItemKind::Call) => {
                self.append("/arguments", &more);
                let delta = json!({"item_id": self.item_id(), "delta": more});
                self.push_of_item("response.function_call_arguments.delta", delta, events);
            }
            ReplyDelta::ExtraCall => self.untold.clear(),
            ReplyDelta::Text(_) | ReplyDelta::Thought(_) | ReplyDelta::Arguments(_) => {}
        }
    }

    /// The object, as it is now.
    fn object(&mut self, status: &str) -> Value {
        self.response["status"] = json!(status);
        self.response["output"] = json!(self.items);
        json!({"response": self.response})
    }
}

impl EventWriter for ResponseWriter {
    fn begin(&mut self, events: &mut VecDeque<String>) {
        for kind in ["response.created", "response.in_progress"] {
            let object = self.object("in_progress");
            self.push(kind, object, events);
        }
    }

    fn step(&mut self, _: usize, step: ChoiceStep, events: &mut VecDeque<String>) {
        let mut told = Value::Null;
        if self.tells_tokens {
            told = answer::logprobs(AnswerKind::Chat, self.model, &step.tokens)["content"].take();
        }
        let mut deltas = step.deltas.into_iter();
        let mut pushed = 0;
        for (token, logprob) in step.tokens.iter().zip(told.as_array_mut().into_iter().flatten()) {
            while pushed < token.deltas
                && let Some(delta) = deltas.next()
            {
                self.push_delta(delta, events);
                pushed += 1;
            }
            let is_silent = tokens::is_silent(&self.model.tokenizer, token.token);
            let bytes = if is_silent { &[] } else { self.model.bytes(token.token) };
            self.untold.push(logprob.take(), bytes.to_vec());
        }
        deltas.for_each(|delta| self.push_delta(delta, events));
        self.end = self.end.or(step.end);
    }

    fn end(&mut self, choices: &[Choice], events: &mut VecDeque<String>) {
        if self.items.is_empty() {
            self.turn_to(ItemKind::Message, events);
        }
        let is_cut = self.end == Some("length");
        let status = if is_cut { "incomplete" } else { "completed" };
        self.close(status, events);
        let sum = |count: fn(&Choice) -> usize| choices.iter().map(count).sum::<usize>();
        let (prompt, written) = (self.prompt_tokens, sum(|choice| choice.counts.tokens));
        self.response["usage"] = json!({
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": sum(|choice| choice.counts.cached).min(prompt), "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": sum(|choice| choice.counts.thoughts)},
            "total_tokens": prompt + written,
        });
        if is_cut {
            self.response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        } else {
            self.response["completed_at"] = json!(jiff::Timestamp::now().as_second());
        }
        let object = self.object(status);
        self.push(&format!("response.{status}"), object, events);
    }

    fn fail(&mut self, error: &ApiError, events: &mut VecDeque<String>) {
        self.response["error"] = json!({"code": "server_error", "message": error.message});
        if let Some(last) = self.items.last_mut().filter(|_| self.open.is_some()) {
            last["status"] = json!("incomplete");
        }
        let object = self.object("failed");
        self.push("response.failed", object, events);
    }
}
