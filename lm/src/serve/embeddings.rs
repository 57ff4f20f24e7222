//! Embeddings: the fields of `/v1/embeddings`.

use std::future::poll_fn;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use candle_lm::serve::{RequestQueue, ServeRequest, TokenEvent};
use serde_json::{Value, json};

use super::api_error::{ApiError, ApiResult};
use super::fields::{self, Fields, wrong};
use super::metrics::RequestRecord;
use super::parameters::{Neutral, check_model, refuse_undone};
use super::prep::RequestContext;

/// The field with the texts.
const INPUT: &str = "input";
/// The most texts of a request, as OpenAI has it.
pub(super) const MOST_INPUTS: usize = 2048;

/// Fields of other servers that change embeddings, and what each may say here: that it changes nothing.
const UNDONE: [(&str, &[Neutral]); 11] = [
    ("activation", &[Neutral::True]),
    ("add_special_tokens", &[Neutral::True]),
    ("embd_normalize", &[Neutral::Number(2.0)]),
    ("input_type", &[Neutral::Empty]),
    ("instruction", &[Neutral::Empty]),
    ("normalize", &[Neutral::True]),
    ("normalized", &[Neutral::True]),
    ("prompt", &[Neutral::Empty]),
    ("prompt_name", &[Neutral::Empty]),
    ("task", &[Neutral::Empty]),
    ("use_activation", &[Neutral::True]),
];

/// The texts whose embeddings a request asks for.
pub(super) struct EmbeddingPlan {
    requests: Vec<ServeRequest>,
    form: EmbeddingForm,
    /// The tokens of all of them.
    tokens: usize,
}

/// How the numbers of an embedding are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EmbeddingForm {
    Numbers,
    /// The bytes of numbers of 32 bits, the lowest one first.
    Base64,
}

/// Reads texts, and plans their embeddings.
pub(super) fn plan(fields: Fields, context: &RequestContext<'_>) -> ApiResult<EmbeddingPlan> {
    let model = context.model;
    check_model(&fields, model)?;
    let Some(width) = model.embedding else {
        let why = format!(
            "The model {:?} writes text and has no embeddings: ask a server of an encoder.",
            model.name
        );
        return Err(ApiError::invalid("model", why));
    };
    if fields.count("dimensions", 1, u64::from(u32::MAX))?.is_some_and(|wanted| wanted != width as u64) {
        let why = format!("`dimensions` is not supported: embeddings have {width} numbers.");
        return Err(ApiError::invalid("dimensions", why));
    }
    fields.refuse(&["truncate_prompt_tokens"], "texts are never cut")?;
    refuse_undone(&fields, "the embeddings", &UNDONE)?;
    let form = match fields.text("encoding_format")? {
        None | Some("float") => EmbeddingForm::Numbers,
        Some("base64") => EmbeddingForm::Base64,
        Some(other) => return Err(wrong("encoding_format", &json!(other), "float or base64")),
    };
    let texts = texts(&fields, context)?;
    let tokens = texts.iter().map(Vec::len).sum();
    let request = |prompt: Vec<u32>| ServeRequest {
        deadline: Some(context.arrival + context.limits.time),
        client: context.client.salt,
        ..ServeRequest::new(prompt, 0)
    };
    Ok(EmbeddingPlan { requests: texts.into_iter().map(request).collect(), form, tokens })
}

/// The tokens of the texts: a text, texts, tokens, or lists of tokens.
fn texts(fields: &Fields, context: &RequestContext<'_>) -> ApiResult<Vec<Vec<u32>>> {
    let wanted = "a string, a list of strings, a list of tokens, or a list of such lists";
    let missing = || ApiError::invalid(INPUT, format!("`{INPUT}` is missing: give {wanted}."));
    let given = fields.get(INPUT).ok_or_else(missing)?;
    let one = |text: &Value| {
        let tokens = match text {
            Value::String(text) if !text.is_empty() => {
                context.check_bytes(text.len(), INPUT)?;
                let made = context.model.tokens(text);
                made.map_err(|error| ApiError::invalid(INPUT, format!("{error:#}.")))?
            }
            Value::Array(list) if !list.is_empty() => {
                list.iter().map(|token| of_token(token, context)).collect::<ApiResult<_>>()?
            }
            other => return Err(wrong(INPUT, other, wanted)),
        };
        match tokens.len() > context.room {
            true => Err(ApiError::too_long(context.room, tokens.len(), 0, INPUT)),
            false => Ok(tokens),
        }
    };
    match given {
        Value::Array(list) if list.iter().all(Value::is_number) => Ok(vec![one(given)?]),
        Value::Array(list) if list.len() > MOST_INPUTS => Err(ApiError::invalid(
            INPUT,
            format!("`{INPUT}` has {} texts, and at most {MOST_INPUTS} are read at once.", list.len()),
        )),
        Value::Array(list) => list.iter().map(one).collect(),
        text => Ok(vec![one(text)?]),
    }
}

fn of_token(token: &Value, context: &RequestContext<'_>) -> ApiResult<u32> {
    let most = context.model.vocab_size;
    let known = || wrong(INPUT, token, &format!("tokens from 0 to {}", most.saturating_sub(1)));
    fields::token(token, most).ok_or_else(known)
}

impl EmbeddingPlan {
    /// Submits the texts, all of them or none, and waits for their embeddings.
    ///
    /// # Errors
    /// Why the engine did not take them, or failed.
    pub(super) async fn answer(
        self,
        queue: &RequestQueue,
        record: &mut RequestRecord,
        model: &str,
    ) -> ApiResult<Value> {
        let Self { mut requests, form, tokens } = self;
        record.begin(tokens, None);
        requests.iter_mut().for_each(|request| request.span = record.span.clone());
        let streams = queue.submit_all(requests).map_err(|error| ApiError::of_submit(error, INPUT))?;
        let mut vectors = Vec::new();
        for mut stream in streams {
            vectors.push(loop {
                match poll_fn(|context| stream.poll_event(context)).await {
                    Some(TokenEvent::Begun { admitted, .. }) => record.admit(admitted),
                    Some(TokenEvent::Embedded(vector)) => break vector,
                    Some(TokenEvent::Failed(error)) => return Err(ApiError::of_request(&error)),
                    _ => return Err(ApiError::internal("The model gave no embedding.")),
                }
            });
        }
        Ok(form.answer(model, &vectors, tokens))
    }
}

impl EmbeddingForm {
    /// The answer with these embeddings, of texts of so many tokens.
    fn answer(self, model: &str, vectors: &[Vec<f32>], tokens: usize) -> Value {
        let one = |(index, vector): (usize, &Vec<f32>)| {
            let numbers = match self {
                Self::Numbers => json!(vector),
                Self::Base64 => {
                    json!(STANDARD.encode(vector.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>()))
                }
            };
            json!({"object": "embedding", "index": index, "embedding": numbers})
        };
        json!({
            "object": "list",
            "data": vectors.iter().enumerate().map(one).collect::<Vec<_>>(),
            "model": model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        })
    }
}
