//! From records to tokens, of which some are to be learned.

use std::iter;
use std::ops::Range;

use anyhow::Result;
use jiff::civil::{DateTime, date};
use tokenizers::Tokenizer;

use super::record::Record;
use crate::chat::ChatTemplate;
use crate::error::InputError;
use crate::files::Files;
use crate::tokens;

/// The tokens of a record, or a part of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Document {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// Which of them are to be predicted.
    pub counts: Vec<bool>,
}

/// Makes documents of records for a model.
#[derive(Debug)]
pub struct RecordEncoder {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    /// The token that ends a text, if the model has one.
    end: Option<u32>,
    vocab_size: usize,
}

/// The time that templates are told, which is the same on each day and each host: that of Llama 3's template where it is told none.
fn then() -> DateTime {
    date(2024, 7, 26).at(12, 0, 0, 0)
}

impl RecordEncoder {
    /// The encoder of a model. Texts and completions end with its `eos_token`, or else with the first token that its config names.
    ///
    /// # Errors
    /// If its tokenizer or its chat template cannot be read.
    pub fn new(files: &Files) -> Result<Self> {
        let tokenizer = files.tokenizer()?;
        let named = files.special_tokens()?.remove("eos_token").flatten();
        let end = named.and_then(|token| tokenizer.token_to_id(&token));
        let end = end.or_else(|| files.ends.first().copied());
        let template = files.find_chat_template()?;
        Ok(Self { tokenizer, template, end, vocab_size: files.config.vocab_size })
    }

    /// The tokens of a record: one document, or two for a preference, of which the first is the better one.
    ///
    /// # Errors
    /// If the chat template refuses a conversation, or does not tell what the model writes in it; if the tokenizer fails; if there is
    /// no chat template.
    pub fn encode(&self, record: &Record) -> Result<Vec<Document>> {
        let (spans, learned) = match record {
            Record::Text(text) => {
                let spans = tokens::encode_spans(&self.tokenizer, text)?;
                let tokens: Vec<u32> = spans.into_iter().map(|(token, _)| token).chain(self.end).collect();
                let counts = vec![true; tokens.len()];
                return self.checked(Document { tokens, counts });
            }
            Record::Preference { chosen, rejected } => {
                return Ok([self.encode(chosen)?, self.encode(rejected)?].concat());
            }
            Record::Completion { prompt, completion } => {
                let whole = format!("{prompt}{completion}");
                let mut spans = tokens::encode_spans(&self.tokenizer, &whole)?;
                // The end is that of the completion, also of an empty one.
                spans.extend(self.end.map(|end| (end, whole.len()..whole.len() + 1)));
                (spans, iter::once(prompt.len()..whole.len() + 1).collect())
            }
            Record::Chat(messages) => {
                let template = self.template.as_ref().ok_or_else(|| {
                    InputError("it is a conversation, and the model has no chat template".into())
                })?;
                let (script, replies) = template.render_replies(messages, then())?;
                (tokens::encode_rendered_spans(&self.tokenizer, &script)?, replies)
            }
        };
        let tokens = spans.iter().map(|(token, _)| *token).collect();
        let counts = spans.iter().map(|(_, span)| learned.iter().any(|part| meets(part, span))).collect();
        self.checked(Document { tokens, counts })
    }

    fn checked(&self, document: Document) -> Result<Vec<Document>> {
        tokens::check(&document.tokens, self.vocab_size)?;
        Ok(vec![document])
    }
}

/// Whether a token stands for some of these bytes.
fn meets(part: &Range<usize>, token: &Range<usize>) -> bool {
    token.start < part.end && part.start < token.end
}
