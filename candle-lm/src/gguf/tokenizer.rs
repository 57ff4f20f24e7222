//! The tokenizer that the metadata of a GGUF file describes.

use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use candle_core::quantized::gguf_file::Value;
use candle_shard::Weights;
use serde_json::{Value as Json, json};
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, PreTokenizerWrapper, SplitDelimiterBehavior, Tokenizer};

use super::pre_tokenizer::{GUESS, PreTokenizer};
use super::sentencepiece::{self, Spaces};
use super::{Metadata, whole};

/// Kinds of tokens that are never text, and that users have added.
const CONTROL: u64 = 3;
const ADDED: u64 = 4;

/// The tokens of Phi-3 that leave the white space behind them. The others of their kinds take it.
const PHI3_KEEPS_SPACE: [&str; 3] = ["<unk>", "<s>", "<|endoftext|>"];

/// The tokenizer of the file at `path`.
///
/// # Errors
/// If its kind is not supported, or the metadata contradicts itself; the key is named.
pub(crate) fn read(path: &Path) -> Result<Tokenizer> {
    let weights = Weights::open(path)?;
    let metadata = weights.metadata().with_context(|| format!("{} is no GGUF file", path.display()))?;
    of_metadata(metadata).with_context(|| format!("{}", path.display()))
}

/// Returns what is a guess about the tokenizer, where the file does not say how texts are cut.
pub(super) fn guess(metadata: &Metadata) -> Option<String> {
    let text =
        |name: &str| metadata.get(&format!("tokenizer.ggml.{name}")).and_then(|value| value.to_string().ok());
    let is_guess = text("model")? == "gpt2" && text("pre").is_none_or(|pre| pre == GUESS);
    let note = "the file does not say how texts are cut (tokenizer.ggml.pre), so tokens may be others than the model has learned";
    is_guess.then(|| note.to_owned())
}

fn of_metadata(metadata: &Metadata) -> Result<Tokenizer> {
    let get = |name: &str| metadata.get(&format!("tokenizer.ggml.{name}"));
    let text = |name: &str| get(name).and_then(|value| value.to_string().ok()).map(String::as_str);
    let list = |name: &str| get(name).and_then(|value| value.to_vec().ok());
    let switch = |name: &str| match get(name) {
        Some(Value::Bool(is)) => Some(*is),
        _ => None,
    };
    let strings = |name: &str| -> Result<Vec<String>> {
        let list = list(name).with_context(|| format!("there is no list tokenizer.ggml.{name}"))?;
        let texts = list.iter().map(|value| value.to_string().ok().cloned()).collect::<Option<_>>();
        texts.with_context(|| format!("tokenizer.ggml.{name} has something that is no text"))
    };
    let tokens = strings("tokens")?;
    let kinds: Vec<u64> =
        list("token_type").map_or(Vec::new(), |kinds| kinds.iter().filter_map(whole).collect());
    ensure!(
        kinds.is_empty() || kinds.len() == tokens.len(),
        "tokenizer.ggml.token_type has {} kinds for {} tokens",
        kinds.len(),
        tokens.len()
    );
    let merges = || {
        let merges = strings("merges")?;
        let pairs = merges.iter().map(|merge| {
            let (a, b) =
                merge.split_once(' ').with_context(|| format!("tokenizer.ggml.merges has {merge:?}"))?;
            Ok((a.to_owned(), b.to_owned()))
        });
        pairs.collect::<Result<Vec<(String, String)>>>()
    };
    let id = |name: &str| -> Result<Option<(u64, String)>> {
        let Some(id) = get(name).and_then(whole) else { return Ok(None) };
        let token =
            tokens.get(id as usize).with_context(|| format!("tokenizer.ggml.{name} {id} is no token"))?;
        Ok(Some((id, token.clone())))
    };
    let general = |name: &str| {
        let text = metadata.get(&format!("general.{name}")).and_then(|value| value.to_string().ok());
        text.map_or(String::new(), |text| text.to_lowercase())
    };
    let (architecture, name) = (general("architecture"), general("name"));
    let unknown = || -> Result<Option<String>> { Ok(id("unknown_token_id")?.map(|(_, token)| token)) };
    let (mut tokenizer, begins) = match text("model") {
        Some("gpt2") => byte_level(text("pre").unwrap_or(GUESS), &tokens, merges()?)?,
        Some("gemma4") => {
            (sentencepiece::build(tokens.clone(), &[], Some(merges()?), unknown()?, Spaces::Kept)?, true)
        }
        Some("llama") => {
            let spaces = Spaces::of(&architecture, switch("add_space_prefix"));
            let scores =
                list("scores").map_or(Vec::new(), |scores| scores.iter().filter_map(number).collect());
            ensure!(
                scores.len() == tokens.len() || get("merges").is_some(),
                "tokenizer.ggml.scores has {} numbers for {} tokens",
                scores.len(),
                tokens.len()
            );
            let merges = get("merges").map(|_| merges()).transpose()?;
            (sentencepiece::build(tokens.clone(), &scores, merges, unknown()?, spaces)?, true)
        }
        other => bail!(
            "tokenizer.ggml.model is {other:?}, and only \"gpt2\", \"llama\" and \"gemma4\" are supported"
        ),
    };
    let failed = |error: tokenizers::Error| anyhow!("{error}");
    let named = ["bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id"];
    let named: Vec<Option<(u64, String)>> = named.into_iter().map(id).collect::<Result<_>>()?;
    let named: Vec<u64> = named.into_iter().flatten().map(|(id, _)| id).collect();
    let is_special = |place: usize| kinds.get(place) == Some(&CONTROL) || named.contains(&(place as u64));
    let is_added = |place: usize| kinds.get(place) == Some(&ADDED) && !is_special(place);
    let known = tokenizer.get_vocab(false);
    let takes_space =
        |token: &str| text("model") == Some("llama") && takes_space(&architecture, &name, token);
    let added = |is: &dyn Fn(usize) -> bool, special: bool| {
        let tokens = (0..tokens.len()).filter(|&place| is(place)).map(|place| &tokens[place]);
        let token = |token: &String| {
            AddedToken::from(token.clone(), special).normalized(false).rstrip(takes_space(token))
        };
        tokens.filter(|token| known.contains_key(*token)).map(token).collect::<Vec<_>>()
    };
    tokenizer.add_special_tokens(added(&is_special, true)).map_err(failed)?;
    tokenizer.add_tokens(added(&is_added, false)).map_err(failed)?;
    let around = |is: bool, name: &str| -> Result<Option<(u64, String)>> {
        is.then(|| id(name)?.with_context(|| format!("there is no tokenizer.ggml.{name}"))).transpose()
    };
    // Some files of Gemma 4 say otherwise, and are wrong.
    let begins = text("model") == Some("gemma4") || switch("add_bos_token").unwrap_or(begins);
    let first = around(begins, "bos_token_id")?;
    let last = around(switch("add_eos_token").unwrap_or(false), "eos_token_id")?;
    if first.is_some() || last.is_some() {
        tokenizer.with_post_processor(Some(template(first.as_ref(), last.as_ref())?));
    }
    Ok(tokenizer)
}

/// Whether a token that stands apart takes the white space behind it, which files do not say: in a model of this architecture and
/// name whose tokenizer is of SentencePiece.
pub(super) fn takes_space(architecture: &str, name: &str, token: &str) -> bool {
    let is_phi3 =
        architecture == "phi3" || ["phi-3", "phi3"].iter().any(|part| name.to_lowercase().contains(part));
    is_phi3 && !PHI3_KEEPS_SPACE.contains(&token)
}

/// What puts tokens in front of texts and behind them.
fn template(first: Option<&(u64, String)>, last: Option<&(u64, String)>) -> Result<TemplateProcessing> {
    // As in a `tokenizer.json`: a text would give some tokens another meaning.
    let piece = |(_, token): &(u64, String)| json!({"SpecialToken": {"id": token, "type_id": 0}});
    let part = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
    let single: Vec<Json> = first.map(piece).into_iter().chain([part("A")]).chain(last.map(piece)).collect();
    let token =
        |(id, token): &(u64, String)| (token.clone(), json!({"id": token, "ids": [id], "tokens": [token]}));
    let special: serde_json::Map<String, Json> = first.into_iter().chain(last).map(token).collect();
    Ok(serde_json::from_value(json!({
        "type": "TemplateProcessing", "single": single, "pair": [part("A"), part("B")], "special_tokens": special,
    }))?)
}

fn number(value: &Value) -> Option<f64> {
    super::plain(value).as_ref().and_then(serde_json::Value::as_f64)
}

/// A tokenizer of pairs of bytes, and whether texts begin with a token unless the file says otherwise.
fn byte_level(pre: &str, tokens: &[String], merges: Vec<(String, String)>) -> Result<(Tokenizer, bool)> {
    let kind = PreTokenizer::find(pre).with_context(|| {
        format!("tokenizer.ggml.pre {pre:?} is not supported; supported: {}", PreTokenizer::names())
    })?;
    let vocab: Vocab = tokens.iter().cloned().zip(0..).collect();
    ensure!(vocab.len() == tokens.len(), "tokenizer.ggml.tokens has a token twice");
    let bpe = BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(kind.ignores_merges).build();
    let mut tokenizer = Tokenizer::new(bpe.map_err(|error| anyhow!("tokenizer.ggml.merges: {error}"))?);
    let split = |cut: &&str| {
        let split = Split::new(SplitPattern::Regex((*cut).into()), SplitDelimiterBehavior::Isolated, false);
        split.map(PreTokenizerWrapper::from)
    };
    let steps = kind.cuts.iter().map(split).collect::<tokenizers::Result<Vec<_>>>();
    let mut steps = steps.map_err(|error| anyhow!("{error}"))?;
    steps.push(ByteLevel::new(false, true, false).into());
    if kind.composes {
        tokenizer.with_normalizer(Some(NFC)).map_err(|error| anyhow!("{error}"))?;
    }
    tokenizer
        .with_pre_tokenizer(Some(Sequence::new(steps)))
        .with_decoder(Some(ByteLevel::new(false, true, true)));
    Ok((tokenizer, kind.begins))
}
