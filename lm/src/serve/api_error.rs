//! What a client gets in the place of an answer.

use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, Response, StatusCode, header};
use candle_lm::serve::{RequestError, SubmitError};
use serde_json::{Value, json};

/// An error as the OpenAI API has it: a status, and an object that says what to change.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ApiError {
    pub(super) status: StatusCode,
    kind: &'static str,
    code: Option<&'static str>,
    param: Option<String>,
    pub(super) message: String,
    retry_after: Option<Duration>,
}

/// The outcome of a part of a request.
pub(super) type ApiResult<T> = Result<T, ApiError>;

const INVALID: &str = "invalid_request_error";

/// After what time a client may try again where nobody knows better.
const RETRY: Duration = Duration::from_secs(5);
/// Clients of OpenAI do not try again at all above this.
const LONGEST_RETRY: Duration = Duration::from_secs(120);

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, code: None, param: None, message: message.into(), retry_after: None }
    }

    /// The request cannot work; a field of it, if one is named, is the cause.
    pub(super) fn invalid(param: impl Into<Option<&'static str>>, message: impl Into<String>) -> Self {
        let param = param.into().map(str::to_owned);
        Self { param, ..Self::new(StatusCode::BAD_REQUEST, INVALID, message) }
    }

    /// A prompt has `tokens` tokens, with `wanted` more to write, and a text has room for `room`.
    pub(super) fn too_long(room: usize, tokens: usize, wanted: usize, param: &'static str) -> Self {
        let wanted = if wanted == 0 { String::new() } else { format!(", and at least {wanted} to write") };
        let message = format!(
            "This model's maximum context length is {room} tokens. However, your prompt has {tokens} tokens{wanted}. \
             Please shorten it."
        );
        Self { code: Some("context_length_exceeded"), ..Self::invalid(param, message) }
    }

    /// A prompt has so many bytes that it cannot have few enough tokens.
    pub(super) fn surely_too_long(room: usize, bytes: usize, param: &'static str) -> Self {
        let message = format!(
            "This model's maximum context length is {room} tokens. However, your prompt has {bytes} bytes, which are \
             more tokens in any case. Please shorten it."
        );
        Self { code: Some("context_length_exceeded"), ..Self::invalid(param, message) }
    }

    /// The same with another name of a field, which is what the client calls it.
    pub(super) fn renamed(mut self, name: &str, own: &str) -> Self {
        if self.param.as_deref() == Some(name) {
            self.param = Some(own.to_owned());
        }
        self.message = self.message.replace(&format!("`{name}`"), &format!("`{own}`"));
        self
    }

    /// The key is not there, or not a known one.
    pub(super) fn unauthorized() -> Self {
        Self {
            code: Some("invalid_api_key"),
            ..Self::new(
                StatusCode::UNAUTHORIZED,
                INVALID,
                "Incorrect API key provided: send a known one as `Authorization: Bearer KEY`.",
            )
        }
    }

    /// A name of a host that this server does not have.
    pub(super) fn strange_host() -> Self {
        Self::new(
            StatusCode::FORBIDDEN,
            INVALID,
            "The header Host names another host than this one: use localhost, or let the server listen on --host.",
        )
    }

    /// There is no such model.
    pub(super) fn no_model<'a>(wanted: &str, names: impl Iterator<Item = &'a str>) -> Self {
        let wanted: String = wanted.chars().take(200).collect();
        let names: Vec<String> = names.map(|name| format!("{name:?}")).collect();
        Self {
            code: Some("model_not_found"),
            param: Some("model".into()),
            ..Self::new(
                StatusCode::NOT_FOUND,
                INVALID,
                format!("The model {wanted:?} does not exist: this server has {}.", names.join(", ")),
            )
        }
    }

    /// There is no such page.
    pub(super) fn no_route(path: &str) -> Self {
        let path: String = path.chars().take(200).collect();
        Self {
            code: Some("not_found"),
            ..Self::new(
                StatusCode::NOT_FOUND,
                INVALID,
                format!("There is no {path:?} here: see /openapi.json."),
            )
        }
    }

    /// A response of the past.
    pub(super) fn not_stored() -> Self {
        Self {
            code: Some("not_found"),
            ..Self::new(
                StatusCode::NOT_FOUND,
                INVALID,
                "No response is stored here: send all of the conversation as `input`.",
            )
        }
    }

    /// The page takes other methods.
    pub(super) fn wrong_method() -> Self {
        Self {
            code: Some("method_not_allowed"),
            ..Self::new(
                StatusCode::METHOD_NOT_ALLOWED,
                INVALID,
                "This path takes another method: see /openapi.json.",
            )
        }
    }

    /// The body is not said to be JSON.
    pub(super) fn not_json() -> Self {
        Self::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            INVALID,
            "The body is not said to be JSON: send `Content-Type: application/json`.",
        )
    }

    /// The body is compressed, for example.
    pub(super) fn encoded() -> Self {
        Self::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            INVALID,
            "The body has a Content-Encoding, and is read as it is: send plain JSON.",
        )
    }

    /// The body has more bytes than the server reads.
    pub(super) fn too_large(most: usize) -> Self {
        Self {
            code: Some("request_too_large"),
            ..Self::new(
                StatusCode::PAYLOAD_TOO_LARGE,
                INVALID,
                format!("The body has more than {most} bytes: send a smaller one."),
            )
        }
    }

    /// The body did not come in time, or not whole.
    pub(super) fn slow_body() -> Self {
        Self::new(StatusCode::REQUEST_TIMEOUT, INVALID, "The body of the request did not arrive in time.")
    }

    /// More than the server can do now.
    pub(super) fn busy(message: impl Into<String>, retry_after: Duration) -> Self {
        Self {
            code: Some("rate_limit_exceeded"),
            retry_after: Some(retry_after),
            ..Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message)
        }
    }

    /// The server does not answer such requests now.
    pub(super) fn unavailable(message: impl Into<String>) -> Self {
        Self {
            code: Some("unavailable"),
            retry_after: Some(RETRY),
            ..Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable_error", message)
        }
    }

    /// The ranks have failed. What they did then is in the log, and is nothing for clients.
    pub(super) fn failed(cause: &str) -> Self {
        Self::unavailable(sentence(&format!(
            "the model has failed: {}",
            cause.lines().next().unwrap_or_default()
        )))
    }

    /// A fault of the server.
    pub(super) fn internal(message: impl Into<String>) -> Self {
        Self {
            code: Some("internal_error"),
            ..Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
        }
    }

    /// Why the engine did not take a prompt for `wanted` more tokens.
    pub(super) fn of_submit(error: SubmitError, param: &'static str) -> Self {
        match error {
            SubmitError::Full { retry_after, .. } => {
                Self::busy(format!("The queue is full: {error}."), retry_after)
            }
            SubmitError::TooLong { tokens, room } => Self::too_long(room, tokens, 1, param),
            SubmitError::Invalid(why) => Self::invalid(None, why),
            SubmitError::Loading | SubmitError::Draining => Self::unavailable(sentence(&error.to_string())),
            SubmitError::Failed(cause) => Self::failed(&cause),
        }
    }

    /// Why a request that the engine took has failed.
    pub(super) fn of_request(error: &RequestError) -> Self {
        match error {
            RequestError::Deadline | RequestError::Stopped => Self::unavailable(sentence(&error.to_string())),
            RequestError::World(cause) => Self::failed(cause),
            RequestError::Logits(_) => Self::internal(sentence(&error.to_string())),
            RequestError::Constraint(_) => Self::invalid("response_format", sentence(&error.to_string())),
        }
    }

    /// The object.
    pub(super) fn json(&self) -> Value {
        let Self { kind, code, param, message, .. } = self;
        json!({"error": {"message": message, "type": kind, "param": param, "code": code}})
    }

    /// The response.
    pub(super) fn response(&self) -> Response<Body> {
        let mut response = super::answer::json(self.status, &self.json());
        let headers = response.headers_mut();
        if let Some(after) = self.retry_after {
            let seconds = after.min(LONGEST_RETRY).as_secs().max(1);
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if self.status == StatusCode::INTERNAL_SERVER_ERROR {
            headers.insert("x-should-retry", HeaderValue::from_static("false"));
        }
        response
    }
}

/// The words as a sentence.
fn sentence(words: &str) -> String {
    let mut letters = words.chars();
    let first: String = letters.next().into_iter().flat_map(char::to_uppercase).collect();
    format!("{first}{}.", letters.as_str().trim_end_matches('.'))
}
