//! Values of flags that are types of the library.

use candle_core::quantized::GgmlDType;
use candle_lm::dtype::DTypeName;
use candle_lm::train::data::TooLong;
use candle_lm::train::rate::Decay;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

/// A value by its name, and its help.
type FlagValue<T> = (&'static str, &'static str, T);

const DTYPES: [FlagValue<DTypeName>; 3] = [
    ("f32", "32-bit floats", DTypeName::F32),
    ("bf16", "Brain floats", DTypeName::Bf16),
    ("f16", "16-bit floats", DTypeName::F16),
];

const DECAYS: [FlagValue<Decay>; 6] = [
    ("cosine", "By half a wave of a cosine", Decay::Cosine),
    ("linear", "In a straight line", Decay::Linear),
    ("wsd", "In a straight line over the last steps (warm-up, stable, decay)", Decay::Wsd),
    ("inverse-sqrt", "By the inverse square root of the step", Decay::InverseSqrt),
    ("none", "Not at all", Decay::None),
    ("constant", "As none", Decay::None),
];

const TOO_LONG: [FlagValue<TooLong>; 4] = [
    ("error", "Their lines are bad ones", TooLong::Error),
    ("skip", "They are left out, and counted", TooLong::Skip),
    ("cut", "They end where the sequence ends", TooLong::Cut),
    ("split", "Texts go on in further sequences, and others are cut", TooLong::Split),
];

const GGUF: [FlagValue<GgmlDType>; 13] = [
    ("f32", "32-bit floats", GgmlDType::F32),
    ("f16", "16-bit floats", GgmlDType::F16),
    ("bf16", "Brain floats", GgmlDType::BF16),
    ("q8_0", "8 bits", GgmlDType::Q8_0),
    ("q6_k", "6 bits", GgmlDType::Q6K),
    ("q5_k", "5 bits", GgmlDType::Q5K),
    ("q5_1", "5 bits with minima", GgmlDType::Q5_1),
    ("q5_0", "5 bits in blocks of 32", GgmlDType::Q5_0),
    ("q4_k", "4 bits", GgmlDType::Q4K),
    ("q4_1", "4 bits with minima", GgmlDType::Q4_1),
    ("q4_0", "4 bits in blocks of 32", GgmlDType::Q4_0),
    ("q3_k", "3 bits", GgmlDType::Q3K),
    ("q2_k", "2 bits", GgmlDType::Q2K),
];

/// Parses how the matrices of a GGUF file are stored.
pub(crate) fn gguf() -> impl TypedValueParser<Value = GgmlDType> {
    one_of(&GGUF)
}

/// Parses the name of a dtype.
pub(crate) fn dtype() -> impl TypedValueParser<Value = DTypeName> {
    one_of(&DTYPES)
}

/// Parses the name of a decay.
pub(crate) fn decay() -> impl TypedValueParser<Value = Decay> {
    one_of(&DECAYS)
}

/// Parses what happens to records that are too long.
pub(crate) fn too_long() -> impl TypedValueParser<Value = TooLong> {
    one_of(&TOO_LONG)
}

fn one_of<T: Copy + Send + Sync + 'static>(
    values: &'static [FlagValue<T>],
) -> impl TypedValueParser<Value = T> {
    let names = values.iter().map(|&(name, help, _)| PossibleValue::new(name).help(help));
    PossibleValuesParser::new(names).try_map(|given| {
        let found = values.iter().find(|(name, ..)| *name == given);
        found.map(|&(.., value)| value).ok_or_else(|| format!("{given:?} is no value"))
    })
}
