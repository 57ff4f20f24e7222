//! Functions of one number with their slopes.
//!
//! Values and slopes have their limits at ±∞, and no step on the way to them overflows. 16-bit numbers are computed in
//! f32 and rounded once. candle's formulas give NaN or 0 for large numbers, in 16 bits from 12 on.
mod apply;
mod formulas;
mod off_host;

pub use apply::gelu_erf;
pub(crate) use formulas::{logistic, near, weighted};

/// A differentiable function of one number.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Function {
    /// `x · (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2`.
    Gelu,
    /// `x · Φ(x)`, with the distribution function of the standard normal.
    GeluErf,
    /// `x · sigmoid(x)`.
    Silu,
    /// `x · tanh(log(1 + exp(x)))`.
    Mish,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
    /// The hyperbolic tangent.
    Tanh,
    /// The error function.
    Erf,
    /// `x` times `(x + 3) / 6` clamped to `0..=1`.
    HardSwish,
    /// `x` where it is positive, else `alpha · (exp(x) - 1)`.
    Elu(f64),
    /// `x` where it is positive, else the factor times `x`. The slope at 0 is between both.
    LeakyRelu(f64),
    /// `x` to this power.
    Power(f64),
    /// `1 / x`.
    Recip,
    /// `1 / √x`.
    Rsqrt,
}

impl Function {
    const fn name(self) -> &'static str {
        match self {
            Self::Gelu => "gelu",
            Self::GeluErf => "gelu_erf",
            Self::Silu => "silu",
            Self::Mish => "mish",
            Self::Sigmoid => "sigmoid",
            Self::Tanh => "tanh",
            Self::Erf => "erf",
            Self::HardSwish => "hard_swish",
            Self::Elu(_) => "elu",
            Self::LeakyRelu(_) => "leaky_relu",
            Self::Power(_) => "powf",
            Self::Recip => "recip",
            Self::Rsqrt => "rsqrt",
        }
    }

    /// The number of the function in `fused/functions.cu`, and its parameter.
    const fn in_text(self) -> (usize, f64) {
        match self {
            Self::Gelu => (0, 0.0),
            Self::GeluErf => (1, 0.0),
            Self::Silu => (2, 0.0),
            Self::Mish => (3, 0.0),
            Self::Sigmoid => (4, 0.0),
            Self::Tanh => (5, 0.0),
            Self::Erf => (6, 0.0),
            Self::HardSwish => (7, 0.0),
            Self::Elu(alpha) => (8, alpha),
            Self::LeakyRelu(factor) => (9, factor),
            Self::Power(e) => (10, e),
            Self::Recip => (11, 0.0),
            Self::Rsqrt => (12, 0.0),
        }
    }
}
