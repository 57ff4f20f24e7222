//! The numbers of a load: a table for people, one JSON object for programs.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use comfy_table::Cell;
use examples::table::{grouped, number, table};
use serde::Serialize;

use super::client::RequestOutcome;

/// Milliseconds of many requests, with vLLM's names.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Milliseconds {
    mean: f64,
    p50: f64,
    p95: f64,
    p99: f64,
}

impl Milliseconds {
    fn of(times: impl Iterator<Item = Duration>) -> Self {
        let mut all: Vec<f64> = times.map(|time| time.as_secs_f64() * 1e3).collect();
        all.sort_by(f64::total_cmp);
        let mean = all.iter().sum::<f64>() / all.len().max(1) as f64;
        let [p50, p95, p99] = [0.50, 0.95, 0.99].map(|share| quantile(&all, share));
        Self { mean, p50, p95, p99 }
    }
}

/// The value below which a share of sorted values lies, between two of them as far as the share says (as NumPy has it).
fn quantile(sorted: &[f64], share: f64) -> f64 {
    let place = share * sorted.len().saturating_sub(1) as f64;
    let at = |place: f64| sorted.get(place as usize).copied().unwrap_or_default();
    let (low, high) = (at(place.floor()), at(place.ceil()));
    low + (high - low) * place.fract()
}

/// What a load has shown.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct LoadReport {
    /// The name of the model.
    model: String,
    /// Requests per second on average as they came; none for all at once.
    request_rate: Option<f64>,
    max_concurrency: Option<usize>,
    /// Seconds from the first request to the last end.
    duration: f64,
    /// The requests that ended with a whole text.
    completed: usize,
    failed: usize,
    /// The others, by what went wrong.
    errors: BTreeMap<String, usize>,
    total_input_tokens: usize,
    total_output_tokens: usize,
    /// Completed requests per second.
    request_throughput: f64,
    /// Their tokens per second.
    output_throughput: f64,
    /// Those with the tokens of their prompts.
    total_token_throughput: f64,
    /// From sending a request to the first piece of its text.
    ttft_ms: Milliseconds,
    /// Between two tokens of a text behind its first one, on average over the text.
    tpot_ms: Milliseconds,
    /// Between two pieces of a text.
    itl_ms: Milliseconds,
    /// From sending a request to the end of its text.
    e2el_ms: Milliseconds,
}

impl LoadReport {
    pub(super) fn new(
        model: &str,
        (rate, max_concurrency): (f64, Option<usize>),
        outcomes: &[RequestOutcome],
        duration: Duration,
    ) -> Self {
        let whole: Vec<&RequestOutcome> = outcomes.iter().filter(|outcome| outcome.error.is_none()).collect();
        let mut errors = BTreeMap::new();
        for error in outcomes.iter().filter_map(|outcome| outcome.error.clone()) {
            *errors.entry(error).or_insert(0) += 1;
        }
        let input: usize = whole.iter().map(|outcome| outcome.prompt_tokens).sum();
        // A server that counts no tokens sends about one in each piece.
        let tokens = |outcome: &RequestOutcome| outcome.tokens.max(outcome.pieces.len());
        let output: usize = whole.iter().map(|outcome| tokens(outcome)).sum();
        let seconds = duration.as_secs_f64().max(1e-9);
        let of_token = |outcome: &&&RequestOutcome| {
            let (first, last) = (outcome.pieces.first()?, outcome.pieces.last()?);
            let behind = u32::try_from(tokens(outcome)).ok()?.checked_sub(1)?;
            (*last - *first).checked_div(behind)
        };
        let between = |outcome: &&RequestOutcome| {
            let pairs = outcome.pieces.windows(2);
            pairs.map(|pair| pair[1].saturating_sub(pair[0])).collect::<Vec<_>>()
        };
        Self {
            model: model.to_owned(),
            request_rate: rate.is_finite().then_some(rate),
            max_concurrency,
            duration: seconds,
            completed: whole.len(),
            failed: outcomes.len() - whole.len(),
            errors,
            total_input_tokens: input,
            total_output_tokens: output,
            request_throughput: whole.len() as f64 / seconds,
            output_throughput: output as f64 / seconds,
            total_token_throughput: (input + output) as f64 / seconds,
            ttft_ms: Milliseconds::of(whole.iter().filter_map(|outcome| outcome.pieces.first().copied())),
            tpot_ms: Milliseconds::of(whole.iter().filter_map(|outcome| of_token(&outcome))),
            itl_ms: Milliseconds::of(whole.iter().flat_map(between)),
            e2el_ms: Milliseconds::of(whole.iter().map(|outcome| outcome.whole)),
        }
    }

    /// Whether no request has got a text.
    pub(super) fn is_empty(&self) -> bool {
        self.completed == 0
    }

    /// The errors in words, the most frequent first.
    pub(super) fn failures(&self) -> String {
        let mut errors: Vec<_> = self.errors.iter().collect();
        errors.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
        let said: Vec<String> = errors.iter().map(|(error, count)| format!("{count} × {error}")).collect();
        said.join(", ")
    }
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut times = table(&["milliseconds"], &["mean", "p50", "p95", "p99"]);
        let rows = [
            ("time to first token", &self.ttft_ms),
            ("time per token behind it", &self.tpot_ms),
            ("time between tokens", &self.itl_ms),
            ("whole request", &self.e2el_ms),
        ];
        for (name, Milliseconds { mean, p50, p95, p99 }) in rows {
            let cells = [mean, p50, p95, p99].map(|time| number(format_args!("{time:.1}")));
            times.add_row([Cell::new(name)].into_iter().chain(cells));
        }
        let rate = self.request_rate.map_or("all at once".into(), |rate| format!("{rate} per second"));
        writeln!(
            f,
            "{} requests ({rate}) to {} in {:.1} s:",
            self.completed + self.failed,
            self.model,
            self.duration
        )?;
        writeln!(f, "{times}")?;
        writeln!(
            f,
            "{:.2} requests/s, {:.1} tokens/s ({} tokens), {:.1} with those of prompts ({})",
            self.request_throughput,
            self.output_throughput,
            grouped(self.total_output_tokens),
            self.total_token_throughput,
            grouped(self.total_input_tokens)
        )?;
        match self.failed {
            0 => write!(f, "no request failed"),
            failed => write!(f, "{failed} failed: {}", self.failures()),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use std::time::Duration;

    use super::{LoadReport, Milliseconds, quantile};
    use crate::bench_serve::client::RequestOutcome;

    #[test]
    fn quantiles_are_those_of_numpy() {
        let values: Vec<f64> = (1..=10).map(f64::from).collect();
        let near = |share: f64, wanted: f64| assert!((quantile(&values, share) - wanted).abs() < 1e-9);
        near(0.5, 5.5);
        near(0.95, 9.55);
        near(0.99, 9.91);
        assert!(quantile(&[], 0.5) == 0.0 && quantile(&[3.0], 0.99) == 3.0);
        assert_eq!(Milliseconds::of(std::iter::empty()), Milliseconds::default());
    }

    #[test]
    fn times_are_those_of_whole_texts_and_errors_are_counted_by_kind() {
        let ms = Duration::from_millis;
        let whole = RequestOutcome {
            pieces: vec![ms(100), ms(120), ms(160)],
            whole: ms(170),
            prompt_tokens: 10,
            tokens: 4,
            error: None,
        };
        let failed = |error: &str| RequestOutcome { error: Some(error.into()), ..whole.clone() };
        let outcomes = [whole.clone(), failed("status 429"), failed("timeout"), failed("status 429")];
        let report = LoadReport::new("m", (2.0, None), &outcomes, ms(2000));
        assert_eq!((report.completed, report.failed), (1, 3));
        assert_eq!(report.failures(), "2 × status 429, 1 × timeout");
        assert_eq!((report.request_throughput, report.output_throughput), (0.5, 2.0));
        let told = [&report.ttft_ms, &report.tpot_ms, &report.itl_ms, &report.e2el_ms];
        let wanted = [100.0, 20.0, 30.0, 170.0];
        assert!(
            told.iter().zip(wanted).all(|(times, wanted)| (times.mean - wanted).abs() < 1e-9),
            "{told:?}"
        );
        let said = serde_json::to_value(&report).unwrap();
        assert!(said["ttft_ms"]["p99"].is_f64() && said["errors"]["timeout"] == 1, "{said}");
    }
}
