//! Text to tokens and back.

use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use candle_shard::regular;
use tokenizers::Tokenizer;
use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::models::bpe::{BPE, Vocab};

use super::gguf;

/// The tokenizer of the model in a folder, or in a GGUF file.
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
    tokenizer.with_padding(None).with_truncation(None).map_err(|error| anyhow!("{}: {error}", path.display()))?;
    Ok(tokenizer)
}

/// The tokens of a text.
///
/// # Errors
/// Those of the tokenizer.
pub fn encode(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>> {
    let encoding = tokenizer.encode(text, true).map_err(|error| anyhow!("the text: {error}"))?;
    Ok(encoding.get_ids().to_vec())
}

/// Returns the tokens of a text that has its special tokens in it, as chat templates write it.
///
/// # Errors
/// Those of the tokenizer.
pub fn encode_rendered(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>> {
    let encoding = tokenizer.encode(text, false).map_err(|error| anyhow!("the text: {error}"))?;
    Ok(encoding.get_ids().to_vec())
}

/// Checks that a model of so many tokens knows these.
///
/// # Errors
/// If it does not know one of them, which is named.
pub fn check(tokens: &[u32], known: usize) -> Result<()> {
    match tokens.iter().find(|&&token| token as usize >= known) {
        Some(token) => {
            bail!("the tokenizer has the token {token}, and the model {known} tokens; they do not fit together")
        }
        None => Ok(()),
    }
}

/// What a decoder writes for bytes that are no characters, or not yet.
const UNKNOWN: char = '\u{FFFD}';

/// Tokens that become text one by one, behind those of a prompt.
///
/// What a token reads as depends on those before it: a space at the start of a text is left out, and some characters
/// are several tokens. So each is decoded together with the last ones before it, and bytes that are no character yet
/// wait for those that follow.
///
/// ```
/// use examples::lm::tokens::{self, TextStream};
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
        self.tokens.push(token);
        let text = self.waiting()?;
        if text.is_empty() || text.ends_with(UNKNOWN) {
            return Ok(String::new());
        }
        self.tokens.drain(..self.told);
        self.told = self.tokens.len();
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
