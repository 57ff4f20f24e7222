//! Numbers for Prometheus, under the names of vLLM where they mean the same, and the log.

use std::fmt::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_lm::serve::ServeStatus;
use examples::cli;
use parking_lot::Mutex;
use tracing::{Span, field, info_span};

use super::choice::Choice;
use super::otlp::SpanCounts;

/// The bounds of the times of requests, in seconds.
const SECONDS: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];
/// The bounds of the times between tokens, in seconds.
const BETWEEN: &[f64] = &[
    0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
];

/// How often a value was below each bound.
#[derive(Clone, Debug)]
struct Histogram {
    bounds: &'static [f64],
    counts: Vec<u64>,
    count: u64,
    sum: f64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Self {
        Self { bounds, counts: vec![0; bounds.len()], count: 0, sum: 0.0 }
    }

    fn observe(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        for (count, bound) in self.counts.iter_mut().zip(self.bounds) {
            *count += u64::from(seconds <= *bound);
        }
        self.count += 1;
        self.sum += seconds;
    }

    fn write(&self, text: &mut String, name: &str, label: &str) {
        for (count, bound) in self.counts.iter().zip(self.bounds) {
            writeln!(text, "{name}_bucket{{{label},le=\"{bound}\"}} {count}").ok();
        }
        let Self { count, sum, .. } = self;
        writeln!(text, "{name}_bucket{{{label},le=\"+Inf\"}} {count}").ok();
        writeln!(text, "{name}_sum{{{label}}} {sum}\n{name}_count{{{label}}} {count}").ok();
    }
}

/// The ends of texts that are counted.
const ENDS: [&str; 4] = ["stop", "length", "tool_calls", "abort"];

#[derive(Debug)]
struct Numbers {
    prompt: u64,
    written: u64,
    ends: [u64; ENDS.len()],
    /// Responses by the hundreds of their statuses.
    responses: [u64; 6],
    first: Histogram,
    between: Histogram,
    whole: Histogram,
    queue: Histogram,
    prefill: Histogram,
    decode: Histogram,
}

/// The numbers of a server: those of the model, and of it with each adapter.
#[derive(Clone, Debug)]
pub(super) struct Metrics(Arc<Mutex<Vec<Numbers>>>);

impl Numbers {
    fn new() -> Self {
        let seconds = || Histogram::new(SECONDS);
        Self {
            prompt: 0,
            written: 0,
            ends: [0; ENDS.len()],
            responses: [0; 6],
            first: seconds(),
            between: Histogram::new(BETWEEN),
            whole: seconds(),
            queue: seconds(),
            prefill: seconds(),
            decode: seconds(),
        }
    }
}

impl Metrics {
    /// Numbers for so many names.
    pub(super) fn new(names: usize) -> Self {
        Self(Arc::new(Mutex::new((0..names.max(1)).map(|_| Numbers::new()).collect())))
    }

    /// Changes the numbers of the model, or of it with an adapter.
    fn change(&self, adapter: Option<usize>, change: impl FnOnce(&mut Numbers)) {
        let mut all = self.0.lock();
        if let Some(numbers) = all.get_mut(adapter.map_or(0, |adapter| adapter + 1)) {
            change(numbers);
        }
    }

    /// The text that Prometheus reads, of a model of these names.
    pub(super) fn text<'a>(
        &self,
        names: impl Iterator<Item = &'a str>,
        status: &ServeStatus,
        spans: Option<&SpanCounts>,
    ) -> String {
        let labels: Vec<String> = names
            .map(|name| {
                let escaped = name.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
                format!("model_name=\"{escaped}\"")
            })
            .collect();
        let label = labels.first().map(String::as_str).unwrap_or_default();
        let mut text = String::new();
        let head = |text: &mut String, name: &str, kind: &str, help: &str| {
            writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}").ok();
        };
        let usage = status.used_bytes as f64 / status.cache_bytes.max(1) as f64;
        let gauges: [MetricRow<f64>; 5] = [
            ("vllm:num_requests_running", "Requests that are being written.", status.running as f64),
            ("vllm:num_requests_waiting", "Requests that wait for a slot.", status.waiting as f64),
            (
                "vllm:kv_cache_usage_perc",
                "The share of the cache's memory that texts have, 1 for all.",
                usage,
            ),
            ("lm:waiting_tokens", "Tokens of the prompts that wait.", status.waiting_tokens as f64),
            ("lm:is_draining", "Whether new requests are refused.", u8::from(status.is_draining).into()),
        ];
        for (name, help, value) in gauges {
            head(&mut text, name, "gauge", help);
            writeln!(text, "{name}{{{label}}} {value}").ok();
        }
        let of_engine: Vec<MetricRow<u64>> = vec![
            (
                "vllm:prefix_cache_queries_total",
                "Tokens of prompts that were looked for in the cache.",
                status.prompt_tokens,
            ),
            (
                "vllm:prefix_cache_hits_total",
                "Tokens of prompts that were in the cache.",
                status.reused_tokens,
            ),
            (
                "vllm:num_preemptions_total",
                "Texts that lost their memory to others and were computed again.",
                status.preemptions,
            ),
            ("lm:passes_total", "Passes of the model.", status.passes),
        ];
        let of_spans = spans.map(|spans| {
            [
                ("lm:otlp_spans_sent_total", "Spans that the collector has taken.", spans.sent()),
                (
                    "lm:otlp_spans_dropped_total",
                    "Spans that it has not taken and never will.",
                    spans.dropped(),
                ),
            ]
        });
        for (name, help, value) in of_engine.into_iter().chain(of_spans.into_iter().flatten()) {
            head(&mut text, name, "counter", help);
            writeln!(text, "{name}{{{label}}} {value}").ok();
        }
        let all = self.0.lock();
        let of_names = || labels.iter().zip(all.iter());
        let counters: [MetricRow<CountOf>; 2] = [
            ("vllm:prompt_tokens_total", "Tokens of prompts that were read.", |numbers| numbers.prompt),
            ("vllm:generation_tokens_total", "Tokens that were written.", |numbers| numbers.written),
        ];
        for (name, help, of) in counters {
            head(&mut text, name, "counter", help);
            for (label, numbers) in of_names() {
                writeln!(text, "{name}{{{label}}} {}", of(numbers)).ok();
            }
        }
        let name = "vllm:request_success_total";
        head(&mut text, name, "counter", "Texts by their ends.");
        for (label, numbers) in of_names() {
            for (end, count) in ENDS.iter().zip(numbers.ends) {
                writeln!(text, "{name}{{{label},finished_reason=\"{end}\"}} {count}").ok();
            }
        }
        head(&mut text, "lm:responses_total", "counter", "Responses by status.");
        for (label, numbers) in of_names() {
            for (hundreds, count) in numbers.responses.iter().enumerate().skip(1) {
                writeln!(text, "lm:responses_total{{{label},status=\"{hundreds}xx\"}} {count}").ok();
            }
        }
        let histograms: [MetricRow<HistogramOf>; 6] = [
            ("vllm:time_to_first_token_seconds", "From a request's arrival to its first token.", |numbers| {
                &numbers.first
            }),
            ("vllm:inter_token_latency_seconds", "Between two tokens of a text.", |numbers| &numbers.between),
            ("vllm:e2e_request_latency_seconds", "From a request's arrival to its end.", |numbers| {
                &numbers.whole
            }),
            ("vllm:request_queue_time_seconds", "From a request's arrival to its slot.", |numbers| {
                &numbers.queue
            }),
            ("vllm:request_prefill_time_seconds", "From a slot to the first token.", |numbers| {
                &numbers.prefill
            }),
            ("vllm:request_decode_time_seconds", "From the first token to the last.", |numbers| {
                &numbers.decode
            }),
        ];
        for (name, help, of) in histograms {
            head(&mut text, name, "histogram", help);
            of_names().for_each(|(label, numbers)| of(numbers).write(&mut text, name, label));
        }
        text
    }
}

/// The name of a metric, what it means, and its value.
type MetricRow<T> = (&'static str, &'static str, T);

type CountOf = fn(&Numbers) -> u64;

type HistogramOf = fn(&Numbers) -> &Histogram;

/// What is known of one request, for its line in the log.
pub(super) struct RequestRecord {
    metrics: Metrics,
    logs: bool,
    pub(super) id: String,
    route: &'static str,
    client: String,
    arrival: Instant,
    prompt_tokens: usize,
    adapter: Option<usize>,
    /// When the first and the last token of each choice came, and of the last its end.
    first: Option<Instant>,
    last: Vec<Option<Instant>>,
    written: usize,
    queue: Option<Duration>,
    ends: Vec<&'static str>,
    is_finished: bool,
    /// The span of the request, which has those of its texts.
    pub(super) span: Span,
}

impl RequestRecord {
    pub(super) fn new(
        metrics: Metrics,
        logs: bool,
        id: String,
        route: &'static str,
        client: Option<&str>,
    ) -> Self {
        let span = info_span!(
            parent: None,
            "request",
            request.id = id,
            http.route = route,
            http.response.status_code = field::Empty,
            gen_ai.usage.input_tokens = field::Empty,
            gen_ai.usage.output_tokens = field::Empty,
        );
        Self {
            metrics,
            logs,
            id,
            route,
            client: client.unwrap_or("-").to_owned(),
            arrival: Instant::now(),
            prompt_tokens: 0,
            adapter: None,
            first: None,
            last: Vec::new(),
            written: 0,
            queue: None,
            ends: Vec::new(),
            is_finished: false,
            span,
        }
    }

    /// When the request arrived.
    pub(super) fn arrival(&self) -> Instant {
        self.arrival
    }

    /// Begins with texts of so many tokens of prompts, by the model or by it with an adapter.
    pub(super) fn begin(&mut self, prompt_tokens: usize, adapter: Option<usize>) {
        (self.prompt_tokens, self.adapter) = (prompt_tokens, adapter);
    }

    /// A text without choices, of which there may be more in the request, left the queue then.
    pub(super) fn admit(&mut self, admitted: Instant) {
        let queue = admitted.saturating_duration_since(self.arrival);
        self.queue.get_or_insert(queue);
        self.metrics.change(self.adapter, |numbers| numbers.queue.observe(queue));
    }

    /// Counts what has happened to a choice since.
    pub(super) fn note(&mut self, choice: &mut Choice) {
        let metrics = self.metrics.clone();
        metrics.change(self.adapter, |numbers| self.note_in(numbers, choice));
    }

    fn note_in(&mut self, numbers: &mut Numbers, choice: &mut Choice) {
        if let Some(admitted) = choice.counts.admitted.take() {
            let queue = admitted.saturating_duration_since(self.arrival);
            self.queue.get_or_insert(queue);
            numbers.queue.observe(queue);
        }
        let place = choice.place();
        self.last.resize(self.last.len().max(place + 1), None);
        for at in choice.counts.times.drain(..) {
            self.written += 1;
            numbers.written += 1;
            match self.last[place].replace(at) {
                None => {
                    let first = at.saturating_duration_since(self.arrival);
                    numbers.first.observe(first);
                    numbers.prefill.observe(first.saturating_sub(self.queue.unwrap_or_default()));
                    self.first.get_or_insert(at);
                }
                Some(before) => numbers.between.observe(at.saturating_duration_since(before)),
            }
        }
    }

    /// Ends with an answer of this status.
    pub(super) fn finish(&mut self, choices: &mut [Choice], status: u16) {
        for choice in &mut *choices {
            self.note(choice);
        }
        self.ends = choices.iter().filter_map(|choice| choice.counts.end).collect();
        self.end(status);
    }

    /// Ends with an answer of this status, without texts.
    pub(super) fn end(&mut self, status: u16) {
        if std::mem::replace(&mut self.is_finished, true) {
            return;
        }
        let whole = self.arrival.elapsed();
        let span = std::mem::replace(&mut self.span, Span::none());
        span.record("http.response.status_code", status);
        span.record("gen_ai.usage.input_tokens", self.prompt_tokens);
        span.record("gen_ai.usage.output_tokens", self.written);
        drop(span);
        let is_aborted = self.ends.is_empty() && (self.written > 0 || status == 499);
        self.metrics.change(self.adapter, |numbers| {
            if let Some(count) = numbers.responses.get_mut(usize::from(status / 100)) {
                *count += 1;
            }
            for end in self.ends.iter().copied().chain(is_aborted.then_some("abort")) {
                if let Some(at) = ENDS.iter().position(|known| *known == end) {
                    numbers.ends[at] += 1;
                }
            }
            if self.prompt_tokens > 0 && self.queue.is_some() {
                numbers.prompt += self.prompt_tokens as u64;
                numbers.whole.observe(whole);
            }
            if let (Some(first), Some(last)) = (self.first, self.last.iter().flatten().max()) {
                numbers.decode.observe(last.saturating_duration_since(first));
            }
        });
        if self.logs {
            self.log(status, whole);
        }
    }

    fn log(&self, status: u16, whole: Duration) {
        let Self { id, route, client, prompt_tokens, written, .. } = self;
        let ms =
            |time: Option<Duration>| time.map_or_else(|| "-".into(), |time| time.as_millis().to_string());
        let first = self.first.map(|first| first.saturating_duration_since(self.arrival));
        let end = if self.ends.is_empty() { "-".to_owned() } else { self.ends.join(",") };
        cli::tell(
            "request",
            format_args!(
                "{id} {route} status={status} key={client} prompt={prompt_tokens} written={written} queue_ms={} \
                 first_ms={} total_ms={} end={end}",
                ms(self.queue),
                ms(first),
                whole.as_millis()
            ),
        );
    }
}

impl Drop for RequestRecord {
    /// Nobody has read the answer to its end.
    fn drop(&mut self) {
        self.end(499);
    }
}
