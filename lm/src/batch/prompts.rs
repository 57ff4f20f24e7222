//! A file of prompts.

use examples::cli::{Checked, UsageError, require};
use serde::Deserialize;

use crate::check::MAX_TOKENS;

/// A prompt of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// Its line, from 1.
    pub line: usize,
    /// The text.
    pub text: String,
    /// The most tokens to write, if the line says so.
    pub max_tokens: Option<usize>,
}

/// A line in JSON.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    prompt: String,
    max_tokens: Option<usize>,
}

/// Reads a file of prompts: one in each line, or an object in each line if the first line starts with a brace. Empty lines
/// are between prompts.
///
/// # Errors
/// If there is no prompt, or a line is no such object: the file and the line are named.
///
/// ```
/// use lm::batch::prompts::parse;
///
/// let plain = parse("file", "Once\n\nTwice\n")?;
/// assert_eq!((plain[1].line, plain[1].text.as_str(), plain[1].max_tokens), (3, "Twice", None));
/// let json = parse("file", "{\"prompt\": \"Once\\nupon\", \"max_tokens\": 3}\n{\"prompt\": \"Twice\"}")?;
/// assert_eq!((json[0].text.as_str(), json[0].max_tokens), ("Once\nupon", Some(3)));
/// assert!(parse("file", "{\"prompt\": \"Once\"}\nTwice").unwrap_err().0.starts_with("file, line 2"));
/// # Ok::<(), examples::cli::UsageError>(())
/// ```
pub fn parse(file: &str, text: &str) -> Checked<Vec<Prompt>> {
    // A byte order mark is no part of the text.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let lines = || (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty());
    let is_json = lines().next().is_some_and(|(_, line)| line.trim_start().starts_with('{'));
    let prompts: Vec<Prompt> = lines()
        .map(|(line, text)| {
            if is_json {
                object(file, line, text)
            } else {
                Ok(Prompt { line, text: text.into(), max_tokens: None })
            }
        })
        .collect::<Checked<_>>()?;
    require!(!prompts.is_empty(), "{file} has no prompt: give one in each line.");
    Ok(prompts)
}

fn object(file: &str, line: usize, text: &str) -> Checked<Prompt> {
    let wrong = |error: &dyn std::fmt::Display| {
        UsageError(format!(
            "{file}, line {line}: {error}: the first line is a JSON object, so give {{\"prompt\": \"..\"}} in each, perhaps with \
             \"max_tokens\"."
        ))
    };
    let Line { prompt, max_tokens } = serde_json::from_str(text).map_err(|error| wrong(&error))?;
    if prompt.is_empty() {
        return Err(wrong(&"the prompt is empty"));
    }
    if max_tokens == Some(0) {
        return Err(wrong(&"max_tokens is 0"));
    }
    if let Some(most) = max_tokens.filter(|&most| most > MAX_TOKENS) {
        return Err(wrong(&format_args!("max_tokens {most} is more than {MAX_TOKENS}")));
    }
    Ok(Prompt { line, text: prompt, max_tokens })
}
