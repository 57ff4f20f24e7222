//! The metadata of a tokenizer: of bytes, or of SentencePiece.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail, ensure};
use candle_core::quantized::gguf_file::Value as Stored;
use serde_json::Value;
use tokenizers::Tokenizer;

use super::fields::Field;
use super::pieces;
use crate::chat::{FOR_TOOLS, TEMPLATE};
use crate::files::Files;
use crate::gguf::pre_tokenizer::{GPT2, PreTokenizer};
use crate::gguf::tokenizer::takes_space;

/// Kinds of tokens.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const ADDED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// The keys of up to three tokens that end texts: the whole, a turn, and a message that waits for a tool.
const ENDS: [&str; 3] = ["eos_token_id", "eot_token_id", "eom_token_id"];
const WAITS: &str = "<|eom_id|>";

/// The score of tokens that no pair makes, which llama.cpp does not look at.
const NO_SCORE: f32 = -1e6;

/// Returns the metadata of the tokenizer and the chat template of a model of this architecture and name.
///
/// # Errors
/// If it is a tokenizer of another kind, or files have no name for how it cuts texts.
pub(super) fn of(files: &Files, tokenizer: &Tokenizer, [kind, name]: [&str; 2]) -> Result<Vec<Field>> {
    let parts = serde_json::to_value(tokenizer)?;
    let is_of_pieces = pieces::are_in(&parts);
    let added = tokenizer.get_added_tokens_decoder();
    let known: BTreeMap<u32, String> =
        tokenizer.get_vocab(true).into_iter().map(|(text, id)| (id, text)).collect();
    let unknown = parts["model"]["unk_token"].as_str().filter(|_| is_of_pieces);
    let bytes: BTreeSet<String> = (0..=u8::MAX).filter(|_| is_of_pieces).map(pieces::of_byte).collect();
    let (mut tokens, mut kinds) = (Vec::new(), Vec::new());
    for id in 0..u32::try_from(files.config.vocab_size)? {
        let text = known.get(&id).cloned().unwrap_or_else(|| format!("[PAD{id}]"));
        if let Some(token) = added.get(&id) {
            let takes = is_of_pieces && takes_space(kind, name, &text);
            ensure!(
                !token.lstrip && !token.single_word && token.rstrip == takes,
                "the token {text:?} {}, which files of {kind} do not say",
                match takes && !token.rstrip {
                    true => "leaves the white space behind it",
                    false => "takes white space beside it, or stands alone",
                }
            );
        }
        kinds.push(Stored::I32(match added.get(&id) {
            _ if unknown == Some(text.as_str()) => UNKNOWN,
            Some(token) if token.special => CONTROL,
            Some(_) => ADDED,
            None if bytes.contains(&text) => BYTE,
            None if known.contains_key(&id) => NORMAL,
            None => UNUSED,
        }));
        tokens.push(text);
    }
    let merges = merges(&parts)?;
    let strings = |texts: &[String]| Stored::Array(texts.iter().cloned().map(Stored::String).collect());
    let listed = strings(&merges.iter().map(|[a, b]| format!("{a} {b}")).collect::<Vec<_>>());
    let mut fields =
        vec![("tokens".to_owned(), strings(&tokens)), ("token_type".to_owned(), Stored::Array(kinds))];
    if is_of_pieces {
        let apart: BTreeSet<&str> = added.values().map(|token| token.content.as_str()).collect();
        let all: BTreeSet<&str> = known.values().map(String::as_str).collect();
        let pairs: Vec<[&str; 2]> = merges.iter().map(|pair| pair.each_ref().map(String::as_str)).collect();
        let pieces = pieces::read(&parts, &all, &apart, &pairs)?;
        let score = |token: &String| Stored::F32(pieces.scores.get(token).copied().unwrap_or(NO_SCORE));
        fields.extend([
            ("model".to_owned(), Stored::String("llama".into())),
            ("pre".to_owned(), Stored::String("default".into())),
            ("scores".to_owned(), Stored::Array(tokens.iter().map(score).collect())),
            ("add_space_prefix".to_owned(), Stored::Bool(pieces.prefixes)),
        ]);
        if kind.starts_with("gemma") {
            // Scores of other files of Gemma do not tell the order, so readers go by the list of tokens, or by merges.
            fields.push(("merges".to_owned(), listed));
        }
    } else {
        let pre = pre_tokenizer(&parts)?;
        ensure!(!merges.is_empty(), "the tokenizer merges nothing, which llama.cpp does not read");
        fields.extend([
            ("model".to_owned(), Stored::String("gpt2".into())),
            ("pre".to_owned(), Stored::String(pre.into())),
            ("merges".to_owned(), listed),
        ]);
    }
    let [first, last] = around(tokenizer)?;
    let named = files.special_tokens()?;
    let id_of =
        |name: &str| named.get(name).and_then(Option::as_ref).and_then(|text| tokenizer.token_to_id(text));
    // llama.cpp takes another token where one is not named.
    let begin = first.or_else(|| id_of("bos_token")).or(files.config.bos_token_id);
    let end = last.or_else(|| id_of("eos_token")).or_else(|| files.ends.first().copied());
    let end = end.context("no token ends texts, and llama.cpp would take another one for it")?;
    let mut others: Vec<u32> = files.ends.iter().copied().filter(|&other| other != end).collect();
    others.sort_by_key(|other| known.get(other).is_some_and(|text| text == WAITS));
    ensure!(
        others.len() < ENDS.len(),
        "texts end at {} tokens, and files name {}",
        others.len() + 1,
        ENDS.len()
    );
    fields.extend(begin.map(|id| ("bos_token_id".to_owned(), Stored::U32(id))));
    fields.extend(
        ENDS.iter()
            .zip(std::iter::once(end).chain(others))
            .map(|(name, id)| ((*name).to_owned(), Stored::U32(id))),
    );
    for (name, key) in [("unk_token", "unknown_token_id"), ("pad_token", "padding_token_id")] {
        fields.extend(id_of(name).map(|id| (key.to_owned(), Stored::U32(id))));
    }
    fields.push(("add_bos_token".to_owned(), Stored::Bool(first.is_some())));
    if last.is_some() {
        fields.push(("add_eos_token".to_owned(), Stored::Bool(true)));
    }
    let mut fields: Vec<Field> =
        fields.into_iter().map(|(name, value)| (format!("tokenizer.ggml.{name}"), value)).collect();
    if let Some(template) = files.find_chat_template()? {
        let (source, for_tools) = template.sources();
        ensure!(
            begin.is_some() || !source.contains("bos_token"),
            "the chat template writes a bos_token, and the model has none: llama.cpp would write another token"
        );
        fields.push((TEMPLATE.to_owned(), Stored::String(source.into())));
        if let Some(source) = for_tools {
            fields.push((FOR_TOOLS.to_owned(), Stored::String(source.into())));
            fields.push((
                "tokenizer.chat_templates".to_owned(),
                Stored::Array(vec![Stored::String("tool_use".into())]),
            ));
        }
    }
    Ok(fields)
}

/// The pairs that are merged, the first ones first.
fn merges(parts: &Value) -> Result<Vec<[String; 2]>> {
    let merges = parts["model"]["merges"].as_array().context("the tokenizer has no merges")?;
    let pair = |merge: &Value| match merge {
        Value::String(pair) => pair.split_once(' ').map(|(a, b)| [a.to_owned(), b.to_owned()]),
        Value::Array(pair) => Some([pair.first()?.as_str()?.to_owned(), pair.get(1)?.as_str()?.to_owned()]),
        _ => None,
    };
    merges.iter().map(pair).collect::<Option<_>>().context("the tokenizer has a merge of another form")
}

/// The tokens that the tokenizer puts in front of a text and behind it.
fn around(tokenizer: &Tokenizer) -> Result<[Option<u32>; 2]> {
    let encoded = |adds: bool| -> Result<Vec<u32>> {
        let encoding = tokenizer.encode("a", adds).map_err(|error| anyhow::anyhow!("{error}"))?;
        Ok(encoding.get_ids().to_vec())
    };
    let (plain, all) = (encoded(false)?, encoded(true)?);
    let at = all
        .windows(plain.len().max(1))
        .position(|part| part == plain)
        .context("the tokenizer changes texts")?;
    match (&all[..at], &all[at + plain.len()..]) {
        (first @ ([] | [_]), last @ ([] | [_])) => Ok([first.first().copied(), last.first().copied()]),
        _ => bail!("the tokenizer puts several tokens around a text, which files do not say"),
    }
}

/// What files call the way in which a tokenizer cuts texts.
fn pre_tokenizer(parts: &Value) -> Result<&'static str> {
    ensure!(
        parts["model"]["type"] == "BPE",
        "the tokenizer is of the kind {}, and only BPE of bytes and of SentencePiece is written",
        parts["model"]["type"]
    );
    let steps = match &parts["pre_tokenizer"]["pretokenizers"] {
        Value::Array(steps) => steps.clone(),
        _ => vec![parts["pre_tokenizer"].clone()],
    };
    let mut cuts: Vec<String> = Vec::new();
    let mut is_byte_level = false;
    for step in &steps {
        match step["type"].as_str().unwrap_or_default() {
            "Split" => {
                let regex = step["pattern"]["Regex"].as_str();
                let is_plain = step["behavior"] == "Isolated" && step["invert"] != true;
                let is_inverse = step["behavior"] == "Removed" && step["invert"] == true;
                let regex = regex.filter(|_| is_plain || is_inverse);
                cuts.push(
                    regex
                        .with_context(|| {
                            format!("the tokenizer cuts texts by {step}, which files do not say")
                        })?
                        .to_owned(),
                );
            }
            "Digits" if step["individual_digits"] == true => cuts.push(r"\p{N}".to_owned()),
            "ByteLevel" => {
                ensure!(
                    step["add_prefix_space"] != true,
                    "the tokenizer puts a space in front of texts, which is not written"
                );
                is_byte_level = true;
                if step["use_regex"] != false {
                    cuts.push(GPT2.to_owned());
                }
            }
            other => bail!("the tokenizer cuts texts by a step {other:?}, which files do not say"),
        }
    }
    ensure!(
        is_byte_level,
        "the tokenizer is not of bytes, and not of SentencePiece with all bytes: no other BPE is written"
    );
    let composes = parts["normalizer"]["type"] == "NFC";
    ensure!(
        composes || parts["normalizer"].is_null(),
        "the tokenizer changes texts by {}, which files do not say",
        parts["normalizer"]["type"]
    );
    let ignores_merges = parts["model"]["ignore_merges"] == true;
    PreTokenizer::named(&cuts, ignores_merges, composes).with_context(|| {
        format!("files of llama.cpp have no name for how the tokenizer cuts texts: {cuts:?}")
    })
}

/// Texts whose tokens tell tokenizers apart.
const TEXTS: [&str; 6] = [
    "Hello, world! It's 12345 o'clock.",
    "  two  spaces\n\n\tand tabs \r\n",
    "naïve café e\u{301} Übergröße ПРИВЕТ 你好，世界 한국어 日本語",
    "def f(x):\n    return x**2 + 1_000 # \u{1F642}\u{1F468}\u{200D}\u{1F469}",
    "DON'T don'T we'LL 3.14e-10 <|im_start|>user [INST] </s>",
    "",
];

/// Checks that two tokenizers cut texts alike.
pub(super) fn check(was: &Tokenizer, is: &Tokenizer) -> Result<()> {
    let added =
        was.get_added_tokens_decoder().into_values().map(|token| format!("a {} b{0}c", token.content));
    for text in TEXTS.map(str::to_owned).into_iter().chain(added) {
        let text = text.as_str();
        let [was, is] = [was, is]
            .map(|tokenizer| tokenizer.encode(text, true).map(|encoding| encoding.get_ids().to_vec()));
        let (was, is) = (
            was.map_err(|error| anyhow::anyhow!("{error}"))?,
            is.map_err(|error| anyhow::anyhow!("{error}"))?,
        );
        ensure!(was == is, "the tokens of {text:?} would be {is:?}, and are {was:?}");
    }
    Ok(())
}
