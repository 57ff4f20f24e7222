//! What each token writes, for log-probabilities and grammars.

use std::collections::HashMap;

use serde_json::Value;
use tokenizers::Tokenizer;

/// What a token writes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct TokenText {
    pub(super) bytes: Vec<u8>,
    /// Whether it has a meaning besides its letters, so that no grammar has it.
    pub(super) is_control: bool,
}

/// Returns what each token of a tokenizer writes. It is what the token adds to a text, with the space before a word.
pub(super) fn texts(tokenizer: &Tokenizer) -> Vec<TokenText> {
    let size = tokenizer.get_vocab(true).values().max().map_or(0, |&last| last as usize + 1);
    let mut texts = vec![TokenText::default(); size];
    let decoder = serde_json::to_value(tokenizer.get_decoder()).unwrap_or_default();
    let letters = has(&decoder, "ByteLevel").then(byte_letters);
    let has_byte_tokens = has(&decoder, "ByteFallback");
    let added = tokenizer.get_added_tokens_decoder();
    for (token, id) in tokenizer.get_vocab(true) {
        let Some(text) = texts.get_mut(id as usize) else { continue };
        if let Some(added) = added.get(&id) {
            text.bytes = added.content.clone().into_bytes();
            text.is_control = added.special || is_tag(added.content.trim());
            continue;
        }
        let of_letters =
            letters.as_ref().and_then(|letters| token.chars().map(|c| letters.get(&c).copied()).collect());
        let of_byte = || byte_token(&token).filter(|_| has_byte_tokens).map(|byte| vec![byte]);
        text.bytes = of_letters.or_else(of_byte).unwrap_or_else(|| token.replace('▁', " ").into_bytes());
    }
    texts
}

/// Whether a decoder has a part of this type.
fn has(decoder: &Value, kind: &str) -> bool {
    match decoder {
        Value::Object(fields) => {
            fields.get("type").is_some_and(|own| own == kind) || fields.values().any(|part| has(part, kind))
        }
        Value::Array(parts) => parts.iter().any(|part| has(part, kind)),
        _ => false,
    }
}

/// The letters that stand for bytes since GPT-2: visible ones for themselves, the others from 256 on.
fn byte_letters() -> HashMap<char, u8> {
    let is_visible = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let hidden = (0..=255u8).filter(|byte| !is_visible(byte)).zip(256u32..);
    let hidden = hidden.filter_map(|(byte, letter)| Some((char::from_u32(letter)?, byte)));
    (0..=255u8).filter(is_visible).map(|byte| (char::from(byte), byte)).chain(hidden).collect()
}

/// The byte of a token such as `<0x0A>`.
fn byte_token(token: &str) -> Option<u8> {
    u8::from_str_radix(token.strip_prefix("<0x")?.strip_suffix('>').filter(|digits| digits.len() == 2)?, 16)
        .ok()
}

/// Whether a token looks like a tag.
fn is_tag(token: &str) -> bool {
    [('<', '>'), ('[', ']')]
        .iter()
        .any(|&(open, close)| token.len() > 2 && token.starts_with(open) && token.ends_with(close))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use candle_lm::tokens;

    use super::*;

    #[test]
    fn tokens_of_bytes_write_all_bytes() {
        let tokenizer = tokens::of_bytes().unwrap();
        let texts = texts(&tokenizer);
        let said = "Grüße, 世界! 🙂\n\t";
        let ids = tokens::encode(&tokenizer, said).unwrap();
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| texts[id as usize].bytes.clone()).collect();
        assert_eq!(bytes, said.as_bytes());
        let mut all: Vec<u8> = texts.iter().flat_map(|token| token.bytes.clone()).collect();
        all.sort_unstable();
        assert_eq!(all, (0..=255).collect::<Vec<u8>>());
    }

    #[test]
    fn bytes_in_words_and_tags_are_told_from_letters() {
        assert_eq!(byte_token("<0x0A>"), Some(10));
        for other in ["<0xA>", "0x0A", "<0x0G>", "<0x000A>"] {
            assert_eq!(byte_token(other), None, "{other}");
        }
        assert!(is_tag("<think>") && is_tag("[INST]") && !is_tag("<>") && !is_tag("  ") && !is_tag("<a"));
    }
}
