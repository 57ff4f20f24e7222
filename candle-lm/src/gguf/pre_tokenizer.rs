//! How the tokenizers of each kind cut a text before pairs are merged.

/// A kind of `tokenizer.ggml.pre`.
#[derive(Debug)]
pub(super) struct PreTokenizer {
    /// Its names in files.
    names: &'static [&'static str],
    /// The patterns that cut a text, one after the other. What is between two matches is a piece too.
    pub(super) cuts: &'static [&'static str],
    /// Whether a piece that is a token is not made of pairs.
    pub(super) ignores_merges: bool,
    /// Whether texts begin with a token unless the file says otherwise.
    pub(super) begins: bool,
    /// Whether characters are composed first, as the tokenizers of these models do.
    pub(super) composes: bool,
}

impl PreTokenizer {
    const fn of(names: &'static [&'static str], cuts: &'static [&'static str]) -> Self {
        Self { names, cuts, ignores_merges: false, begins: false, composes: false }
    }

    const fn ignores_merges(self) -> Self {
        Self { ignores_merges: true, ..self }
    }

    const fn begins(self) -> Self {
        Self { begins: true, ..self }
    }

    const fn composes(self) -> Self {
        Self { composes: true, ..self }
    }

    /// Returns the kind with this name.
    pub(super) fn find(name: &str) -> Option<&'static Self> {
        KINDS.iter().find(|kind| kind.names.contains(&name))
    }

    /// Returns the name of the kind that cuts texts so.
    pub(super) fn named(cuts: &[String], ignores_merges: bool, composes: bool) -> Option<&'static str> {
        let is = |kind: &&Self| {
            kind.cuts == cuts && kind.ignores_merges == ignores_merges && kind.composes == composes
        };
        KINDS.iter().find(is).and_then(|kind| kind.names.first()).copied()
    }

    /// Returns all names.
    pub(super) fn names() -> String {
        KINDS.iter().flat_map(|kind| kind.names).copied().collect::<Vec<_>>().join(", ")
    }
}

/// The name of the kind of files that do not say theirs.
pub(super) const GUESS: &str = "default";

pub(super) const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// With contractions at the end of words, and three digits at once.
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The same with single digits.
const YOUTU: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const KIMI: &str = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Letters that have a case, as DeepSeek's first models list them.
const CASED: &str = r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
const SPARK: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+"##;
const JAIS2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}";
const BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";
const BAILING: &str = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";
const SEED_CODER: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
const UFAKZEKA: &str = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const EXAONE_MOE: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+";
const MINICPM5: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Chinese and Japanese letters.
const HAN_KANA: &str = r"[一-龥぀-ゟ゠-ヿ]+";

/// The kinds that llama.cpp knows. The patterns are those of the models' own tokenizers: some of llama.cpp's lack marks (`\p{M}`).
///
/// These are left out: `afmoe`, whose digits no pattern cuts, and `whitespace`, `sarvam-moe` and `granite-embed-multi-311m`, whose
/// tokens are not made of bytes.
const KINDS: [PreTokenizer; 31] = [
    PreTokenizer::of(
        &[
            "gpt-2",
            "gpt2",
            "phi-2",
            "jina-es",
            "jina-de",
            "jina-v1-en",
            "jina-v2-es",
            "jina-v2-de",
            "jina-v2-code",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "roberta-bpe",
            "exaone4",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
        ],
        &[GPT2],
    ),
    PreTokenizer::of(
        &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"],
        &[r"\p{N}", GPT2],
    ),
    PreTokenizer::of(
        &[
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "jina-v5-nano",
        ],
        &[LLAMA3],
    )
    .ignores_merges()
    .begins(),
    PreTokenizer::of(&["smaug-bpe", "dbrx", "chatglm-bpe"], &[LLAMA3]),
    PreTokenizer::of(&["glm4", "glm5"], &[LLAMA3]).ignores_merges(),
    PreTokenizer::of(&["qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"], &[QWEN]).composes(),
    PreTokenizer::of(&["stablelm2", "hunyuan", "solar-open", "grok-2"], &[QWEN]),
    PreTokenizer::of(&["qwen35"], &[QWEN35]),
    PreTokenizer::of(&["tekken"], &[TEKKEN]).ignores_merges().begins(),
    PreTokenizer::of(&["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"], &[GPT4O]),
    PreTokenizer::of(&["granite-embed-multi-97m"], &[GPT4O]).ignores_merges(),
    PreTokenizer::of(&["tiny_aya", "cohere2moe"], &[r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O]),
    PreTokenizer::of(
        &["youtu"],
        &[r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+", YOUTU],
    )
    .ignores_merges(),
    PreTokenizer::of(&["kimi-k2"], &[KIMI]),
    PreTokenizer::of(
        &["deepseek-llm"],
        &[r"[\r\n]", CASED, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}+"],
    ),
    PreTokenizer::of(
        &["deepseek-coder"],
        &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
    ),
    PreTokenizer::of(
        &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        &[r"\p{N}{1,3}", HAN_KANA, DEEPSEEK3],
    ),
    PreTokenizer::of(&["spark2_5"], &[r"\p{N}{1,3}", HAN_KANA, SPARK, r"\p{N}"]),
    PreTokenizer::of(&["falcon"], &[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"]),
    PreTokenizer::of(&["jais-2"], &[JAIS2]),
    PreTokenizer::of(&["poro-chat", "bloom", "gpt3-finnish"], &[BLOOM]),
    PreTokenizer::of(&["viking"], &[BLOOM, r"\p{N}"]),
    PreTokenizer::of(
        &["chameleon"],
        &[
            r"<sentinel:[0-9]+>",
            r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            GPT2,
        ],
    )
    .begins(),
    PreTokenizer::of(&["superbpe"], &[r"\p{N}+", r"(?=(\d{3})+(?!\d))"]),
    PreTokenizer::of(&["bailingmoe", "bailingmoe2", "llada-moe"], &[BAILING]),
    PreTokenizer::of(&["seed-coder"], &[SEED_CODER]),
    PreTokenizer::of(&["ufakzeka"], &[UFAKZEKA]),
    PreTokenizer::of(&["laguna"], &[r"[^\n]+|[\n]+", QWEN]),
    PreTokenizer::of(&["exaone-moe"], &[EXAONE_MOE]),
    PreTokenizer::of(&["minicpm5"], &[r"\p{N}{1,3}", MINICPM5]).ignores_merges(),
    PreTokenizer::of(&[GUESS], &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"]),
];

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;
    use itertools::Itertools;
    use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
    use tokenizers::{
        OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _, SplitDelimiterBehavior,
    };

    #[test]
    fn each_kind_cuts_a_text_into_its_letters() {
        let text = "It's 1234567 cats,\n\n  don'T: naïve 你好世界 e\u{301} IMGIMGABZ <sentinel:7> ¡Hola! x = 5;\t\u{1F642} ";
        for kind in &KINDS {
            let mut pieces = PreTokenizedString::from(text);
            for cut in kind.cuts {
                let split =
                    Split::new(SplitPattern::Regex((*cut).into()), SplitDelimiterBehavior::Isolated, false);
                split.unwrap_or_else(|error| panic!("{kind:?}: {error}")).pre_tokenize(&mut pieces).unwrap();
            }
            let pieces = pieces.get_splits(OffsetReferential::Original, OffsetType::Byte);
            assert!(pieces.len() > 8, "{kind:?}: {pieces:?}");
            assert_eq!(pieces.iter().map(|(piece, ..)| *piece).join(""), text, "{kind:?}");
        }
        assert_eq!(KINDS.iter().flat_map(|kind| kind.names).duplicates().next(), None);
    }
}
