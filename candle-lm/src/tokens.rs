//! Text to tokens and back.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use candle_dist::panic_message;
use candle_shard::regular;
use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::{AddedToken, Encoding, Model as _, NormalizedString, Normalizer as _, Tokenizer};

use crate::chat::Script;
use crate::gguf;
use crate::special_tokens::SpecialTokens;

/// The tokenizer of the model in a folder, or in a GGUF file. In a folder it has the tokens that files beside `tokenizer.json` declare.
///
/// What the file says of cutting and filling up texts is for batches of sentences, and left out.
///
/// # Errors
/// If there is none, or it cannot be read; the file is named.
pub fn read(model: &Path) -> Result<Tokenizer> {
    if !model.is_dir() {
        return gguf::tokenizer::read(model);
    }
    let path = model.join("tokenizer.json");
    let parsed = || -> Result<Tokenizer> {
        let text = regular::read_text(&path, regular::TOKENIZER)?;
        // The crate panics where a part of the file is not JSON.
        serde_json::from_str::<serde_json::Value>(&text)?;
        text.parse().map_err(|error| anyhow!("{error}"))
    };
    let mut tokenizer = parsed().with_context(|| format!("{}", path.display()))?;
    SpecialTokens::read(model)?.add_to(&mut tokenizer).with_context(|| format!("{}", path.display()))?;
    tokenizer
        .with_padding(None)
        .with_truncation(None)
        .map_err(|error| anyhow!("{}: {error}", path.display()))?;
    Ok(tokenizer)
}

/// The tokens of a text.
///
/// # Errors
/// Those of the tokenizer.
pub fn encode(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>> {
    Ok(encoding(tokenizer, text, true)?.get_ids().to_vec())
}

/// Returns the tokens of a text that is continued: without those that end a text, which some tokenizers put behind each.
///
/// # Errors
/// Those of the tokenizer.
pub fn encode_prompt(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>> {
    Ok(encode_spans(tokenizer, text)?.into_iter().map(|(id, _)| id).collect())
}

/// Returns the tokens of a part of a text: without those around a whole one.
///
/// # Errors
/// Those of the tokenizer.
pub fn encode_part(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>> {
    Ok(encoding(tokenizer, text, false)?.get_ids().to_vec())
}

/// Returns the tokens that [`encode_prompt`] returns, each with the bytes of the text that it stands for. Those in front of the text
/// stand for none.
pub(crate) fn encode_spans(tokenizer: &Tokenizer, text: &str) -> Result<Vec<(u32, Range<usize>)>> {
    let encoding = encoding(tokenizer, text, true)?;
    let around = encoding.get_special_tokens_mask();
    let behind = around.iter().rev().take_while(|&&is_around| is_around == 1).count();
    // Those around a text without tokens are in front of it.
    let len = if behind == around.len() { behind.min(1) } else { around.len() - behind };
    let spans = encoding.get_offsets().iter().map(|&(start, end)| start..end);
    Ok(encoding.get_ids().iter().copied().zip(spans).take(len).collect())
}

/// Returns what the tokenizer makes of a text, with the tokens around it where it is `whole`.
fn encoding(tokenizer: &Tokenizer, text: &str, whole: bool) -> Result<Encoding> {
    // The crate panics where a pattern of the file takes too many steps on a text.
    let made = catch_unwind(AssertUnwindSafe(|| tokenizer.encode(text, whole)));
    let made =
        made.map_err(|panic| anyhow!("the tokenizer cannot cut the text: {}", panic_message(&*panic)))?;
    made.map_err(|error| anyhow!("the text: {error}"))
}

/// Returns the tokens of a conversation, with the control tokens that its template wrote.
///
/// What looks like one in a message stays text. Control tokens are special ones, those that the template names, and those of the
/// form `<|name|>`. The tokens of other conversations are those of the whole text.
///
/// # Errors
/// Those of the tokenizer; if it has no other token than a control token for a part of a message.
pub fn encode_rendered(tokenizer: &Tokenizer, script: &Script) -> Result<Vec<u32>> {
    Ok(encode_rendered_spans(tokenizer, script)?.into_iter().map(|(id, _)| id).collect())
}

/// Returns the tokens that [`encode_rendered`] returns, by a tokenizer that [`plain`] made once for many
/// conversations.
///
/// # Errors
/// Those of [`encode_rendered`].
pub fn encode_rendered_with<'p>(
    tokenizer: &Tokenizer,
    plain: impl FnOnce() -> Cow<'p, Tokenizer>,
    script: &Script,
) -> Result<Vec<u32>> {
    let added = tokenizer.get_added_tokens_decoder().into_iter().collect();
    let spans = Controls { script, added, tokenizer }.encode(plain)?;
    Ok(spans.into_iter().map(|span| span.id).collect())
}

/// Returns a tokenizer for which the names of special tokens are text.
pub fn plain(tokenizer: &Tokenizer) -> Tokenizer {
    let mut plain = tokenizer.clone();
    plain.set_encode_special_tokens(true);
    plain
}

/// Whether a token never becomes text, as special ones do not.
pub fn is_silent(tokenizer: &Tokenizer, token: u32) -> bool {
    let added = tokenizer.get_added_vocabulary();
    let letters = added.simple_id_to_token(token).or_else(|| tokenizer.get_model().id_to_token(token));
    letters.is_none_or(|letters| added.is_special_token(&letters))
}

/// Returns the tokens that [`encode_rendered`] returns, each with the bytes of the text that it stands for.
pub(crate) fn encode_rendered_spans(
    tokenizer: &Tokenizer,
    script: &Script,
) -> Result<Vec<(u32, Range<usize>)>> {
    let added = tokenizer.get_added_tokens_decoder().into_iter().collect();
    let spans = Controls { script, added, tokenizer }.encode(|| Cow::Owned(plain(tokenizer)))?;
    Ok(spans.into_iter().map(|span| (span.id, span.taken)).collect())
}

/// Returns the tokens with names that are no control tokens, for example `<think>`.
pub fn named(tokenizer: &Tokenizer) -> HashMap<u32, String> {
    let added = tokenizer.get_added_tokens_decoder().into_iter();
    let named = added
        .filter(|(_, token)| !token.special && !token.content.is_empty() && !is_marker(token.content.trim()));
    named.map(|(id, token)| (id, token.content)).collect()
}

/// The control tokens of a conversation.
struct Controls<'a> {
    script: &'a Script,
    tokenizer: &'a Tokenizer,
    added: HashMap<u32, AddedToken>,
}

/// A token of a conversation.
#[derive(Clone)]
struct TokenSpan {
    id: u32,
    /// The bytes that it stands for.
    text: Range<usize>,
    /// These with the spaces around them that some tokens take.
    taken: Range<usize>,
}

impl Controls<'_> {
    fn encode<'p>(&self, plain: impl FnOnce() -> Cow<'p, Tokenizer>) -> Result<Vec<TokenSpan>> {
        let tokens = self.tokens(self.tokenizer, 0..self.script.len())?;
        if !tokens.iter().any(|token| self.is_false(token)) {
            return Ok(tokens);
        }
        let plain = plain();
        // The tokenizer cuts the text at control tokens, so what is between two of them does not depend on others.
        let (mut spans, mut start) = (Vec::new(), 0);
        for part in tokens.split_inclusive(|token| self.is_true(token)) {
            let (last, inside) = match part.split_last() {
                Some((last, inside)) if self.is_true(last) => (Some(last), inside),
                _ => (None, part),
            };
            let end = last.map_or(self.script.len(), |last| last.taken.start);
            if inside.iter().any(|token| self.is_false(token)) {
                self.encode_text(&plain, start..end, &mut spans)?;
            } else {
                spans.extend_from_slice(inside);
            }
            spans.extend(last.cloned());
            start = last.map_or(end, |last| last.taken.end);
        }
        Ok(spans)
    }

    /// Appends the tokens of a part without control tokens.
    fn encode_text(&self, plain: &Tokenizer, part: Range<usize>, spans: &mut Vec<TokenSpan>) -> Result<()> {
        let mut parts = vec![part];
        while let Some(part) = parts.pop() {
            let tokens = self.tokens(plain, part.clone())?;
            let mut cuts = Vec::new();
            for TokenSpan { text: span, .. } in tokens.iter().filter(|token| self.is_false(token)) {
                // Tokens that are not special, and those that the model itself knows by their letters: these are apart.
                let text = &self.script[span.clone()];
                let first = text.chars().next().map_or(0, char::len_utf8);
                ensure!(
                    first > 0 && first < text.len(),
                    "a message has {text:?}, which is a control token: leave it out"
                );
                cuts.push(span.start + first);
            }
            if cuts.is_empty() {
                spans.extend(tokens);
                continue;
            }
            let mut end = part.end;
            for cut in cuts.into_iter().rev() {
                parts.push(cut..end);
                end = cut;
            }
            parts.push(part.start..end);
        }
        Ok(())
    }

    fn tokens(&self, tokenizer: &Tokenizer, part: Range<usize>) -> Result<Vec<TokenSpan>> {
        let text = &self.script[part.clone()];
        let encoding = encoding(tokenizer, text, false)?;
        let span = |(&id, &(start, end)): (&u32, &(usize, usize))| {
            let inside = text.get(start..end).unwrap_or_default();
            let taken = part.start + start..part.start + end;
            let start = taken.start + inside.len() - inside.trim_start().len();
            TokenSpan { id, text: start..start + inside.trim().len(), taken }
        };
        Ok(encoding.get_ids().iter().zip(encoding.get_offsets()).map(span).collect())
    }

    /// Whether a token is a control token that the template wrote.
    fn is_true(&self, token: &TokenSpan) -> bool {
        self.is_control(token) && self.script.is_own(&token.text)
    }

    /// Whether a token is a control token that the template did not write.
    fn is_false(&self, token: &TokenSpan) -> bool {
        self.is_control(token) && !self.script.is_own(&token.text)
    }

    fn is_control(&self, TokenSpan { id, text: span, .. }: &TokenSpan) -> bool {
        let Some(token) = self.added.get(id) else { return false };
        let content = token.content.trim();
        // A text that the tokenizer does not know has a special token too, and other letters than that.
        let is_named =
            |text: &str| text == content || self.normalized(text).contains(self.normalized(content).trim());
        let is_control = token.special || self.script.is_known(content) || is_marker(content);
        !content.is_empty() && is_control && is_named(&self.script[span.clone()])
    }

    fn normalized(&self, text: &str) -> String {
        let mut normalized = NormalizedString::from(text);
        let done = self.tokenizer.get_normalizer().map(|normalizer| normalizer.normalize(&mut normalized));
        if done.is_none_or(|done| done.is_ok()) { normalized.get().to_owned() } else { text.to_owned() }
    }
}

/// Whether a token has the form of control tokens, which some tokenizers do not say to be special. Tags such as `<think>` are text.
fn is_marker(token: &str) -> bool {
    [("<|", "|>"), ("<｜", "｜>")].iter().any(|(start, end)| {
        token.strip_prefix(start).and_then(|rest| rest.strip_suffix(end)).is_some_and(|name| !name.is_empty())
    })
}

/// Checks that a model of so many tokens knows these.
///
/// # Errors
/// If it does not know one of them, which is named.
pub fn check(tokens: &[u32], known: usize) -> Result<()> {
    match tokens.iter().find(|&&token| token as usize >= known) {
        Some(token) => {
            bail!(
                "the tokenizer has the token {token}, and the model {known} tokens; they do not fit together"
            )
        }
        None => Ok(()),
    }
}

/// What a decoder writes for bytes that are no characters, or not yet.
const UNKNOWN: char = '\u{FFFD}';

/// The most tokens that wait to become text.
const MOST_WAITING: usize = 8;

/// Tokens that become text one by one, behind those of a prompt.
///
/// What a token reads as depends on those before it: a space at the start of a text is left out, and some characters
/// are several tokens. So each is decoded together with the last ones before it, and bytes that are no character yet
/// wait for those that follow. Eight tokens wait at most: more than that are no character.
///
/// ```
/// use candle_lm::tokens::{self, TextStream};
///
/// let tokenizer = tokens::of_bytes()?;
/// let mut stream = TextStream::new(&tokenizer, &tokens::encode(&tokenizer, "caf")?);
/// let bytes = tokens::encode(&tokenizer, "é")?;
/// assert_eq!(bytes.len(), 2);
/// assert_eq!([stream.next(bytes[0])?, stream.next(bytes[1])?], ["", "é"]);
/// assert_eq!([stream.next(bytes[0])?, stream.finish()?], ["", "\u{FFFD}"]);
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The last tokens that became text, and those that wait.
    tokens: Vec<u32>,
    /// How many of them have become text.
    told: usize,
}

impl<'a> TextStream<'a> {
    /// A stream of what follows a prompt.
    pub fn new(tokenizer: &'a Tokenizer, prompt: &[u32]) -> Self {
        Self { tokenizer, tokens: prompt.to_vec(), told: prompt.len() }
    }

    /// The text that is complete with this token.
    ///
    /// # Errors
    /// Those of the tokenizer.
    pub fn next(&mut self, token: u32) -> Result<String> {
        if is_silent(self.tokenizer, token) {
            return Ok(String::new());
        }
        self.tokens.push(token);
        let text = self.waiting()?;
        if !text.is_empty() && !text.ends_with(UNKNOWN) {
            self.tokens.drain(..self.told);
            self.told = self.tokens.len();
            return Ok(text);
        }
        if self.tokens.len() - self.told <= MOST_WAITING {
            return Ok(String::new());
        }
        if text.is_empty() {
            // They write nothing.
            self.tokens.truncate(self.told);
            return Ok(text);
        }
        self.tell_broken()
    }

    /// Returns the text of all tokens that wait but the last ones, which may be the beginning of a character: three bytes at most.
    fn tell_broken(&mut self) -> Result<String> {
        let mut rest = Vec::new();
        let mut text = String::new();
        while rest.len() < 3 {
            rest.extend(self.tokens.pop());
            text = self.waiting()?;
            if !text.ends_with(UNKNOWN) {
                break;
            }
        }
        self.tokens.drain(..self.told);
        self.told = self.tokens.len();
        self.tokens.extend(rest.into_iter().rev());
        Ok(text)
    }

    /// What still waits, when no tokens follow.
    ///
    /// # Errors
    /// Those of the tokenizer.
    pub fn finish(self) -> Result<String> {
        self.waiting()
    }

    /// The text of the tokens that wait.
    fn waiting(&self) -> Result<String> {
        let decode = |tokens: &[u32]| {
            self.tokenizer.decode(tokens, true).map_err(|error| anyhow!("tokens {tokens:?} as text: {error}"))
        };
        let (before, whole) = (decode(&self.tokens[..self.told])?, decode(&self.tokens)?);
        match whole.strip_prefix(&before) {
            Some(text) => Ok(text.to_owned()),
            // Bytes can turn what was a character into none. What was told stays, and they are read by themselves.
            None => decode(&self.tokens[self.told..]),
        }
    }
}

/// A tokenizer with a token for each byte.
///
/// # Errors
/// Those of the tokenizer.
pub fn of_bytes() -> Result<Tokenizer> {
    let mut letters: Vec<char> = ByteLevel::alphabet().into_iter().collect();
    letters.sort_unstable();
    let vocab: Vocab = letters.into_iter().map(String::from).zip(0..).collect();
    let bpe = BPE::builder().vocab_and_merges(vocab, vec![]).build();
    let mut tokenizer = Tokenizer::new(bpe.map_err(|error| anyhow!("the tokenizer of bytes: {error}"))?);
    let bytes = ByteLevel::new(false, true, false);
    tokenizer.with_pre_tokenizer(Some(bytes)).with_decoder(Some(bytes));
    Ok(tokenizer)
}
