//! Tokens as text, for tokenizers of each kind.

use std::path::Path;
use std::{fs, str};

use candle_lm::tokens::{self, TextStream};
use serde_json::{Value, json};
use tokenizers::Tokenizer;

use crate::lm::facts::facts;

const TEXT: &str = "the cat sat on a mat, and then it was red!";

/// SentencePiece's way with bytes for what is unknown, its other way with words and their chances, GPT-2's bytes, and
/// BERT's words.
fn kinds() -> Vec<(&'static str, Tokenizer)> {
    let words = "the cat sat on a mat , and then it was red !".split(' ');
    let pieces = words.clone().flat_map(|word| [json!([format!("▁{word}"), -1.0]), json!([word, -2.0])]);
    let pieces: Vec<Value> = std::iter::once(json!(["<unk>", 0.0])).chain(pieces).collect();
    let unigram = json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "post_processor": null, "truncation": null,
        "padding": null,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces},
    });
    let vocab: serde_json::Map<String, Value> = ["[UNK]", "##ing"]
        .into_iter()
        .chain(words)
        .zip(0..)
        .map(|(word, id)| (word.to_owned(), json!(id)))
        .collect();
    let wordpiece = json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "post_processor": null, "truncation": null,
        "padding": null, "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": vocab},
    });
    let read = |json: &Value| json.to_string().parse().unwrap();
    vec![
        ("SentencePiece", read(&facts().tokenizer)),
        ("Unigram", read(&unigram)),
        ("bytes", tokens::of_bytes().unwrap()),
        ("WordPiece", read(&wordpiece)),
    ]
}

fn decoded(tokenizer: &Tokenizer, tokens: &[u32]) -> String {
    tokenizer.decode(tokens, true).unwrap()
}

#[test]
fn tokens_one_by_one_behind_any_prompt_are_the_text_of_all_of_them() {
    for (kind, tokenizer) in kinds() {
        let all = tokens::encode(&tokenizer, TEXT).unwrap();
        let whole = decoded(&tokenizer, &all);
        assert!(whole.contains("the cat sat on a mat"), "{kind}: {whole}");
        for prompt in 1..all.len() {
            let mut stream = TextStream::new(&tokenizer, &all[..prompt]);
            let mut text = decoded(&tokenizer, &all[..prompt]);
            for &token in &all[prompt..] {
                text.push_str(&stream.next(token).unwrap());
            }
            text.push_str(&stream.finish().unwrap());
            assert_eq!(text, whole, "{kind} behind {prompt} tokens");
        }
    }
}

#[test]
fn a_character_of_several_tokens_comes_whole_and_a_partial_one_is_not_lost() {
    for (kind, tokenizer) in kinds().into_iter().filter(|(kind, _)| ["SentencePiece", "bytes"].contains(kind))
    {
        let prompt = tokens::encode(&tokenizer, "the cat").unwrap();
        let all = tokens::encode(&tokenizer, "the cat中é").unwrap();
        let bytes = &all[prompt.len()..];
        assert_eq!(bytes.len(), 5, "{kind}");
        let mut stream = TextStream::new(&tokenizer, &prompt);
        let said: Vec<String> = bytes.iter().map(|&token| stream.next(token).unwrap()).collect();
        assert_eq!(said, ["", "", "中", "", "é"], "{kind}");
        assert_eq!(stream.finish().unwrap(), "", "{kind}");

        let mut stream = TextStream::new(&tokenizer, &prompt);
        assert!(bytes[..2].iter().all(|&token| stream.next(token).unwrap().is_empty()));
        let lost = stream.clone().finish().unwrap();
        assert!(!lost.is_empty() && lost.chars().all(|c| c == '\u{FFFD}'), "{kind}: {lost:?}");
        // What can be no character any more comes with the next one that is.
        let next = tokens::encode(&tokenizer, "the cat a").unwrap();
        let after: String = next[prompt.len()..].iter().map(|&token| stream.next(token).unwrap()).collect();
        assert!(after.starts_with('\u{FFFD}') && after.ends_with(" a"), "{kind}: {after:?}");
        // A character that its next byte spoils stays, where a tokenizer would take it back.
        let mut stream = TextStream::new(&tokenizer, &prompt);
        let spoiled: String = bytes[..4]
            .iter()
            .chain(&next[prompt.len()..])
            .map(|&token| stream.next(token).unwrap())
            .collect();
        assert!(spoiled.starts_with('中') && spoiled.ends_with(" a"), "{kind}: {spoiled:?}");
    }
}

#[test]
fn bytes_that_never_become_a_character_are_told_and_what_follows_comes_whole() {
    for (kind, tokenizer) in kinds().into_iter().filter(|(kind, _)| ["SentencePiece", "bytes"].contains(kind))
    {
        let prompt = tokens::encode(&tokenizer, "the cat").unwrap();
        let all = tokens::encode(&tokenizer, "the cat中é").unwrap();
        let bytes = &all[prompt.len()..];
        // Behind a byte that continues nothing, at each place.
        // SentencePiece reads all bytes behind each other as one: a broken one breaks them all.
        for broken in (1..30).filter(|_| kind == "bytes") {
            let mut stream = TextStream::new(&tokenizer, &prompt);
            let written = vec![bytes[1]; broken].into_iter().chain(bytes.iter().copied());
            let mut said: String = written.map(|token| stream.next(token).unwrap()).collect();
            said.push_str(&stream.finish().unwrap());
            let (lost, text) =
                said.split_at(said.find('中').unwrap_or_else(|| panic!("{kind} {broken}: {said:?}")));
            assert!(
                lost.chars().all(|c| c == '\u{FFFD}') && lost.chars().count() == broken,
                "{kind}: {said:?}"
            );
            assert_eq!(text, "中é", "{kind} {broken}");
        }
        let mut stream = TextStream::new(&tokenizer, &prompt);
        let longest = (0..100).scan(0, |waiting, _| {
            *waiting += 1;
            let said = stream.next(bytes[1]).unwrap().chars().count();
            *waiting -= said;
            Some(*waiting)
        });
        assert!(longest.max().unwrap() <= 8, "{kind}");
    }
}

#[test]
fn what_a_tokenizer_file_says_of_cutting_and_filling_up_is_left_out() {
    let mut cuts = facts().tokenizer;
    cuts["truncation"] =
        json!({"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0});
    cuts["padding"] = json!({"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "<unk>"});
    let folder = tempfile::tempdir().unwrap();
    let encoded = |folder: &Path, tokenizer: &Value| {
        fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
        tokens::encode(&tokens::read(folder).unwrap(), TEXT).unwrap()
    };
    let whole = encoded(folder.path(), &facts().tokenizer);
    assert!(whole.len() > 4 && whole.len() < 64);
    assert_eq!(encoded(folder.path(), &cuts), whole);
}
