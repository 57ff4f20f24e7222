//! Dtypes by their names on the command line.

use candle_core::DType;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::cli::{Checked, UsageError};

/// A dtype of parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
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
    type Error = UsageError;

    /// The name of a dtype that models are computed in.
    fn try_from(dtype: DType) -> Checked<Self> {
        let known = [Self::F32, Self::Bf16, Self::F16].into_iter().find(|name| DType::from(*name) == dtype);
        known.ok_or_else(|| UsageError(format!("models are not computed in {}: say --dtype.", dtype.as_str())))
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
