//! Spans of requests and passes for a collector of OpenTelemetry: OTLP as JSON over HTTP.
//!
//! The spans here name their parents and have few fields. So this file subscribes to them itself: the crates of OpenTelemetry are
//! fourteen more, and one for HTTP.

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

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
/// The most spans of a message.
const OF_MESSAGE: usize = 512;
/// How often they are sent.
const PAUSE: Duration = Duration::from_millis(500);
/// The longest pause before another try, where the collector did not take them.
const LONGEST_PAUSE: Duration = Duration::from_secs(16);
/// How long the last spans are sent again and again.
const LAST: Duration = Duration::from_secs(2);
/// How often the log tells of spans that are lost.
const SILENCE: Duration = Duration::from_secs(60);
/// The path of spans at a collector.
const PATH: &str = "/v1/traces";
/// The kinds of spans in OTLP.
const INTERNAL: u8 = 1;
const SERVER: u8 = 2;
/// How long a message may take.
const LIMIT: Duration = Duration::from_secs(5);

/// How many spans reached the collector, and how many were lost.
#[derive(Debug, Default)]
pub struct SpanCounts {
    sent: AtomicU64,
    dropped: AtomicU64,
}

impl SpanCounts {
    /// Those that the collector has taken.
    pub(super) fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Those for which there was no room, or that the collector refused.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    fn drop_some(&self, count: usize) {
        self.dropped.fetch_add(count as u64, Ordering::Relaxed);
    }
}

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
        let base = url.trim_end_matches('/');
        let url = format!("{}{PATH}", base.strip_suffix(PATH).unwrap_or(base));
        let texts = [("service.name", "lm serve"), ("gen_ai.request.model", model)];
        let resource =
            json!({"attributes": texts.map(|(key, text)| attribute(key, json!({"stringValue": text})))});
        let own = spans.clone();
        let thread =
            thread::Builder::new().name("lm otlp".into()).spawn(move || own.send_all(&url, &resource))?;
        Ok(Self { spans, thread })
    }

    /// What became of the spans so far.
    pub(super) fn counts(&self) -> Arc<SpanCounts> {
        self.spans.counts.clone()
    }

    /// Sends what is left.
    pub(super) fn finish(self) {
        self.spans.is_over.store(true, Ordering::Release);
        self.thread.thread().unpark();
        self.thread.join().ok();
    }
}

/// What became of a message.
enum Delivery {
    Taken,
    /// The collector does not want so many of its spans, and why.
    Refused(usize, String),
    /// Why it may be taken at another time.
    Later(String),
}

/// Sends one message of so many spans.
fn send(agent: &Agent, url: &str, message: &Value, spans: usize) -> Delivery {
    let sent = agent.post(url).content_type("application/json").send(message.to_string());
    match sent {
        Ok(mut response) => {
            // A collector may take a part, and says so.
            let said = response.body_mut().read_to_string().unwrap_or_default();
            let said: Value = serde_json::from_str(&said).unwrap_or_default();
            let part = &said["partialSuccess"];
            let count = &part["rejectedSpans"];
            let count = count.as_u64().or_else(|| count.as_str()?.parse().ok()).unwrap_or_default();
            match usize::try_from(count).unwrap_or(spans).min(spans) {
                0 => Delivery::Taken,
                count => Delivery::Refused(count, format!("the collector says {}", part["errorMessage"])),
            }
        }
        Err(ureq::Error::StatusCode(status)) if ![408, 429, 502, 503, 504].contains(&status) => {
            Delivery::Refused(spans, format!("the collector answers with status {status}"))
        }
        Err(error) => Delivery::Later(error.to_string()),
    }
}

/// Tells of spans that are lost or wait, once in a while.
#[derive(Default)]
struct LossLog {
    /// How many lost spans were told of, and when.
    told: u64,
    at: Option<Instant>,
    /// The last failure that was not told.
    why: Option<String>,
}

impl LossLog {
    /// Tells how many spans are lost; at the end in any case, and before it if the last line was long ago.
    fn tell(&mut self, url: &str, dropped: u64, failure: Option<String>, is_over: bool) {
        self.why = failure.or(self.why.take());
        let is_new = dropped > self.told || (self.why.is_some() && self.at.is_none());
        if !is_new || (!is_over && self.at.is_some_and(|at| at.elapsed() < SILENCE)) {
            return;
        }
        let full = || format!("more than {WAITING} ended before they could be sent");
        let why = self.why.take().unwrap_or_else(full);
        let then = if is_over { "" } else { "; requests go on" };
        let lost = match dropped - self.told {
            0 => "spans wait".to_owned(),
            new => format!("{new} spans were dropped, {dropped} in all"),
        };
        cli::tell("warning", format_args!("--otlp {url}: {lost}: {why}{then}"));
        (self.told, self.at) = (dropped, Some(Instant::now()));
    }
}

/// What the crate `tracing` tells spans to.
#[derive(Debug, Default)]
struct SpanCollector {
    /// Spans that have begun, and how many handles each has.
    open: Mutex<HashMap<u64, (Value, usize)>>,
    ended: Mutex<Vec<Value>>,
    counts: Arc<SpanCounts>,
    is_over: AtomicBool,
}

impl SpanCollector {
    /// Sends spans until the end, and tells how many the collector does not take.
    fn send_all(&self, url: &str, resource: &Value) {
        let agent: Agent = Agent::config_builder().timeout_global(Some(LIMIT)).build().into();
        let (mut is_over, mut pause, mut log) = (false, PAUSE, LossLog::default());
        while !is_over {
            if !self.is_over.load(Ordering::Acquire) {
                thread::park_timeout(pause);
            }
            is_over = self.is_over.load(Ordering::Acquire);
            let began = Instant::now();
            // A collector may be so slow that the program would wait for it for minutes.
            let is_late =
                || if is_over { began.elapsed() >= LAST } else { self.is_over.load(Ordering::Acquire) };
            let mut failure = self.send_waiting(&agent, url, resource, &is_late);
            while is_over && !self.ended.lock().is_empty() && !is_late() {
                // Perhaps the collector is busy for a moment.
                thread::sleep(PAUSE);
                failure = self.send_waiting(&agent, url, resource, &is_late);
            }
            if is_over {
                // Nobody sends what is left now.
                self.counts.drop_some(std::mem::take(&mut *self.ended.lock()).len());
            }
            pause = if failure.is_some() { (pause * 2).min(LONGEST_PAUSE) } else { PAUSE };
            log.tell(url, self.counts.dropped(), failure, is_over);
        }
    }

    /// Sends the spans that wait, until the collector takes no more, or it is late after a message. Returns why it did not take some.
    fn send_waiting(
        &self,
        agent: &Agent,
        url: &str,
        resource: &Value,
        is_late: &dyn Fn() -> bool,
    ) -> Option<String> {
        let mut failure = None;
        loop {
            let spans: Vec<Value> = {
                let mut ended = self.ended.lock();
                let count = ended.len().min(OF_MESSAGE);
                ended.drain(..count).collect()
            };
            let count = spans.len();
            if count == 0 {
                return failure;
            }
            let scope =
                json!({"scope": {"name": "lm", "version": env!("CARGO_PKG_VERSION")}, "spans": spans});
            let message = json!({"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]});
            let (taken, why) = match send(agent, url, &message, count) {
                Delivery::Taken => (count, None),
                Delivery::Refused(refused, why) => {
                    self.counts.drop_some(refused);
                    (count - refused, Some(why))
                }
                Delivery::Later(why) => {
                    self.keep(spans);
                    return Some(why);
                }
            };
            self.counts.sent.fetch_add(taken as u64, Ordering::Relaxed);
            failure = why.or(failure);
            if is_late() {
                return failure;
            }
        }
    }

    /// Lets spans wait again, before those that ended since, of which some may have to go.
    fn keep(&self, spans: Vec<Value>) {
        let mut ended = self.ended.lock();
        ended.splice(0..0, spans);
        self.counts.drop_some(ended.len().saturating_sub(WAITING));
        ended.truncate(WAITING);
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
        // The engine never waits for the collector.
        let mut ended = self.ended.lock();
        match ended.len() < WAITING {
            true => ended.push(told),
            false => self.counts.drop_some(1),
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;

    #[test]
    fn what_has_no_room_is_dropped_and_counted() {
        let spans = Arc::new(SpanCollector::default());
        tracing::subscriber::with_default(spans.clone(), || {
            for _ in 0..WAITING + 5 {
                drop(tracing::info_span!(parent: None, "one"));
            }
        });
        assert_eq!((spans.ended.lock().len(), spans.counts.dropped()), (WAITING, 5));
        assert!(spans.open.lock().is_empty());
        // Those that a collector did not take come first again.
        let taken: Vec<Value> = spans.ended.lock().drain(..3).collect();
        let first = taken[0].clone();
        spans.ended.lock().push(json!("new"));
        spans.keep(taken);
        assert_eq!((spans.ended.lock().len(), spans.counts.dropped()), (WAITING, 6));
        assert_eq!(spans.ended.lock()[0], first);
    }

    #[test]
    fn the_end_waits_for_a_slow_collector_no_longer_than_for_a_busy_one() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/v1/traces", listener.local_addr().unwrap());
        thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let mut bytes = vec![0; 1 << 20];
                while stream.read(&mut bytes).is_ok_and(|count| count > 0) {
                    thread::sleep(LAST / 4);
                    let answer = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}";
                    if stream.write_all(answer.as_bytes()).is_err() {
                        break;
                    }
                }
            }
        });
        let spans = SpanCollector::default();
        *spans.ended.lock() = vec![json!({}); WAITING];
        spans.is_over.store(true, Ordering::Release);
        spans.send_all(&url, &json!({}));
        let (sent, dropped) = (spans.counts.sent(), spans.counts.dropped());
        assert!(sent > 0 && dropped > 0 && sent + dropped == WAITING as u64, "{sent} and {dropped}");
    }
}
