//! The dtypes of safetensors files.
use candle_core::DType;
use itertools::Itertools;
use safetensors::Dtype;
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::Error as Unknown;

/// The names in files of the dtypes that can be loaded and saved.
const DTYPES: [(&str, DType); 9] = [
    ("U8", DType::U8),
    ("U32", DType::U32),
    ("I16", DType::I16),
    ("I32", DType::I32),
    ("I64", DType::I64),
    ("BF16", DType::BF16),
    ("F16", DType::F16),
    ("F32", DType::F32),
    ("F64", DType::F64),
];

/// Returns the dtype with this name.
pub(crate) fn named(name: &str) -> Option<DType> {
    DTYPES.iter().find(|(known, _)| *known == name).map(|&(_, dtype)| dtype)
}

/// Returns the name of a dtype; `None` if it cannot be saved.
pub(crate) fn name_of(dtype: DType) -> Option<&'static str> {
    DTYPES.iter().find(|(_, known)| *known == dtype).map(|&(name, _)| name)
}

/// Returns the bits of an element of the dtype with this name, which a file has had.
pub(super) fn bits(name: &str) -> usize {
    let known: Result<Dtype, Unknown> = Dtype::deserialize(name.into_deserializer());
    known.map_or(0, |dtype| dtype.bitsize())
}

/// Returns all names, for messages.
pub(super) fn known() -> String {
    DTYPES.iter().map(|(name, _)| name).join(", ")
}
