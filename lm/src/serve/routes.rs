//! What each path answers.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderName, HeaderValue, Response, StatusCode, Uri, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::routing::{any, get, post};
use axum::{Extension, Router};
use candle_lm::serve::{RequestError, RequestQueue, ServeStatus};
use candle_lm::tokens;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::time::sleep;

use super::access::Client;
use super::answer::{self, AnswerFrame, AnswerPlan, TextParts};
use super::api_error::{ApiError, ApiResult};
use super::body::RequestBody;
use super::choice::{Choice, ChoicePlan, ChoiceStep};
use super::chunks::ChunkWriter;
use super::embeddings;
use super::events::{EventBody, EventWriter};
use super::fields::{self, Fields, wrong};
use super::front::FrontOptions;
use super::metrics::{Metrics, RequestRecord};
use super::model::ServedModel;
use super::parameters::check_model;
use super::prep::{PrepThread, RequestContext};
use super::response_writer::ResponseWriter;
use super::{chat, completion, openapi, responses};

/// A stream begins without its first token after so long, so that what is between it and the client knows that it lives.
const FIRST: Duration = Duration::from_secs(10);
/// A pass that takes longer than this is none.
const LONGEST_PASS: Duration = Duration::from_secs(300);

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// What all requests share.
pub(super) struct FrontState {
    model: &'static ServedModel,
    queue: RequestQueue,
    options: FrontOptions,
    metrics: Metrics,
    prep: PrepThread,
    /// What `/openapi.json` says.
    described: String,
    /// The bytes of bodies that are kept at once.
    bodies: Arc<Semaphore>,
}

/// How many bodies of the largest size are kept at once.
const LARGE_BODIES: usize = 4;

impl FrontState {
    pub(super) fn new(
        model: &'static ServedModel,
        queue: RequestQueue,
        options: FrontOptions,
        bodies: usize,
    ) -> io::Result<Self> {
        let prep = PrepThread::start(bodies)?;
        let bytes = options.limits.body.saturating_mul(LARGE_BODIES).min(Semaphore::MAX_PERMITS);
        let bodies = Arc::new(Semaphore::new(bytes));
        let described = openapi::described(model.vocab_size, options.limits.texts);
        let metrics = Metrics::new(model.names().count());
        Ok(Self { model, queue, options, metrics, prep, described, bodies })
    }

    /// The state of the engine, if it takes requests.
    fn open(&self) -> ApiResult<(ServeStatus, usize)> {
        let status = self.queue.status();
        if let Some(cause) = &status.failure {
            return Err(ApiError::failed(cause));
        }
        if status.is_draining {
            return Err(ApiError::unavailable("The server is about to end and takes no more requests."));
        }
        let room = status.room.ok_or_else(|| ApiError::unavailable("Loading model"))?;
        Ok((status, room))
    }
}

type FrontHandle = State<Arc<FrontState>>;

/// Who sent a request, and its name.
#[derive(Clone, Debug)]
struct RequestHead {
    id: String,
    client: Client,
}

/// The paths.
pub(super) fn router(state: Arc<FrontState>) -> Router {
    let missing = |request: Request| async move { ApiError::no_route(request.uri().path()).response() };
    let wrong_method = || async { ApiError::wrong_method().response() };
    Router::new()
        .route("/", get(page))
        .route("/openapi.json", get(openapi))
        .route("/health", get(health))
        .route("/ready", get(ready))
        .route("/metrics", get(metrics))
        .route("/v1/models", get(models))
        .route("/v1/models/{*id}", get(model))
        .route("/v1/chat/completions", post(chat_completions))
        .route("/v1/completions", post(completions))
        .route("/v1/responses", post(responses))
        .route("/v1/responses/{*id}", any(stored_response))
        .route("/v1/embeddings", post(embeddings))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .fallback(missing)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(state.clone(), guard))
        .with_state(state)
}

/// What those without a key may see: that the server lives, and what it could do for them.
const OPEN: [&str; 4] = ["/", "/health", "/ready", "/openapi.json"];

/// Refuses strangers, and names each request.
async fn guard(State(state): FrontHandle, mut request: Request, next: Next) -> Response<Body> {
    let given = request.headers().get(REQUEST_ID).and_then(|id| id.to_str().ok());
    let given = given
        .filter(|id| !id.is_empty() && id.len() <= 128 && id.bytes().all(|byte| byte.is_ascii_graphic()));
    let id = given.map_or_else(|| answer::fresh_id("req"), str::to_owned);
    let access = &state.options.access;
    let is_open = OPEN.contains(&request.uri().path());
    let client = access.check_host(request.headers()).and_then(|()| match is_open {
        true => Ok(Client::default()),
        false => access.client(request.headers()),
    });
    let mut response = match client {
        Ok(client) => {
            request.extensions_mut().insert(RequestHead { id: id.clone(), client });
            next.run(request).await
        }
        Err(error) => error.response(),
    };
    if let Ok(id) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    if response.status() == StatusCode::PAYLOAD_TOO_LARGE || response.status() == StatusCode::REQUEST_TIMEOUT
    {
        // The rest of the body is not read.
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

fn of_type(kind: &'static str, body: impl Into<Body>) -> Response<Body> {
    let mut response = Response::new(body.into());
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

async fn page() -> Response<Body> {
    let mut response = of_type("text/html; charset=utf-8", include_str!("page.html"));
    let policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'";
    response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(policy));
    response
}

async fn openapi(State(state): FrontHandle) -> Response<Body> {
    of_type("application/json", state.described.clone())
}

/// Whether the process lives and its model goes on.
async fn health(State(state): FrontHandle) -> Response<Body> {
    let status = state.queue.status();
    let is_stuck = status.running > 0 && status.since_pass.is_some_and(|since| since > LONGEST_PASS);
    match &status.failure {
        Some(cause) => ApiError::failed(cause).response(),
        None if is_stuck => ApiError::unavailable("No pass of the model has ended for minutes.").response(),
        None => answer::json(StatusCode::OK, &json!({"status": "ok"})),
    }
}

/// Whether requests are taken.
async fn ready(State(state): FrontHandle) -> Response<Body> {
    match state.open() {
        Ok(_) => answer::json(StatusCode::OK, &json!({"status": "ok"})),
        Err(error) => error.response(),
    }
}

async fn metrics(State(state): FrontHandle) -> Response<Body> {
    let spans = state.options.spans.as_deref();
    let text = state.metrics.text(state.model.names(), &state.queue.status(), spans);
    of_type("text/plain; version=0.0.4; charset=utf-8", text)
}

fn model_object(state: &FrontState, name: &str) -> Value {
    let ServedModel { name: base, created, .. } = state.model;
    let parent = (name != base).then_some(base);
    json!({
        "id": name, "object": "model", "created": created, "owned_by": "candle-lm", "parent": parent,
        "max_model_len": state.queue.status().room,
    })
}

async fn models(State(state): FrontHandle) -> Response<Body> {
    let all: Vec<Value> = state.model.names().map(|name| model_object(&state, name)).collect();
    answer::json(StatusCode::OK, &json!({"object": "list", "data": all}))
}

async fn model(
    State(state): FrontHandle,
    id: Result<Path<String>, PathRejection>,
    uri: Uri,
) -> Response<Body> {
    // What is no UTF-8 is the name of no model.
    match id {
        Ok(Path(id)) if state.model.names().any(|name| name == id) => {
            answer::json(StatusCode::OK, &model_object(&state, &id))
        }
        Ok(Path(id)) => ApiError::no_model(&id, state.model.names()).response(),
        Err(_) => ApiError::no_route(uri.path()).response(),
    }
}

/// Reads a body on the thread for it.
async fn read<T: Send + 'static>(
    state: &Arc<FrontState>,
    head: &RequestHead,
    record: &RequestRecord,
    request: Request,
    f: impl FnOnce(Fields, &RequestContext<'_>) -> ApiResult<T> + Send + 'static,
) -> ApiResult<T> {
    let (_, room) = state.open()?;
    let (parts, sent) = request.into_parts();
    let body = RequestBody::read(&state.bodies, state.options.limits.body, &parts.headers, sent).await?;
    let (shared, client, arrival) = (state.clone(), head.client.clone(), record.arrival());
    let run = move || {
        let limits = &shared.options.limits;
        let context = RequestContext { model: shared.model, limits, client: &client, arrival, room };
        let RequestBody { bytes, permit } = body;
        let fields = Fields::parse(&bytes);
        drop((bytes, permit));
        f(fields?, &context)
    };
    state.prep.run(run).await
}

fn record(state: &FrontState, head: &RequestHead, route: &'static str) -> RequestRecord {
    RequestRecord::new(
        state.metrics.clone(),
        state.options.logs,
        head.id.clone(),
        route,
        head.client.name.as_deref(),
    )
}

async fn chat_completions(
    State(state): FrontHandle,
    Extension(head): Extension<RequestHead>,
    request: Request,
) -> Response<Body> {
    let record = record(&state, &head, "/v1/chat/completions");
    write(state, head, record, request, chat::plan).await
}

async fn completions(
    State(state): FrontHandle,
    Extension(head): Extension<RequestHead>,
    request: Request,
) -> Response<Body> {
    let record = record(&state, &head, "/v1/completions");
    write(state, head, record, request, completion::plan).await
}

async fn responses(
    State(state): FrontHandle,
    Extension(head): Extension<RequestHead>,
    request: Request,
) -> Response<Body> {
    let record = record(&state, &head, "/v1/responses");
    write(state, head, record, request, responses::plan).await
}

/// No response is kept.
async fn stored_response() -> Response<Body> {
    ApiError::not_stored().response()
}

/// Answers with texts.
async fn write(
    state: Arc<FrontState>,
    head: RequestHead,
    mut record: RequestRecord,
    request: Request,
    plan: fn(Fields, &RequestContext<'_>) -> ApiResult<AnswerPlan>,
) -> Response<Body> {
    let planned = read(&state, &head, &record, request, plan).await;
    let answered = match planned {
        Ok(plan) => texts(&state, &mut record, plan).await,
        Err(error) => Err(error),
    };
    match answered {
        Ok(Texts::Whole(answer)) => {
            record.end(200);
            answer::json(StatusCode::OK, &answer)
        }
        Ok(Texts::Stream(begin)) => begin(record).response(),
        Err(error) => {
            record.end(error.status.as_u16());
            error.response()
        }
    }
}

/// An answer with texts, or what makes one of the record of its request.
enum Texts {
    Whole(Value),
    Stream(Box<dyn FnOnce(RequestRecord) -> EventBody + Send>),
}

async fn texts(state: &FrontState, record: &mut RequestRecord, plan: AnswerPlan) -> ApiResult<Texts> {
    let model = state.model;
    let AnswerPlan { kind, choices: plans, prompt_tokens, texts_of_prompt, response, streams, param, .. } =
        plan;
    let includes_usage = plan.includes_usage;
    let tells_tokens = plans.first().is_some_and(|plan| plan.request.logprobs.is_some());
    let adapter = plans.first().and_then(|plan| plan.request.adapter);
    let name = model.name_with(adapter);
    record.begin(prompt_tokens, adapter);
    let (mut requests, plans): (Vec<_>, Vec<_>) = plans.into_iter().map(ChoicePlan::split).unzip();
    requests.iter_mut().for_each(|request| request.span = record.span.clone());
    let events = state.queue.submit_all(requests).map_err(|error| ApiError::of_submit(error, param))?;
    let texts = events.into_iter().zip(plans).enumerate();
    let mut choices: Vec<Choice> =
        texts.map(|(index, (events, plan))| Choice::new(index, model, events, plan)).collect();
    let frame = AnswerFrame::new(kind, name, (prompt_tokens, texts_of_prompt));
    let responds = response.map(|response| ResponseWriter::new(model, response, prompt_tokens, tells_tokens));
    if streams {
        // What fails before its first token is no stream.
        let mut first = Vec::new();
        let mut late = std::pin::pin!(sleep(FIRST));
        while !choices.iter().any(|choice| choice.counts.tokens > 0 || choice.is_over()) {
            tokio::select! {
                step = any_step(&mut choices, record) => first.push(step?),
                () = late.as_mut() => break,
            }
        }
        let writer: Box<dyn EventWriter> = match responds {
            Some(writer) => Box::new(writer),
            None => Box::new(ChunkWriter::new(frame, model, choices.len(), (includes_usage, tells_tokens))),
        };
        return Ok(Texts::Stream(Box::new(move |record| EventBody::new(writer, choices, first, record))));
    }
    if let Some(mut writer) = responds {
        let mut events = VecDeque::new();
        while !choices.iter().all(Choice::is_over) {
            let (index, step) = any_step(&mut choices, record).await?;
            writer.step(index, step, &mut events);
            events.clear();
        }
        writer.end(&choices, &mut events);
        record.finish(&mut choices, 200);
        return Ok(Texts::Whole(writer.into_response()));
    }
    let mut parts: Vec<TextParts> = choices.iter().map(|_| TextParts::default()).collect();
    while !choices.iter().all(Choice::is_over) {
        let (index, step) = any_step(&mut choices, record).await?;
        step.deltas.into_iter().for_each(|delta| parts[index].push(delta, model));
        parts[index].tokens.extend(step.tokens);
        parts[index].end = parts[index].end.or(step.end);
    }
    record.finish(&mut choices, 200);
    let parts =
        parts.into_iter().enumerate().map(|(index, parts)| parts.choice(index, kind, model, tells_tokens));
    Ok(Texts::Whole(frame.whole(parts.collect(), &choices)))
}

/// The next step of any of the texts.
async fn any_step(choices: &mut [Choice], record: &mut RequestRecord) -> ApiResult<(usize, ChoiceStep)> {
    let step = poll_fn(|context| {
        for (index, choice) in choices.iter_mut().enumerate() {
            if let Poll::Ready(step) = choice.poll_step(context) {
                return Poll::Ready(step.map(|step| (index, step)));
            }
        }
        match choices.iter().all(Choice::is_over) {
            true => Poll::Ready(Err(RequestError::Stopped)),
            false => Poll::Pending,
        }
    });
    let (index, step) = step.await.map_err(|error| ApiError::of_request(&error))?;
    record.note(&mut choices[index]);
    Ok((index, step))
}

async fn embeddings(
    State(state): FrontHandle,
    Extension(head): Extension<RequestHead>,
    request: Request,
) -> Response<Body> {
    let mut record = record(&state, &head, "/v1/embeddings");
    let answered = match read(&state, &head, &record, request, embeddings::plan).await {
        Ok(plan) => plan.answer(&state.queue, &mut record, &state.model.name).await,
        Err(error) => Err(error),
    };
    let (status, response) = match answered {
        Ok(value) => (StatusCode::OK, answer::json(StatusCode::OK, &value)),
        Err(error) => (error.status, error.response()),
    };
    record.end(status.as_u16());
    response
}

/// Answers with a value that is read from a body.
async fn value(
    (state, head, request): (Arc<FrontState>, RequestHead, Request),
    route: &'static str,
    f: fn(Fields, &RequestContext<'_>) -> ApiResult<Value>,
) -> Response<Body> {
    let mut record = record(&state, &head, route);
    let (status, response) = match read(&state, &head, &record, request, f).await {
        Ok(value) => (StatusCode::OK, answer::json(StatusCode::OK, &value)),
        Err(error) => (error.status, error.response()),
    };
    record.end(status.as_u16());
    response
}

async fn tokenize(
    State(state): FrontHandle,
    Extension(head): Extension<RequestHead>,
    request: Request,
) -> Response<Body> {
    value((state, head, request), "/tokenize", |fields, context| {
        let model = context.model;
        check_model(&fields, model)?;
        let (content, prompt) = (fields.text("content")?, fields.text("prompt")?);
        let adds = fields.flag("add_special")?.or(fields.flag("add_special_tokens")?);
        let tokens = match content.or(prompt) {
            None if fields.get("messages").is_some() => chat::tokens_of(fields, context)?,
            None => {
                return Err(ApiError::invalid(
                    "content",
                    "There is no `content`, `prompt` or `messages`: give one of them.",
                ));
            }
            Some(text) => {
                context.check_bytes(text.len(), "content")?;
                let adds = adds.unwrap_or(content.is_none());
                let made =
                    if adds { model.tokens(text) } else { tokens::encode_part(&model.tokenizer, text) };
                made.map_err(|error| ApiError::invalid("content", format!("{error:#}.")))?
            }
        };
        Ok(json!({"count": tokens.len(), "max_model_len": context.room, "tokens": tokens}))
    })
    .await
}

async fn detokenize(
    State(state): FrontHandle,
    Extension(head): Extension<RequestHead>,
    request: Request,
) -> Response<Body> {
    value((state, head, request), "/detokenize", |fields, context| {
        const NAME: &str = "tokens";
        let model = context.model;
        check_model(&fields, model)?;
        let list = fields.list(NAME)?.ok_or_else(|| ApiError::invalid(NAME, "There are no `tokens`."))?;
        let most = model.vocab_size;
        let token = |value: &Value| {
            let known = || wrong(NAME, value, &format!("tokens from 0 to {}", most.saturating_sub(1)));
            fields::token(value, most).ok_or_else(known)
        };
        let tokens = list.iter().map(token).collect::<ApiResult<Vec<u32>>>()?;
        let text = model
            .tokenizer
            .decode(&tokens, false)
            .map_err(|error| ApiError::invalid(NAME, format!("{error}.")))?;
        Ok(json!({"content": text, "prompt": text}))
    })
    .await
}
