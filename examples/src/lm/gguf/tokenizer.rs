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
}

/// The names that `tokenizer.ggml.pre` has for them.
const CUTS: [(&str, Cut); 15] = [
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
];

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

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
    match text("model") {
        Some("gpt2") => {}
        other => bail!("tokenizer.ggml.model is {other:?}, and only \"gpt2\" is supported"),
    }
    let pre = text("pre").unwrap_or("gpt-2");
    let known = || CUTS.map(|(name, _)| name).join(", ");
    let cut = CUTS.iter().find(|(name, _)| *name == pre).map(|&(_, cut)| cut);
    let cut = cut.with_context(|| format!("tokenizer.ggml.pre {pre:?} is not supported; supported: {}", known()))?;

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
    let merges = strings("merges")?;
    let pairs = merges.iter().map(|merge| {
        let (a, b) = merge.split_once(' ').with_context(|| format!("tokenizer.ggml.merges has {merge:?}"))?;
        Ok((a.to_owned(), b.to_owned()))
    });
    let pairs: Vec<(String, String)> = pairs.collect::<Result<_>>()?;
    let vocab: Vocab = tokens.iter().cloned().zip(0..).collect();
    ensure!(vocab.len() == tokens.len(), "tokenizer.ggml.tokens has a token twice");
    let ignores = matches!(cut, Cut::Llama3);
    let bpe = BPE::builder().vocab_and_merges(vocab, pairs).ignore_merges(ignores).build();
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
    };
    if let Cut::Qwen = cut {
        tokenizer.with_normalizer(Some(NFC)).map_err(|error| anyhow!("{error}"))?;
    }
    tokenizer.with_pre_tokenizer(Some(Sequence::new(steps))).with_decoder(Some(ByteLevel::new(false, true, true)));
    let of_kind = |kind: u64| {
        let places = kinds.iter().enumerate().filter(move |&(_, &has)| has == kind);
        places.map(|(place, _)| AddedToken::from(tokens[place].clone(), kind == CONTROL)).collect::<Vec<_>>()
    };
    let failed = |error: tokenizers::Error| anyhow!("{error}");
    tokenizer.add_special_tokens(of_kind(CONTROL)).map_err(failed)?;
    tokenizer.add_tokens(of_kind(ADDED)).map_err(failed)?;
    // Llama 3 begins texts with a token unless the file says otherwise.
    let adds = match get("add_bos_token") {
        Some(Value::Bool(adds)) => *adds,
        _ => ignores && pre != "dbrx",
    };
    if adds {
        let id = get("bos_token_id").and_then(whole).context("there is no tokenizer.ggml.bos_token_id")?;
        let token = tokens.get(id as usize).with_context(|| format!("tokenizer.ggml.bos_token_id {id} is no token"))?;
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
