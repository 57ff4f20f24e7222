//! Which requests a load has, and when each comes.

use std::fs;
use std::path::Path;
use std::time::Duration;

use candle_lm::InputError;
use serde::Deserialize;
use serde_json::{Value, json};

use super::args::{BenchServeArgs, EndpointName, MOST_TOKENS};

/// One request of a load.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PlannedRequest {
    /// When it comes, from the first one on.
    pub(super) at: Duration,
    /// What is sent.
    pub(super) body: Value,
}

/// A line of a data set.
#[derive(Clone, Debug, Default, Deserialize)]
struct DatasetLine {
    prompt: Option<String>,
    messages: Option<Value>,
    input_len: Option<usize>,
    output_len: Option<usize>,
}

/// The last time of a request: 136 years.
const LATEST: Duration = Duration::from_secs(u32::MAX as u64);

/// Words that most vocabularies have as a token each.
const WORDS: [&str; 64] = [
    "the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "with", "as", "at", "be",
    "this", "have", "from", "or", "one", "had", "by", "word", "but", "not", "what", "all", "were", "we",
    "when", "your", "can", "said", "there", "use", "an", "each", "which", "she", "do", "how", "their", "if",
    "will", "up", "other", "about", "out", "many", "then", "them", "these", "so", "some", "her", "would",
    "make", "like", "him", "into", "time", "has", "look",
];

/// A stream of random numbers (splitmix64).
struct LoadDice(u64);

impl LoadDice {
    fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// The time between two events of which `rate` come in a second on average.
    fn gap(&mut self, rate: f64) -> f64 {
        // More than 0 and at most 1.
        let share = ((self.draw() >> 11) + 1) as f64 / (1u64 << 53) as f64;
        -share.ln() / rate
    }

    /// So many words.
    fn words(&mut self, count: usize) -> String {
        let words: Vec<&str> = (0..count).map(|_| WORDS[(self.draw() % 64) as usize]).collect();
        words.join(" ")
    }
}

/// All requests of a load, in the order of their times.
///
/// # Errors
/// If the file of a data set cannot be read.
pub(super) fn requests(
    args: &BenchServeArgs,
    model: &str,
    seed: u64,
) -> Result<Vec<PlannedRequest>, InputError> {
    let lines = match &args.dataset_path {
        Some(path) => lines(path, args.endpoint)?,
        None => vec![DatasetLine::default()],
    };
    let (mut times, mut texts) = (LoadDice(seed), LoadDice(!seed));
    let mut at = 0.0;
    let planned = lines.iter().cycle().take(args.num_prompts).map(|line| {
        let planned = PlannedRequest {
            at: Duration::try_from_secs_f64(at).unwrap_or(LATEST).min(LATEST),
            body: body(args, model, line, &mut texts),
        };
        at += times.gap(args.request_rate);
        planned
    });
    Ok(planned.collect())
}

fn body(args: &BenchServeArgs, model: &str, line: &DatasetLine, texts: &mut LoadDice) -> Value {
    let prompt = match &line.prompt {
        Some(prompt) => prompt.clone(),
        None => texts.words(line.input_len.unwrap_or(args.input_len)),
    };
    let most = line.output_len.unwrap_or(args.output_len);
    let mut body = json!({"model": model, "stream": true, "stream_options": {"include_usage": true}});
    match args.endpoint {
        EndpointName::Completions => {
            body["prompt"] = json!(prompt);
            body["max_tokens"] = json!(most);
        }
        EndpointName::Chat => {
            let said = || json!([{"role": "user", "content": prompt}]);
            body["messages"] = line.messages.clone().unwrap_or_else(said);
            body["max_completion_tokens"] = json!(most);
        }
    }
    if args.ignore_eos {
        body["ignore_eos"] = json!(true);
    }
    body
}

fn lines(path: &Path, endpoint: EndpointName) -> Result<Vec<DatasetLine>, InputError> {
    let shown = path.display();
    let text = fs::read_to_string(path)
        .map_err(|error| InputError(format!("--dataset-path {shown} cannot be read: {error}")))?;
    let one = |(nth, line): (usize, &str)| {
        let failed = |error: String| {
            InputError(format!(
                "--dataset-path {shown}, line {}: {error}; give an object like {{\"prompt\": \"..\", \"output_len\": 64}}",
                nth + 1
            ))
        };
        let read: DatasetLine = serde_json::from_str(line).map_err(|error| failed(error.to_string()))?;
        for (name, length) in [("input_len", read.input_len), ("output_len", read.output_len)] {
            if let Some(length) = length.filter(|length| !(1..=MOST_TOKENS).contains(length)) {
                return Err(failed(format!("{name} {length} is not from 1 to {MOST_TOKENS}")));
            }
        }
        if read.messages.is_some() && read.prompt.is_none() && endpoint == EndpointName::Completions {
            return Err(failed("messages are for --endpoint chat".to_owned()));
        }
        Ok(read)
    };
    let lines: Vec<DatasetLine> = text
        .lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty())
        .map(one)
        .collect::<Result<_, _>>()?;
    if lines.is_empty() {
        return Err(InputError(format!("--dataset-path {shown} has no line: give one at least")));
    }
    Ok(lines)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::{EndpointName, LoadDice, WORDS, lines};
    use std::fs;

    #[test]
    fn events_come_at_their_rate_and_are_as_irregular_as_chance() {
        let mut dice = LoadDice(7);
        let gaps: Vec<f64> = (0..20_000).map(|_| dice.gap(4.0)).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        assert!((mean - 0.25).abs() < 0.01 && (variance.sqrt() - 0.25).abs() < 0.01, "{mean} {variance}");
        assert!(LoadDice(7).gap(f64::INFINITY) == 0.0);
    }

    #[test]
    fn lines_of_a_data_set_that_cannot_be_sent_are_named() {
        let place = tempfile::NamedTempFile::new().unwrap();
        let read = |text: &str| {
            fs::write(place.path(), text).unwrap();
            lines(place.path(), EndpointName::Completions)
        };
        assert_eq!(read("{\"input_len\": 3}\n\n{\"prompt\": \"a\"}\n").unwrap().len(), 2);
        let refused = [
            "{\"input_len\": 1000000000000000000}",
            "{\"output_len\": 0}",
            "{\"messages\": []}",
            "{\"prompt\": 3}",
            "[",
        ];
        for line in refused {
            let error = read(&format!("{{}}\n{line}\n")).unwrap_err().to_string();
            assert!(error.contains("line 2:"), "{error}");
        }
    }

    #[test]
    fn prompts_are_words_that_a_seed_repeats() {
        let text = LoadDice(3).words(50);
        assert_eq!(text, LoadDice(3).words(50));
        assert_ne!(text, LoadDice(4).words(50));
        assert_eq!(text.split(' ').filter(|word| WORDS.contains(word)).count(), 50);
    }
}
