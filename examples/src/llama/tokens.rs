//! Text to tokens and back.

use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use tokenizers::Tokenizer;
use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::models::bpe::{BPE, Vocab};

/// The tokenizer of the model in `folder`.
///
/// # Errors
/// If there is none, or it cannot be read; the file is named.
pub fn read(folder: &Path) -> Result<Tokenizer> {
    let path = folder.join("tokenizer.json");
    Tokenizer::from_file(&path).map_err(|error| anyhow!("{error}")).with_context(|| format!("{}", path.display()))
}

/// The tokens of a text.
///
/// # Errors
/// Those of the tokenizer.
pub fn encode(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>> {
    let encoding = tokenizer.encode(text, true).map_err(|error| anyhow!("the text: {error}"))?;
    Ok(encoding.get_ids().to_vec())
}

/// Checks that a model of so many tokens knows these.
///
/// # Errors
/// If it does not know one of them, which is named.
pub fn check(tokens: &[u32], known: usize) -> Result<()> {
    match tokens.iter().find(|&&token| token as usize >= known) {
        Some(token) => {
            bail!("tokenizer.json has the token {token}, and the model {known} tokens; they do not fit together")
        }
        None => Ok(()),
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
