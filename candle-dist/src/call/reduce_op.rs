//! Reductions.
use serde::{Deserialize, Serialize};
use std::fmt;

/// The elementwise reduction of a collective.
///
/// Sums run in rank order, so results are bit-identical on all ranks and from run to run; 16-bit floats accumulate in
/// f32. `Min` and `Max` propagate NaN.
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
    /// The bits that all ranks have; whole numbers only.
    And,
    /// The bits that any rank has; whole numbers only.
    Or,
    /// The bits that an odd number of ranks has; whole numbers only.
    Xor,
    /// The sum of the values times a factor, which is multiplied before the values are added; floats only. See
    /// [`ReduceOp::pre_mul_sum`].
    PreMulSum(Factor),
}

/// The factor of a [`ReduceOp::PreMulSum`]; two are equal if their bits are.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Factor(u64);

impl Factor {
    /// The number.
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
    /// The sum of all values times `factor`, the same on all ranks. Each value is multiplied before it is added, in f32
    /// for 16-bit and 8-bit floats, so that a factor below 1 keeps sums in range.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_dist::{ReduceOp, World};
    ///
    /// World::local(2).run(|ctx| -> candle_dist::Result<()> {
    ///     let x = Tensor::new(&[40_000f32], &Device::Cpu)?.to_dtype(DType::F16)?; // twice this is no f16
    ///     let half = ctx.group().all_reduce(&x, ReduceOp::pre_mul_sum(0.5))?;
    ///     assert_eq!(half.to_dtype(DType::F32)?.to_vec1::<f32>()?, [40_000.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    pub const fn pre_mul_sum(factor: f64) -> Self {
        Self::PreMulSum(Factor(factor.to_bits()))
    }

    /// Whether it combines bits, which floats do not have for this purpose.
    pub const fn is_bitwise(self) -> bool {
        matches!(self, Self::And | Self::Or | Self::Xor)
    }

    /// Whether its results are fractions, which whole numbers cannot hold.
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
