//! What clients read: whole answers, and the chunks of streams.

use axum::body::Body;
use axum::http::{HeaderValue, Response, StatusCode, header};
use serde_json::{Map, Value, json};

use super::calls::CallFormat;
use super::choice::{Choice, ChoicePlan, ToldToken};
use super::model::ServedModel;
use super::parameters::random;
use super::reply::ReplyDelta;

/// The form of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AnswerKind {
    Chat,
    Completion,
    Response,
}

/// The texts that a request asks for.
pub(super) struct AnswerPlan {
    pub(super) kind: AnswerKind,
    pub(super) choices: Vec<ChoicePlan>,
    pub(super) prompt_tokens: usize,
    /// How many texts behind each other have one prompt.
    pub(super) texts_of_prompt: usize,
    pub(super) streams: bool,
    pub(super) includes_usage: bool,
    /// The object of a response that has not begun.
    pub(super) response: Option<Value>,
    /// The field that has the prompt.
    pub(super) param: &'static str,
}

/// What all parts of an answer have in common.
#[derive(Clone, Debug)]
pub(super) struct AnswerFrame {
    pub(super) kind: AnswerKind,
    id: String,
    created: u64,
    model: &'static ServedModelName,
    prompt_tokens: usize,
    texts_of_prompt: usize,
}

/// A model's name, which lives as long as the process.
type ServedModelName = str;

/// The likelihood of what cannot come, for clients that know no infinity.
const NEVER: f32 = -9999.0;

impl AnswerFrame {
    pub(super) fn new(
        kind: AnswerKind,
        model: &'static ServedModelName,
        (prompt_tokens, texts_of_prompt): (usize, usize),
    ) -> Self {
        let prefix = if kind == AnswerKind::Chat { "chatcmpl" } else { "cmpl" };
        let created = jiff::Timestamp::now().as_second().unsigned_abs();
        Self { kind, id: fresh_id(prefix), created, model, prompt_tokens, texts_of_prompt }
    }

    fn object(&self, streams: bool) -> &'static str {
        match (self.kind, streams) {
            (AnswerKind::Completion, _) => "text_completion",
            (_, false) => "chat.completion",
            (_, true) => "chat.completion.chunk",
        }
    }

    fn with(&self, streams: bool, choices: Vec<Value>) -> Map<String, Value> {
        let Self { id, created, model, .. } = self;
        let made = json!({
            "id": id, "object": self.object(streams), "created": created, "model": model,
            "system_fingerprint": null, "choices": choices,
        });
        made.as_object().cloned().unwrap_or_default()
    }

    /// One chunk with a part of a choice.
    pub(super) fn chunk(&self, choice: Value, tells_usage: bool) -> Value {
        let mut chunk = self.with(true, vec![choice]);
        if tells_usage {
            chunk.insert("usage".into(), Value::Null);
        }
        Value::Object(chunk)
    }

    /// The last chunk, which says what was used.
    pub(super) fn usage_chunk(&self, choices: &[Choice]) -> Value {
        let mut chunk = self.with(true, Vec::new());
        chunk.insert("usage".into(), self.usage(choices));
        Value::Object(chunk)
    }

    fn usage(&self, choices: &[Choice]) -> Value {
        let completion: usize = choices.iter().map(|choice| choice.counts.tokens).sum();
        let prompt = self.prompt_tokens;
        let of_prompt =
            |texts: &[Choice]| texts.iter().map(|choice| choice.counts.cached).max().unwrap_or_default();
        let cached: usize = choices.chunks(self.texts_of_prompt.max(1)).map(of_prompt).sum();
        let cached = cached.min(prompt);
        json!({
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        })
    }

    /// The whole answer.
    pub(super) fn whole(&self, texts: Vec<Value>, choices: &[Choice]) -> Value {
        let mut answer = self.with(false, texts);
        answer.insert("usage".into(), self.usage(choices));
        Value::Object(answer)
    }
}

/// A name that nothing else has.
pub(super) fn fresh_id(prefix: &str) -> String {
    format!("{prefix}-{:016x}{:016x}", random(), random())
}

/// A name for a call. The templates of Mistral take no other ones than those of nine letters and digits.
pub(super) fn call_id(model: &ServedModel) -> String {
    match model.calls {
        Some(CallFormat::Listed) => {
            let letters = b"0123456789abcdefghijklmnopqrstuvwxyz";
            let mut rest = random();
            let letter = |_| {
                let letter = letters[(rest % 36) as usize];
                rest /= 36;
                char::from(letter)
            };
            (0..9).map(letter).collect()
        }
        _ => fresh_id("call"),
    }
}

/// A response with a JSON body.
pub(super) fn json(status: StatusCode, value: &Value) -> Response<Body> {
    let mut response = Response::new(Body::from(value.to_string()));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// The log-probabilities of tokens, in the form of a kind of answers.
pub(super) fn logprobs(kind: AnswerKind, model: &ServedModel, tokens: &[ToldToken]) -> Value {
    let text = |token: u32| String::from_utf8_lossy(model.bytes(token)).into_owned();
    let finite = |logprob: f32| if logprob.is_finite() { logprob.max(NEVER) } else { NEVER };
    match kind {
        AnswerKind::Chat | AnswerKind::Response => {
            let entry = |token: u32, logprob: f32| json!({"token": text(token), "logprob": finite(logprob), "bytes": model.bytes(token)});
            let content = tokens.iter().map(|told| {
                let logprob = told.logprob.as_ref();
                let mut made = entry(told.token, logprob.map_or(NEVER, |known| known.logprob));
                let top = logprob
                    .into_iter()
                    .flat_map(|known| &known.top)
                    .map(|&(token, logprob)| entry(token, logprob));
                made["top_logprobs"] = top.collect();
                made
            });
            json!({"content": content.collect::<Vec<_>>(), "refusal": null})
        }
        AnswerKind::Completion => {
            let top = tokens.iter().map(|told| {
                let known = told.logprob.as_ref()?;
                // Tokens that are parts of characters look alike: the likelier one counts.
                let mut top = Map::new();
                for &(token, logprob) in known.top.iter().chain([&(told.token, known.logprob)]) {
                    top.entry(text(token)).or_insert_with(|| json!(finite(logprob)));
                }
                Some(top)
            });
            json!({
                "tokens": tokens.iter().map(|told| text(told.token)).collect::<Vec<_>>(),
                "token_logprobs": tokens.iter().map(|told| told.logprob.as_ref().map(|known| finite(known.logprob))).collect::<Vec<_>>(),
                "top_logprobs": top.collect::<Vec<_>>(),
                "text_offset": tokens.iter().map(|told| told.offset).collect::<Vec<_>>(),
            })
        }
    }
}

/// A text that grows until it is whole.
#[derive(Debug, Default)]
pub(super) struct TextParts {
    text: String,
    thoughts: String,
    calls: Vec<Value>,
    pub(super) tokens: Vec<ToldToken>,
    pub(super) end: Option<&'static str>,
}

impl TextParts {
    /// Appends a part.
    pub(super) fn push(&mut self, delta: ReplyDelta, model: &ServedModel) {
        match delta {
            ReplyDelta::Text(more) => self.text.push_str(&more),
            ReplyDelta::Thought(more) => self.thoughts.push_str(&more),
            ReplyDelta::Call(call) => self.calls.push(json!({
                "id": call_id(model),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            })),
            ReplyDelta::Arguments(more) => {
                if let Some(Value::String(arguments)) =
                    self.calls.last_mut().and_then(|call| call.pointer_mut("/function/arguments"))
                {
                    arguments.push_str(&more);
                }
            }
            ReplyDelta::ExtraCall => {}
        }
    }

    /// The choice of a whole answer.
    pub(super) fn choice(
        self,
        index: usize,
        kind: AnswerKind,
        model: &ServedModel,
        tells_tokens: bool,
    ) -> Value {
        let logprobs = if tells_tokens { logprobs(kind, model, &self.tokens) } else { Value::Null };
        let mut choice = json!({"index": index});
        match kind {
            AnswerKind::Completion => choice["text"] = json!(self.text),
            AnswerKind::Chat | AnswerKind::Response => {
                let content = if self.text.is_empty() && !self.calls.is_empty() {
                    Value::Null
                } else {
                    json!(self.text)
                };
                let mut message = json!({"role": "assistant", "content": content, "refusal": null});
                if !self.thoughts.is_empty() {
                    message["reasoning_content"] = json!(self.thoughts);
                }
                if !self.calls.is_empty() {
                    message["tool_calls"] = self.calls.into();
                }
                choice["message"] = message;
            }
        }
        choice["logprobs"] = logprobs;
        choice["finish_reason"] = json!(self.end);
        choice
    }
}
