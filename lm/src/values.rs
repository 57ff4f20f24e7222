//! Values of flags that are types of the library.

use candle_lm::dtype::DTypeName;
use candle_lm::train::rate::Decay;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

/// A value by its name, and its help.
type Named<T> = (&'static str, &'static str, T);

const DTYPES: [Named<DTypeName>; 3] = [
    ("f32", "32-bit floats", DTypeName::F32),
    ("bf16", "Brain floats", DTypeName::Bf16),
    ("f16", "16-bit floats", DTypeName::F16),
];

const DECAYS: [Named<Decay>; 3] = [
    ("cosine", "By half a wave of a cosine, to a tenth", Decay::Cosine),
    ("linear", "In a straight line, to a tenth", Decay::Linear),
    ("none", "Not at all", Decay::None),
];

/// Parses the name of a dtype.
pub(crate) fn dtype() -> impl TypedValueParser<Value = DTypeName> {
    one_of(&DTYPES)
}

/// Parses the name of a decay.
pub(crate) fn decay() -> impl TypedValueParser<Value = Decay> {
    one_of(&DECAYS)
}

fn one_of<T: Copy + Send + Sync + 'static>(values: &'static [Named<T>]) -> impl TypedValueParser<Value = T> {
    let names = values.iter().map(|&(name, help, _)| PossibleValue::new(name).help(help));
    PossibleValuesParser::new(names).try_map(|given| {
        let found = values.iter().find(|(name, ..)| *name == given);
        found.map(|&(.., value)| value).ok_or_else(|| format!("{given:?} is no value"))
    })
}
