//! Texts that are continued: the fields of `/v1/completions`.

use candle_lm::tokens;
use serde_json::Value;

use super::answer::{AnswerKind, AnswerPlan};
use super::api_error::{ApiError, ApiResult};
use super::chat;
use super::choice::ChoicePlan;
use super::fields::{self, Fields, wrong};
use super::parameters::{Parameters, tail};
use super::prep::RequestContext;
use super::reply::ReplyForm;

/// The most tokens where a request does not say, as OpenAI has it.
const MOST: usize = 16;

/// Reads prompts, and plans what follows them.
pub(super) fn plan(mut fields: Fields, context: &RequestContext<'_>) -> ApiResult<AnswerPlan> {
    const NAME: &str = "prompt";
    fields.refuse(&["suffix"], "text in the middle is not written")?;
    fields.refuse(&["messages", "tools"], "a text has none: use /v1/chat/completions")?;
    let logprobs = match fields.get("logprobs") {
        Some(Value::Bool(false)) => None,
        Some(Value::Bool(true)) => Some(1),
        _ => fields.count("logprobs", 0, 20)?.map(|top| top as usize),
    };
    let parameters = Parameters::read(&fields, &["max_tokens"], logprobs, context.of_parameters())?;
    if fields
        .count("best_of", 0, context.limits.texts as u64)?
        .is_some_and(|best| best > parameters.count as u64)
    {
        return Err(ApiError::invalid(
            "best_of",
            "`best_of` is not supported: leave it out, or ask for `n` texts.",
        ));
    }
    let echoes = fields.flag("echo")?.unwrap_or(false);
    let grammar = chat::grammar_of_text(&fields, context)?;
    let prompts = prompts(&mut fields, context)?;
    let texts = prompts.len().saturating_mul(parameters.count);
    if texts > context.limits.texts {
        return Err(ApiError::invalid(
            NAME,
            format!(
                "`{NAME}` × `n` are {texts} texts, and at most {} are written at once.",
                context.limits.texts
            ),
        ));
    }
    let prompt_tokens: usize = prompts.iter().map(Vec::len).sum();
    let room = |prompt: &[u32]| context.room.saturating_sub(prompt.len());
    let most = parameters.most.unwrap_or(MOST.min(parameters.most_told(texts)));
    let written: usize = prompts.iter().map(|prompt| most.min(room(prompt))).sum();
    let told = if echoes { prompt_tokens + written } else { written };
    parameters.check_told(told.saturating_mul(parameters.count))?;
    let mut choices = Vec::new();
    for prompt in prompts {
        let room = room(&prompt);
        if room < most.min(1) || prompt.len() > context.room {
            return Err(ApiError::too_long(context.room, prompt.len(), most.min(1), NAME));
        }
        for _ in 0..parameters.count {
            let mut request = parameters.request(prompt.clone(), most.min(room), choices.len());
            request.prompt_logprobs = echoes && logprobs.is_some();
            request.constraint = grammar.as_ref().map(|grammar| Box::new(grammar.fork()) as _);
            choices.push(ChoicePlan {
                request,
                form: ReplyForm::default(),
                stops: parameters.stops.clone(),
                tail: tail(&prompt),
                echo: echoes.then(|| prompt.clone()),
                has_markers: false,
            });
        }
    }
    Ok(AnswerPlan {
        kind: AnswerKind::Completion,
        choices,
        prompt_tokens,
        texts_of_prompt: parameters.count,
        streams: parameters.streams,
        includes_usage: parameters.includes_usage,
        response: None,
        param: NAME,
    })
}

/// The tokens of the prompts: a text, texts, tokens, or lists of tokens.
fn prompts(fields: &mut Fields, context: &RequestContext<'_>) -> ApiResult<Vec<Vec<u32>>> {
    const NAME: &str = "prompt";
    let wanted = "a string, a list of strings, a list of tokens, or a list of such lists";
    let given = fields
        .take(NAME)
        .ok_or_else(|| ApiError::invalid(NAME, format!("`{NAME}` is missing: give {wanted}.")))?;
    let one = |prompt: &Value| match prompt {
        Value::String(text) => of_text(text, context),
        Value::Array(list) if !list.is_empty() => list.iter().map(|token| of_token(token, context)).collect(),
        other => Err(wrong(NAME, other, wanted)),
    };
    match &given {
        Value::Array(list) if list.iter().all(Value::is_number) => Ok(vec![one(&given)?]),
        Value::Array(list) if list.len() > context.limits.texts => Err(ApiError::invalid(
            NAME,
            format!(
                "`{NAME}` has {} texts, and at most {} are written at once.",
                list.len(),
                context.limits.texts
            ),
        )),
        Value::Array(list) => list.iter().map(one).collect(),
        prompt => Ok(vec![one(prompt)?]),
    }
}

/// The tokens of a text; the one that begins texts if there are none.
pub(super) fn of_text(text: &str, context: &RequestContext<'_>) -> ApiResult<Vec<u32>> {
    const NAME: &str = "prompt";
    context.check_bytes(text.len(), NAME)?;
    let tokens = tokens::encode_prompt(&context.model.tokenizer, text)
        .map_err(|error| ApiError::invalid(NAME, format!("{error:#}.")))?;
    if tokens.is_empty() {
        return Err(ApiError::invalid(NAME, format!("`{NAME}` is empty: give some text to go on from.")));
    }
    Ok(tokens)
}

fn of_token(token: &Value, context: &RequestContext<'_>) -> ApiResult<u32> {
    let most = context.model.vocab_size;
    fields::token(token, most)
        .ok_or_else(|| wrong("prompt", token, &format!("tokens from 0 to {}", most.saturating_sub(1))))
}
