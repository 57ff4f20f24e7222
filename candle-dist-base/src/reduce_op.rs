//! Reductions.
use serde::{Deserialize, Serialize};
use std::fmt;

/// The elementwise reduction of a collective.
///
/// Values are added in rank order, so results are bit-identical on all ranks and in every run. 16-bit floats accumulate
/// in f32. `Min` and `Max` propagate NaN.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ReduceOp {
    /// The sum.
    Sum,
    /// The sum divided by the number of ranks; floats only.
    Avg,
    /// The smallest value.
    Min,
    /// The largest value.
    Max,
    /// The product.
    Product,
    /// The bitwise AND; integers only.
    And,
    /// The bitwise OR; integers only.
    Or,
    /// The bitwise XOR; integers only.
    Xor,
    /// The sum of the values after each was multiplied by a factor; floats only. See [`ReduceOp::pre_mul_sum`].
    PreMulSum(Factor),
}

/// The factor of a [`ReduceOp::PreMulSum`]. Two factors are equal if their bits are equal.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Factor(u64);

impl Factor {
    /// Returns the factor as a number.
    pub const fn value(self) -> f64 {
        f64::from_bits(self.0)
    }
}

impl fmt::Debug for Factor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.value().fmt(f)
    }
}

impl ReduceOp {
    /// Returns the reduction that multiplies each value by `factor` and then adds. All ranks must use the same factor.
    /// 8-bit and 16-bit floats are multiplied in f32, so a factor below 1 prevents overflow.
    ///
    /// ```
    /// use candle_dist_base::ReduceOp;
    ///
    /// assert_eq!(ReduceOp::pre_mul_sum(0.5).to_string(), "sum times 0.5");
    /// ```
    pub const fn pre_mul_sum(factor: f64) -> Self {
        Self::PreMulSum(Factor(factor.to_bits()))
    }

    /// Returns whether this is a bitwise operation, which floats do not support.
    pub const fn is_bitwise(self) -> bool {
        matches!(self, Self::And | Self::Or | Self::Xor)
    }

    /// Returns whether results may be fractions, which integer tensors cannot hold.
    pub const fn is_fractional(self) -> bool {
        matches!(self, Self::Avg | Self::PreMulSum(_))
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sum => "sum",
            Self::Avg => "avg",
            Self::Min => "min",
            Self::Max => "max",
            Self::Product => "product",
            Self::And => "and",
            Self::Or => "or",
            Self::Xor => "xor",
            Self::PreMulSum(factor) => return write!(f, "sum times {}", factor.value()),
        })
    }
}
