//! Texts that end what is written.

use anyhow::{Result, ensure};
use tokenizers::Tokenizer;

use crate::tokens::TextStream;

/// Splits the values of `--stop` into texts and special tokens, which never become text.
///
/// # Errors
/// If a value has a special token and other text: it could never match.
pub fn split(values: &[String], tokenizer: &Tokenizer) -> Result<(Vec<String>, Vec<u32>)> {
    let special: Vec<(u32, String)> = tokenizer
        .get_added_tokens_decoder()
        .into_iter()
        .filter(|(_, token)| token.special && !token.content.is_empty())
        .map(|(id, token)| (id, token.content))
        .collect();
    let (mut texts, mut tokens) = (Vec::new(), Vec::new());
    for value in values {
        match special.iter().find(|(_, token)| token == value) {
            Some(&(id, _)) => tokens.push(id),
            None => {
                let inside = special.iter().find(|(_, token)| value.contains(token.as_str()));
                ensure!(
                    inside.is_none(),
                    "--stop {value:?} has the special token {:?} and other text, which never match together: give the token alone",
                    inside.map_or("", |(_, token)| token)
                );
                texts.push(value.clone());
            }
        }
    }
    Ok((texts, tokens))
}

/// Text that is shown until one of some texts comes, which is not shown.
///
/// What may be the beginning of such a text waits until it is clear.
///
/// ```
/// use candle_lm::stops::Stops;
///
/// let mut stops = Stops::new(vec!["\nUser:".into()]);
/// assert_eq!(stops.next("Hi.\nU"), ("Hi.".to_owned(), false));
/// assert_eq!(stops.next("ser"), (String::new(), false));
/// assert_eq!(stops.next("s too"), ("\nUsers too".to_owned(), false));
/// assert_eq!(stops.next("!\nUser: no"), ("!".to_owned(), true));
/// ```
#[derive(Clone, Debug)]
pub struct Stops {
    texts: Vec<String>,
    waiting: String,
}

impl Stops {
    /// Nothing came yet; empty texts end nothing.
    pub fn new(texts: Vec<String>) -> Self {
        Self { texts: texts.into_iter().filter(|text| !text.is_empty()).collect(), waiting: String::new() }
    }

    /// What can be shown now that `more` has come, and whether it is the end.
    pub fn next(&mut self, more: &str) -> (String, bool) {
        self.waiting.push_str(more);
        if let Some(at) = self.texts.iter().filter_map(|text| self.waiting.find(text)).min() {
            self.waiting.truncate(at);
            return (std::mem::take(&mut self.waiting), true);
        }
        let begins = |&at: &usize| {
            let rest = &self.waiting[at..];
            self.texts.iter().any(|text| text.starts_with(rest))
        };
        let starts = self.waiting.char_indices().map(|(at, _)| at);
        let clear = starts.into_iter().find(begins).unwrap_or(self.waiting.len());
        let rest = self.waiting.split_off(clear);
        (std::mem::replace(&mut self.waiting, rest), false)
    }

    /// What still waits, when nothing follows.
    pub fn finish(self) -> String {
        self.waiting
    }

    /// Returns the text that can still be shown when no tokens follow those of `stream`: none if the text `is_over`.
    ///
    /// # Errors
    /// Those of the tokenizer.
    pub fn rest(mut self, stream: TextStream<'_>, is_over: bool) -> Result<String> {
        if is_over {
            return Ok(String::new());
        }
        let (mut rest, ends) = self.next(&stream.finish()?);
        if !ends {
            rest.push_str(&self.finish());
        }
        Ok(rest)
    }
}
