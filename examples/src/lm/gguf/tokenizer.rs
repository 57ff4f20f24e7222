//! The tokenizer that the metadata of a GGUF file describes.

use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use candle_core::quantized::gguf_file::Value;
use candle_shard::Weights;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, PreTokenizerWrapper, SplitDelimiterBehavior, Tokenizer};

use super::sentencepiece::{self, Spaces};
use super::{Metadata, whole};

/// How a text is cut before pairs are merged.
#[derive(Clone, Copy)]
enum Cut {
    /// As GPT-2 does.
    Gpt2,
    /// The same, with digits one by one.
    Digits,
    /// As Llama 3 does.
    Llama3,
    /// The same with single digits, in composed form.
    Qwen,
    /// As Mistral's newer models do: by upper and lower case, with single digits.
    Tekken,
}

/// The names that `tokenizer.ggml.pre` has for them.
const CUTS: [(&str, Cut); 16] = [
    ("gpt-2", Cut::Gpt2),
    ("gpt2", Cut::Gpt2),
    ("olmo", Cut::Gpt2),
    ("smollm", Cut::Digits),
    ("starcoder", Cut::Digits),
    ("refact", Cut::Digits),
    ("command-r", Cut::Digits),
    ("llama-bpe", Cut::Llama3),
    ("llama3", Cut::Llama3),
    ("llama-v3", Cut::Llama3),
    ("smaug-bpe", Cut::Llama3),
    ("dbrx", Cut::Llama3),
    ("qwen2", Cut::Qwen),
    ("deepseek-r1-qwen", Cut::Qwen),
    ("megrez", Cut::Qwen),
    ("tekken", Cut::Tekken),
];

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Kinds of tokens that are never text, and that users have added.
const CONTROL: u64 = 3;
const ADDED: u64 = 4;

/// The tokenizer of the file at `path`.
///
/// # Errors
/// If its kind is not supported, or the metadata contradicts itself; the key is named.
pub(in crate::lm) fn read(path: &Path) -> Result<Tokenizer> {
    let weights = Weights::open(path)?;
    let metadata = weights.metadata().with_context(|| format!("{} is no GGUF file", path.display()))?;
    of_metadata(metadata).with_context(|| format!("{}", path.display()))
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
    let kinds: Vec<u64> = list("token_type").map_or(Vec::new(), |kinds| kinds.iter().filter_map(whole).collect());
    ensure!(
        kinds.is_empty() || kinds.len() == tokens.len(),
        "tokenizer.ggml.token_type has {} kinds for {} tokens",
        kinds.len(),
        tokens.len()
    );
    let merges = || {
        let merges = strings("merges")?;
        let pairs = merges.iter().map(|merge| {
            let (a, b) = merge.split_once(' ').with_context(|| format!("tokenizer.ggml.merges has {merge:?}"))?;
            Ok((a.to_owned(), b.to_owned()))
        });
        pairs.collect::<Result<Vec<(String, String)>>>()
    };
    let id = |name: &str| -> Result<Option<(u64, String)>> {
        let Some(id) = get(name).and_then(whole) else { return Ok(None) };
        let token = tokens.get(id as usize).with_context(|| format!("tokenizer.ggml.{name} {id} is no token"))?;
        Ok(Some((id, token.clone())))
    };
    let (mut tokenizer, begins) = match text("model") {
        Some("gpt2") => byte_level(text("pre").unwrap_or("gpt-2"), &tokens, merges()?)?,
        Some("llama") => {
            let architecture = metadata.get("general.architecture").and_then(|kind| kind.to_string().ok());
            let spaces = Spaces::of(architecture.map_or("", String::as_str), switch("add_space_prefix"));
            let scores = list("scores").map_or(Vec::new(), |scores| scores.iter().filter_map(number).collect());
            ensure!(
                scores.len() == tokens.len() || get("merges").is_some(),
                "tokenizer.ggml.scores has {} numbers for {} tokens",
                scores.len(),
                tokens.len()
            );
            let merges = get("merges").map(|_| merges()).transpose()?;
            let unknown = id("unknown_token_id")?.map(|(_, token)| token);
            (sentencepiece::build(tokens.clone(), &scores, merges, unknown, spaces)?, true)
        }
        other => bail!("tokenizer.ggml.model is {other:?}, and only \"gpt2\" and \"llama\" are supported"),
    };
    let failed = |error: tokenizers::Error| anyhow!("{error}");
    let named = ["bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id"];
    let named: Vec<Option<(u64, String)>> = named.into_iter().map(id).collect::<Result<_>>()?;
    let named: Vec<u64> = named.into_iter().flatten().map(|(id, _)| id).collect();
    let is_special = |place: usize| kinds.get(place) == Some(&CONTROL) || named.contains(&(place as u64));
    let is_added = |place: usize| kinds.get(place) == Some(&ADDED) && !is_special(place);
    let known = tokenizer.get_vocab(false);
    let added = |is: &dyn Fn(usize) -> bool, special: bool| {
        let places = (0..tokens.len()).filter(|&place| is(place) && known.contains_key(&tokens[place]));
        places.map(|place| AddedToken::from(tokens[place].clone(), special).normalized(false)).collect::<Vec<_>>()
    };
    tokenizer.add_special_tokens(added(&is_special, true)).map_err(failed)?;
    tokenizer.add_tokens(added(&is_added, false)).map_err(failed)?;
    if switch("add_bos_token").unwrap_or(begins) {
        let (id, token) = id("bos_token_id")?.context("there is no tokenizer.ggml.bos_token_id")?;
        let template = TemplateProcessing::builder()
            .try_single(format!("{token} $A"))
            .map_err(|error| anyhow!("{error}"))?
            .special_tokens(vec![(token.as_str(), id as u32)])
            .build()
            .map_err(|error| anyhow!("{error}"))?;
        tokenizer.with_post_processor(Some(template));
    }
    Ok(tokenizer)
}

fn number(value: &Value) -> Option<f64> {
    super::plain(value).as_ref().and_then(serde_json::Value::as_f64)
}

/// A tokenizer of pairs of bytes, and whether texts begin with a token unless the file says otherwise.
fn byte_level(pre: &str, tokens: &[String], merges: Vec<(String, String)>) -> Result<(Tokenizer, bool)> {
    let known = || CUTS.map(|(name, _)| name).join(", ");
    let cut = CUTS.iter().find(|(name, _)| *name == pre).map(|&(_, cut)| cut);
    let cut = cut.with_context(|| format!("tokenizer.ggml.pre {pre:?} is not supported; supported: {}", known()))?;
    let vocab: Vocab = tokens.iter().cloned().zip(0..).collect();
    ensure!(vocab.len() == tokens.len(), "tokenizer.ggml.tokens has a token twice");
    let ignores = matches!(cut, Cut::Llama3 | Cut::Tekken);
    let bpe = BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(ignores).build();
    let mut tokenizer = Tokenizer::new(bpe.map_err(|error| anyhow!("tokenizer.ggml.merges: {error}"))?);

    let split = |pattern: &str| -> Result<PreTokenizerWrapper> {
        let split = Split::new(SplitPattern::Regex(pattern.into()), SplitDelimiterBehavior::Isolated, false);
        Ok(split.map_err(|error| anyhow!("{error}"))?.into())
    };
    let bytes = |cuts: bool| -> PreTokenizerWrapper { ByteLevel::new(false, true, cuts).into() };
    let steps = match cut {
        Cut::Gpt2 => vec![bytes(true)],
        Cut::Digits => vec![Digits::new(true).into(), bytes(true)],
        Cut::Llama3 => vec![split(LLAMA3)?, bytes(false)],
        Cut::Qwen => vec![split(QWEN)?, bytes(false)],
        Cut::Tekken => vec![split(TEKKEN)?, bytes(false)],
    };
    if let Cut::Qwen = cut {
        tokenizer.with_normalizer(Some(NFC)).map_err(|error| anyhow!("{error}"))?;
    }
    tokenizer.with_pre_tokenizer(Some(Sequence::new(steps))).with_decoder(Some(ByteLevel::new(false, true, true)));
    // Llama 3 begins texts with a token unless the file says otherwise.
    Ok((tokenizer, matches!(cut, Cut::Llama3 | Cut::Tekken) && pre != "dbrx"))
}
