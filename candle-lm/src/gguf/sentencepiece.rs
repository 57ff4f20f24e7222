//! Tokenizers of SentencePiece pairs, whose files have scores in place of merges.

use anyhow::{Result, anyhow};
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence as Decoders;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::prepend::Prepend;
use tokenizers::normalizers::replace::Replace;
use tokenizers::normalizers::utils::Sequence as Normalizers;
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::pre_tokenizers::split::Split;
use tokenizers::{DecoderWrapper, SplitDelimiterBehavior, Tokenizer};

/// The most bytes of a token.
const MOST_BYTES: usize = 4096;

/// The letter that stands for a space.
pub(super) const SPACE: &str = "▁";

/// What is done about spaces before pairs are merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spaces {
    /// Texts begin with one more, also behind tokens that stand apart.
    Prefixed,
    /// As they are.
    Kept,
    /// As they are, and words are merged by themselves.
    Gemma,
}

impl Spaces {
    /// Those of an architecture; `prefixes` is `tokenizer.ggml.add_space_prefix`.
    pub(super) fn of(architecture: &str, prefixes: Option<bool>) -> Self {
        match (architecture, prefixes) {
            ("gemma2" | "gemma3", _) => Self::Gemma,
            (_, Some(false)) => Self::Kept,
            _ => Self::Prefixed,
        }
    }
}

/// Builds a tokenizer from tokens and their scores; merges that the file has are used as they are.
///
/// # Errors
/// If a merge has parts that are no tokens, or a token is there twice or too long.
pub(super) fn build(
    mut tokens: Vec<String>,
    scores: &[f64],
    merges: Option<Vec<(String, String)>>,
    unknown: Option<String>,
    spaces: Spaces,
) -> Result<Tokenizer> {
    if spaces == Spaces::Gemma {
        // Converters write runs of spaces as spaces.
        for token in tokens.iter_mut().filter(|token| !token.is_empty() && token.chars().all(|c| c == ' ')) {
            *token = SPACE.repeat(token.len());
        }
    }
    let vocab: Vocab = tokens.iter().cloned().zip(0..).collect();
    anyhow::ensure!(vocab.len() == tokens.len(), "tokenizer.ggml.tokens has a token twice");
    // All cuts of each token are looked at.
    let longest = tokens.iter().map(String::len).max().unwrap_or(0);
    anyhow::ensure!(
        longest <= MOST_BYTES,
        "tokenizer.ggml.tokens has a token of {longest} bytes; at most {MOST_BYTES} are known"
    );
    let merges = merges.unwrap_or_else(|| match spaces {
        // Scores do not follow the order of merges there, and the list does.
        Spaces::Gemma => implied(&tokens, &vocab, |place| -(place as f64)),
        _ => implied(&tokens, &vocab, |place| scores[place]),
    });
    let bpe = BPE::builder().vocab_and_merges(vocab, merges).fuse_unk(true).byte_fallback(true);
    let bpe = match unknown {
        Some(unknown) => bpe.unk_token(unknown),
        None => bpe,
    };
    let failed = |error: tokenizers::Error| anyhow!("{error}");
    let mut tokenizer =
        Tokenizer::new(bpe.build().map_err(|error| anyhow!("tokenizer.ggml.merges: {error}"))?);
    let respelled = || Replace::new(" ", SPACE).map_err(failed);
    match spaces {
        Spaces::Kept => {
            let spaces = Metaspace::new('▁', PrependScheme::Never, false);
            tokenizer.with_pre_tokenizer(Some(spaces));
        }
        Spaces::Prefixed => {
            let steps = vec![Prepend::new(SPACE.into()).into(), respelled()?.into()];
            tokenizer.with_normalizer(Some(Normalizers::new(steps))).map_err(failed)?;
        }
        Spaces::Gemma => {
            let words = Split::new(" ", SplitDelimiterBehavior::MergedWithPrevious, false).map_err(failed)?;
            tokenizer.with_normalizer(Some(respelled()?)).map_err(failed)?.with_pre_tokenizer(Some(words));
        }
    }
    let mut steps: Vec<DecoderWrapper> = vec![
        Replace::new(SPACE, " ").map_err(failed)?.into(),
        ByteFallback::new().into(),
        Fuse::new().into(),
    ];
    if spaces == Spaces::Prefixed {
        steps.push(Strip::new(' ', 1, 0).into());
    }
    tokenizer.with_decoder(Some(Decoders::new(steps)));
    Ok(tokenizer)
}

/// The merges that a vocabulary implies: all pairs of tokens that make a token, those of high scores first.
fn implied(tokens: &[String], vocab: &Vocab, score: impl Fn(usize) -> f64) -> Vec<(String, String)> {
    let mut merges = Vec::new();
    for (place, token) in tokens.iter().enumerate() {
        let cuts = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
        let known = cuts.filter_map(|(a, b)| Some(((*vocab.get(a)?, *vocab.get(b)?), a, b)));
        let mut pairs: Vec<_> = known.collect();
        pairs.sort_by_key(|(ids, ..)| *ids);
        let score = score(place);
        merges.extend(pairs.into_iter().map(|(_, a, b)| (score, a.chars().count(), b.chars().count(), a, b)));
    }
    merges.sort_by(|x, y| y.0.total_cmp(&x.0).then(y.1.cmp(&x.1)).then(y.2.cmp(&x.2)));
    merges.into_iter().map(|(.., a, b)| (a.to_owned(), b.to_owned())).collect()
}
