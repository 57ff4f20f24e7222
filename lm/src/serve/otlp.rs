//! Spans of requests and passes for a collector of OpenTelemetry: OTLP as JSON over HTTP.
//!
//! The spans here name their parents and have few fields. So this file subscribes to them itself: the crates of OpenTelemetry are
//! fourteen more, and one for HTTP.

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use examples::cli;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::set_global_default;
use tracing::{Event, Level, Metadata, Subscriber};
use ureq::Agent;

use super::parameters::random;

/// The most spans that wait for the collector.
const WAITING: usize = 8192;
/// How often they are sent.
const PAUSE: Duration = Duration::from_millis(500);
/// The kinds of spans in OTLP.
const INTERNAL: u8 = 1;
const SERVER: u8 = 2;
/// How long a message may take.
const LIMIT: Duration = Duration::from_secs(5);

/// The thread that sends the spans of the process.
#[derive(Debug)]
pub(super) struct SpanExporter {
    spans: Arc<SpanCollector>,
    thread: JoinHandle<()>,
}

impl SpanExporter {
    /// Sends the spans of this process to the collector at `url` from now on.
    ///
    /// # Errors
    /// If they go elsewhere already, or there is no thread.
    pub(super) fn start(url: &str, model: &str) -> Result<Self> {
        let spans = Arc::new(SpanCollector::default());
        set_global_default(spans.clone()).context("--otlp: the spans of this process go elsewhere")?;
        let url = format!("{}/v1/traces", url.trim_end_matches('/'));
        let texts = [("service.name", "lm serve"), ("gen_ai.request.model", model)];
        let resource =
            json!({"attributes": texts.map(|(key, text)| attribute(key, json!({"stringValue": text})))});
        let own = spans.clone();
        let thread =
            thread::Builder::new().name("lm otlp".into()).spawn(move || own.send_all(&url, &resource))?;
        Ok(Self { spans, thread })
    }

    /// Sends what is left.
    pub(super) fn finish(self) {
        self.spans.is_over.store(true, Ordering::Release);
        self.thread.thread().unpark();
        self.thread.join().ok();
    }
}

/// What the crate `tracing` tells spans to.
#[derive(Debug, Default)]
struct SpanCollector {
    /// Spans that have begun, and how many handles each has.
    open: Mutex<HashMap<u64, (Value, usize)>>,
    ended: Mutex<Vec<Value>>,
    is_over: AtomicBool,
}

impl SpanCollector {
    /// Sends spans until the end, and tells once that the collector does not take them.
    fn send_all(&self, url: &str, resource: &Value) {
        let agent: Agent = Agent::config_builder().timeout_global(Some(LIMIT)).build().into();
        let (mut is_over, mut is_told) = (false, false);
        while !is_over {
            thread::park_timeout(PAUSE);
            is_over = self.is_over.load(Ordering::Acquire);
            let spans = std::mem::take(&mut *self.ended.lock());
            if spans.is_empty() {
                continue;
            }
            let scope =
                json!({"scope": {"name": "lm", "version": env!("CARGO_PKG_VERSION")}, "spans": spans});
            let message = json!({"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]});
            let sent = agent.post(url).content_type("application/json").send(message.to_string());
            if let Err(error) = sent
                && !std::mem::replace(&mut is_told, true)
            {
                cli::tell("warning", format_args!("--otlp {url}: {error}; requests go on"));
            }
        }
    }

    fn change(&self, id: &Id, change: impl FnOnce(&mut (Value, usize))) {
        if let Some(span) = self.open.lock().get_mut(&id.into_u64()) {
            change(span);
        }
    }
}

impl Subscriber for SpanCollector {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let is_ours = ["candle_lm", "lm"].contains(&metadata.target().split("::").next().unwrap_or_default());
        is_ours && *metadata.level() <= Level::INFO
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::INFO)
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut open = self.open.lock();
        // No span has the number 0.
        let number = random().max(1);
        let parent = span.parent().and_then(|parent| open.get(&parent.into_u64()));
        let parent = parent.map(|parent| (parent.0["traceId"].clone(), parent.0["spanId"].clone()));
        let of_new = || (json!(format!("{:016x}{:016x}", random(), random())), json!(""));
        let (trace, parent) = parent.unwrap_or_else(of_new);
        let name = span.metadata().name();
        let mut told = json!({
            "traceId": trace, "spanId": format!("{number:016x}"), "parentSpanId": parent, "name": name,
            "kind": if name == "request" { SERVER } else { INTERNAL }, "startTimeUnixNano": now(),
            "attributes": [], "events": [], "links": [],
        });
        span.record(&mut FieldWriter(&mut told));
        open.insert(number, (told, 1));
        Id::from_u64(number)
    }

    fn record(&self, id: &Id, values: &Record<'_>) {
        self.change(id, |span| values.record(&mut FieldWriter(&mut span.0)));
    }

    fn record_follows_from(&self, id: &Id, follows: &Id) {
        let mut open = self.open.lock();
        let Some(cause) = open.get(&follows.into_u64()) else { return };
        let link = json!({"traceId": cause.0["traceId"], "spanId": cause.0["spanId"]});
        if let Some(span) = open.get_mut(&id.into_u64()) {
            push(&mut span.0, "links", link);
        }
    }

    fn event(&self, event: &Event<'_>) {
        let Some(id) = event.parent() else { return };
        let mut told = json!({"timeUnixNano": now(), "name": event.metadata().name(), "attributes": []});
        event.record(&mut FieldWriter(&mut told));
        self.change(id, |span| push(&mut span.0, "events", told));
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}

    fn clone_span(&self, id: &Id) -> Id {
        self.change(id, |span| span.1 += 1);
        id.clone()
    }

    fn try_close(&self, id: Id) -> bool {
        let mut open = self.open.lock();
        match open.get_mut(&id.into_u64()) {
            Some((_, handles)) if *handles > 1 => {
                *handles -= 1;
                return false;
            }
            _ => {}
        }
        let Some((mut told, _)) = open.remove(&id.into_u64()) else { return false };
        drop(open);
        told["endTimeUnixNano"] = now();
        let mut ended = self.ended.lock();
        if ended.len() < WAITING {
            ended.push(told);
        }
        true
    }
}

/// Writes fields into a span or an event. The message of an event is its name.
struct FieldWriter<'a>(&'a mut Value);

impl FieldWriter<'_> {
    fn write(&mut self, field: &Field, value: Value) {
        push(self.0, "attributes", attribute(field.name(), value));
    }
}

impl Visit for FieldWriter<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let text = format!("{value:?}");
        match field.name() {
            "message" => self.0["name"] = json!(text),
            _ => self.write(field, json!({"stringValue": text})),
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.write(field, json!({"stringValue": value}));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.write(field, json!({"intValue": value.to_string()}));
    }
}

fn attribute(key: &str, value: Value) -> Value {
    json!({"key": key, "value": value})
}

fn push(told: &mut Value, list: &str, value: Value) {
    if let Some(list) = told[list].as_array_mut() {
        list.push(value);
    }
}

/// The time in nanoseconds, as JSON of OTLP has it.
fn now() -> Value {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    json!(since.as_nanos().to_string())
}
