//! The model as requests see it: its name, tokens and template.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail};
use candle_lm::InputError;
use candle_lm::chat::ChatTemplate;
use candle_lm::files::Files;
use candle_lm::tokens;
use tokenizers::Tokenizer;

use super::calls::CallFormat;
use super::grammar::Grammars;
use super::vocabulary::{self, TokenText};

/// The model as requests see it. It has no weights: those are the ranks'.
pub struct ServedModel {
    /// The name that clients ask for.
    pub name: String,
    /// The names for which they get the model with the adapter of this place.
    pub(super) adapters: Vec<String>,
    /// When it was opened, in seconds since 1970.
    pub(super) created: u64,
    pub(super) tokenizer: Tokenizer,
    plain: OnceLock<Tokenizer>,
    pub(super) template: Option<ChatTemplate>,
    /// How many tokens the model's logits have.
    pub(super) vocab_size: usize,
    /// What each token of the tokenizer writes.
    pub(super) texts: Vec<TokenText>,
    /// The bytes of the longest token.
    pub(super) longest_token: usize,
    /// How the model calls functions, if its template says so.
    pub(super) calls: Option<CallFormat>,
    /// Special tokens that mean something in a reply, with their letters, which a tokenizer leaves out of texts.
    pub(super) markers: BTreeMap<u32, String>,
    pub(super) grammars: Grammars,
    /// The numbers of an embedding, of a model that writes no texts.
    pub(super) embedding: Option<usize>,
}

/// What a reply may have of special tokens that say how it is to be read.
const MARKERS: [&str; 8] = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<|python_tag|>",
];

impl ServedModel {
    /// The model of these files. What ends a turn of its template ends texts too, from now on.
    ///
    /// # Errors
    /// If the tokenizer or the template cannot be read, or an adapter is named as the model. A model without a template writes texts alone.
    pub fn new(name: &str, files: &mut Files) -> Result<Self> {
        let tokenizer = files.tokenizer()?;
        let template = files.find_chat_template()?;
        files.ends.extend(template.as_ref().and_then(|template| template.end_of_turn(&tokenizer)));
        let model = Self::of_parts(name, tokenizer, template, files.config.vocab_size, &files.ends);
        let adapters: Vec<String> = files.adapters.iter().map(|adapter| adapter.name().to_owned()).collect();
        if adapters.iter().any(|adapter| adapter == name) {
            bail!(InputError(format!(
                "--adapter {name}=..: the model has this name too; give the adapter another one, or the model by --name."
            )));
        }
        Ok(model.with_adapters(adapters))
    }

    /// The model, which has adapters of these names too.
    pub fn with_adapters(self, adapters: Vec<String>) -> Self {
        Self { adapters, ..self }
    }

    /// The model as an encoder, whose embeddings have so many numbers.
    pub fn with_embeddings(self, width: usize) -> Self {
        Self { embedding: Some(width), ..self }
    }

    /// The tokens of a text as the model reads it.
    ///
    /// # Errors
    /// Those of the tokenizer.
    pub(super) fn tokens(&self, text: &str) -> Result<Vec<u32>> {
        match self.embedding {
            Some(_) => tokens::encode(&self.tokenizer, text),
            // What ends a text is not in front of more.
            None => tokens::encode_prompt(&self.tokenizer, text),
        }
    }

    /// What clients call the model, and the model with each adapter.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(&self.name).chain(&self.adapters).map(String::as_str)
    }

    /// The name of the model with an adapter, or without.
    pub(super) fn name_with(&self, adapter: Option<usize>) -> &str {
        adapter.and_then(|adapter| self.adapters.get(adapter)).unwrap_or(&self.name)
    }

    /// A model of `vocab_size` logits with this tokenizer, whose texts end with one of `ends`.
    pub fn of_parts(
        name: &str,
        tokenizer: Tokenizer,
        template: Option<ChatTemplate>,
        vocab_size: usize,
        ends: &BTreeSet<u32>,
    ) -> Self {
        let texts = vocabulary::texts(&tokenizer);
        let added = tokenizer.get_added_tokens_decoder();
        let markers =
            added.into_iter().filter(|(_, token)| token.special && MARKERS.contains(&&*token.content));
        Self {
            name: name.to_owned(),
            adapters: Vec::new(),
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            longest_token: texts.iter().map(|token| token.bytes.len()).max().unwrap_or(1).max(1),
            calls: template.as_ref().and_then(CallFormat::of),
            markers: markers.map(|(id, token)| (id, token.content)).collect(),
            grammars: Grammars::new(&texts, vocab_size, ends),
            tokenizer,
            plain: OnceLock::new(),
            embedding: None,
            template,
            vocab_size,
            texts,
        }
    }

    /// The tokenizer for which names of special tokens are text, which is made for the first message with such a name.
    pub(super) fn plain(&self) -> &Tokenizer {
        self.plain.get_or_init(|| tokens::plain(&self.tokenizer))
    }

    /// The bytes that a token writes.
    pub(super) fn bytes(&self, token: u32) -> &[u8] {
        self.texts.get(token as usize).map_or(&[], |token| &token.bytes)
    }
}
