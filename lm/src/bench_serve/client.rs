//! One request: what is sent, and when the pieces of its text come.

use std::env;
use std::io::{BufRead, BufReader, Read};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;
use ureq::Agent;
use ureq::http::Response;

/// A request that takes longer has failed.
const LONGEST: Duration = Duration::from_secs(600);
/// The most bytes of one event.
const MOST_BYTES: u64 = 1 << 24;
/// The variable with the key, as clients of OpenAI have it.
const KEY: &str = "OPENAI_API_KEY";

/// What became of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct RequestOutcome {
    /// When each piece of the text came, from when the request was sent on. A text may have none, if nobody sees its tokens.
    pub(super) pieces: Vec<Duration>,
    /// When the stream had ended.
    pub(super) whole: Duration,
    pub(super) prompt_tokens: usize,
    pub(super) tokens: usize,
    /// Why it failed, in few words that failures of a kind have in common.
    pub(super) error: Option<String>,
}

/// Sends requests to a server.
pub(super) struct ApiClient {
    agent: Agent,
    key: Option<String>,
}

impl ApiClient {
    pub(super) fn new(connections: usize) -> Self {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_idle_connections(connections)
            .max_idle_connections_per_host(connections)
            .timeout_global(Some(LONGEST));
        let key = env::var(KEY).ok().map(|key| key.trim().to_owned()).filter(|key| !key.is_empty());
        Self { agent: config.build().into(), key }
    }

    /// The name of the first model that the server lists.
    ///
    /// # Errors
    /// If it cannot be reached, or lists none.
    pub(super) fn model(&self, url: &str) -> Result<String> {
        let mut request = self.agent.get(url);
        if let Some(key) = &self.key {
            request = request.header("Authorization", format!("Bearer {key}"));
        }
        let response = request.call().with_context(|| format!("{url} cannot be reached"))?;
        if !response.status().is_success() {
            bail!("{url} answers with status {}", response.status().as_u16());
        }
        let listed: Value = serde_json::from_reader(response.into_body().into_reader().take(MOST_BYTES))
            .with_context(|| format!("{url} answers with something else than JSON"))?;
        let name = listed.pointer("/data/0/id").and_then(Value::as_str);
        Ok(name.with_context(|| format!("{url} lists no model: give --model NAME"))?.to_owned())
    }

    /// Sends a request, and reads its stream to the end.
    pub(super) fn ask(&self, url: &str, body: &Value) -> RequestOutcome {
        let mut outcome = RequestOutcome::default();
        let began = Instant::now();
        let mut request = self.agent.post(url).header("Content-Type", "application/json");
        if let Some(key) = &self.key {
            request = request.header("Authorization", format!("Bearer {key}"));
        }
        outcome.error = match request.send(body.to_string()) {
            Err(error) => Some(kind_of(&error)),
            Ok(response) if !response.status().is_success() => {
                Some(format!("status {}", response.status().as_u16()))
            }
            Ok(response) => read(response, began, &mut outcome).err(),
        };
        outcome.whole = began.elapsed();
        outcome
    }
}

fn kind_of(error: &ureq::Error) -> String {
    match error {
        ureq::Error::Timeout(_) => "timeout".into(),
        ureq::Error::Io(error) => format!("connection: {}", error.kind()),
        error => format!("connection: {error}"),
    }
}

/// Reads the events of a stream.
fn read(
    response: Response<ureq::Body>,
    began: Instant,
    outcome: &mut RequestOutcome,
) -> std::result::Result<(), String> {
    let mut lines = BufReader::new(response.into_body().into_reader());
    let mut line = String::new();
    loop {
        line.clear();
        let read = lines.by_ref().take(MOST_BYTES).read_line(&mut line);
        match read.map_err(|error| format!("stream: {}", error.kind()))? {
            0 => return Err("stream: no [DONE] at its end".into()),
            _ if !line.ends_with('\n') => return Err("stream: a line that is cut or too long".into()),
            _ => {}
        }
        let Some(data) = line.strip_prefix("data:").map(str::trim) else { continue };
        if data == "[DONE]" {
            return Ok(());
        }
        let event: Value = serde_json::from_str(data).map_err(|_| "stream: an event that is no JSON")?;
        if let Some(error) = event.get("error").filter(|error| !error.is_null()) {
            let code = ["code", "type"].iter().find_map(|name| error.get(name)?.as_str());
            return Err(format!("stream: error {}", code.unwrap_or("without a code")));
        }
        if event.get("choices").and_then(|choices| choices.get(0)).is_some_and(has_text) {
            outcome.pieces.push(began.elapsed());
        }
        if let Some(usage) = event.get("usage").filter(|usage| !usage.is_null()) {
            let count = |name: &str| usage.get(name).and_then(Value::as_u64).unwrap_or_default() as usize;
            (outcome.prompt_tokens, outcome.tokens) = (count("prompt_tokens"), count("completion_tokens"));
        }
    }
}

/// Whether a choice of an event has a piece of text, a thought or a call.
fn has_text(choice: &Value) -> bool {
    let is_text = |value: Option<&Value>| value.and_then(Value::as_str).is_some_and(|text| !text.is_empty());
    let delta = choice.get("delta");
    let of_delta = |name: &str| delta.and_then(|delta| delta.get(name));
    is_text(choice.get("text"))
        || ["content", "reasoning_content", "reasoning"].iter().any(|name| is_text(of_delta(name)))
        || of_delta("tool_calls").is_some_and(|calls| calls.as_array().is_some_and(|calls| !calls.is_empty()))
}
