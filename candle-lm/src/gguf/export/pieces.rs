//! The pairs of a SentencePiece tokenizer as scores, which files have in place of merges.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::gguf::sentencepiece::SPACE;

/// The fields of a file, other than the tokens, that describe such a tokenizer.
pub(super) struct PieceScores {
    /// The score of each token that is made of a pair: pairs with high scores are merged first.
    pub(super) scores: BTreeMap<String, f32>,
    /// Whether texts begin with one more space.
    pub(super) prefixes: bool,
}

/// Returns whether tokens that are not known are bytes, as SentencePiece makes them.
pub(super) fn are_in(parts: &Value) -> bool {
    parts["model"]["type"] == "BPE" && parts["model"]["byte_fallback"] == true
}

/// The name of the token of a byte.
pub(super) fn of_byte(byte: u8) -> String {
    format!("<0x{byte:02X}>")
}

/// Reads a tokenizer of these `parts`, which has the tokens `known`, and others that stand apart: `added`.
///
/// # Errors
/// If llama.cpp would merge or cut otherwise.
pub(super) fn read(
    parts: &Value,
    known: &BTreeSet<&str>,
    added: &BTreeSet<&str>,
    merges: &[[&str; 2]],
) -> Result<PieceScores> {
    let model = &parts["model"];
    for name in ["continuing_subword_prefix", "end_of_word_suffix"] {
        ensure!(
            model[name].as_str().unwrap_or_default().is_empty(),
            "the tokenizer has a {name}, which files do not say"
        );
    }
    ensure!(
        model["ignore_merges"] != true,
        "the tokenizer takes whole words first, which files of its kind do not say"
    );
    let missing = (0..=u8::MAX).map(of_byte).find(|byte| !known.contains(byte.as_str()));
    ensure!(
        missing.is_none(),
        "the tokenizer has no token {}, and llama.cpp needs all bytes",
        missing.unwrap_or_default()
    );
    Ok(PieceScores { scores: scores(known, added, merges)?, prefixes: prefixes(parts)? })
}

/// The scores that follow from the order of merges. Tokens whose merges lie between each other's have one score: SentencePiece has such
/// tokens, for example runs of spaces, and transformers puts their merges in the order of lengths.
fn scores(
    known: &BTreeSet<&str>,
    added: &BTreeSet<&str>,
    merges: &[[&str; 2]],
) -> Result<BTreeMap<String, f32>> {
    let tokens: Vec<String> = merges.iter().map(|[a, b]| format!("{a}{b}")).collect();
    let last: BTreeMap<&str, usize> =
        tokens.iter().enumerate().map(|(at, token)| (token.as_str(), at)).collect();
    let mut scores = BTreeMap::new();
    let (mut start, mut score) = (0, 0.0);
    while start < merges.len() {
        let mut end = start;
        let mut at = start;
        while at <= end {
            end = end.max(last[tokens[at].as_str()]);
            at += 1;
        }
        let lengths = |[a, b]: &[&str; 2]| [a.chars().count(), b.chars().count()];
        let is_one = tokens[start..=end].iter().all(|token| *token == tokens[start]);
        let is_sorted = merges[start..=end].is_sorted_by(|a, b| lengths(a) >= lengths(b));
        ensure!(
            is_one || is_sorted,
            "the merges that make {:?} are not one behind another, and files have one score for them",
            tokens[start]
        );
        scores.extend(tokens[start..=end].iter().map(|token| (token.clone(), score)));
        (start, score) = (end + 1, score - 1.0);
    }
    // llama.cpp merges all pairs that make a token.
    let listed: BTreeSet<[&str; 2]> = merges.iter().copied().collect();
    for token in known.iter().filter(|token| !added.contains(*token)) {
        for (at, _) in token.char_indices().skip(1) {
            let (a, b) = token.split_at(at);
            let is_pair = known.contains(a) && known.contains(b);
            ensure!(
                !is_pair || listed.contains(&[a, b]),
                "{a:?} and {b:?} make the token {token:?} and are not merged, which llama.cpp would do"
            );
        }
    }
    Ok(scores)
}

/// Whether texts begin with one more space.
fn prefixes(parts: &Value) -> Result<bool> {
    let steps = match &parts["normalizer"]["normalizers"] {
        Value::Array(steps) => steps.clone(),
        _ => vec![parts["normalizer"].clone()],
    };
    let (mut prefixes, mut respells) = (false, false);
    for step in steps.iter().filter(|step| !step.is_null()) {
        match step["type"].as_str().unwrap_or_default() {
            "Prepend" if step["prepend"] == SPACE && !respells => prefixes = true,
            "Replace" if step["pattern"]["String"] == " " && step["content"] == SPACE => respells = true,
            other => bail!("the tokenizer changes texts by {other:?}, which files do not say"),
        }
    }
    let cut = &parts["pre_tokenizer"];
    let is_plain = cut.is_null()
        // There are no spaces left to cut at.
        || (cut["type"] == "Split" && cut["pattern"]["String"] == " " && cut["behavior"] == "MergedWithPrevious");
    match (respells, cut["type"].as_str()) {
        (true, _) if is_plain => Ok(prefixes),
        (false, Some("Metaspace")) if cut["replacement"] == SPACE && cut["split"] == false && !prefixes => {
            let scheme =
                cut["prepend_scheme"].as_str().context("the tokenizer does not say what it prepends")?;
            ensure!(
                scheme == "never",
                "the tokenizer puts a space in front of texts ({scheme:?}) otherwise than llama.cpp, which does it behind special tokens too"
            );
            Ok(false)
        }
        _ => bail!("the tokenizer cuts texts by {cut}, which files do not say"),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::scores;

    #[test]
    fn scores_are_the_order_of_merges_that_llama_cpp_makes_too() {
        let known = ["a", "b", "c", "ab", "abc", "bc", "<s>", "<", "s>"].into();
        let added = ["<s>"].into();
        let made = |merges: &[[&str; 2]]| scores(&known, &added, merges);
        let all = [["a", "b"], ["b", "c"], ["a", "bc"], ["ab", "c"]];
        let found = made(&all).unwrap();
        assert_eq!((found["ab"], found["bc"], found["abc"]), (0.0, -1.0, -2.0));
        let error = made(&all[..3]).unwrap_err().to_string();
        assert!(error.contains(r#""ab" and "c" make the token "abc""#), "{error}");
        let error = made(&[all[2], all[0], all[1], all[3]]).unwrap_err().to_string();
        assert!(error.contains("one behind another"), "{error}");
        // In the order of lengths they have one score.
        let found = made(&[all[3], all[2], all[0], all[1]]).unwrap();
        assert_eq!((found["ab"], found["bc"], found["abc"]), (-1.0, -2.0, 0.0));
        let known = ["_", "__", "___", "____"].into();
        let spaces = [["___", "_"], ["__", "__"], ["__", "_"], ["_", "___"], ["_", "__"], ["_", "_"]];
        // The only pair that makes two spaces comes last by itself.
        let found = scores(&known, &BTreeSet::new(), &spaces).unwrap();
        assert_eq!((found["__"], found["___"], found["____"]), (-1.0, 0.0, 0.0));
    }
}
