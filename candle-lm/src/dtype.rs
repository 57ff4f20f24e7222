//! Dtypes of parameters by their names.

use candle_core::DType;
use serde::{Deserialize, Serialize};

use crate::error::InputError;

/// A dtype of parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DTypeName {
    /// 32-bit floats.
    F32,
    /// Brain floats.
    Bf16,
    /// 16-bit floats.
    F16,
}

impl TryFrom<DType> for DTypeName {
    type Error = InputError;

    /// The name of a dtype that models are computed in.
    fn try_from(dtype: DType) -> Result<Self, InputError> {
        let known = [Self::F32, Self::Bf16, Self::F16].into_iter().find(|name| DType::from(*name) == dtype);
        known
            .ok_or_else(|| InputError(format!("models are not computed in {}: say --dtype.", dtype.as_str())))
    }
}

impl std::str::FromStr for DTypeName {
    type Err = InputError;

    fn from_str(name: &str) -> Result<Self, InputError> {
        let known = [Self::F32, Self::Bf16, Self::F16].into_iter().find(|dtype| dtype.to_string() == name);
        known.ok_or_else(|| {
            InputError(format!("there is no dtype {name:?} of models: give f32, bf16 or f16."))
        })
    }
}

impl std::fmt::Display for DTypeName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(DType::from(*self).as_str())
    }
}

impl From<DTypeName> for DType {
    fn from(name: DTypeName) -> Self {
        match name {
            DTypeName::F32 => Self::F32,
            DTypeName::Bf16 => Self::BF16,
            DTypeName::F16 => Self::F16,
        }
    }
}
