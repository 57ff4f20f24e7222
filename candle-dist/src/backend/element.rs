//! Element types and their arithmetic.
use crate::call::ReduceOp;
use candle_core::WithDType;
use float8::F8E4M3;
use half::{bf16, f16};

/// An element type, with the wider type in which its sums and products accumulate.
pub(super) trait ReduceElement: WithDType {
    /// Whether it is a float, which has `divide` and `scale`. A constant, so that other elements compile no op that needs them.
    const IS_FLOAT: bool;
    /// Whether it is an integer, which has `bits`.
    const IS_INT: bool = !Self::IS_FLOAT;
    type Acc: Copy + PartialOrd + std::ops::Add<Output = Self::Acc> + std::ops::Mul<Output = Self::Acc>;
    fn widen(self) -> Self::Acc;
    fn narrow(acc: Self::Acc) -> Self;
    fn is_nan(acc: Self::Acc) -> bool;
    fn divide(_acc: Self::Acc, _by: usize) -> Self::Acc {
        unreachable!("integers are not divided")
    }
    fn scale(_acc: Self::Acc, _by: f64) -> Self::Acc {
        unreachable!("integers are not scaled")
    }
    /// Applies a bitwise reduction.
    fn bits(_op: ReduceOp, _a: Self::Acc, _b: Self::Acc) -> Self::Acc {
        unreachable!("floats have no bitwise reductions")
    }
}

macro_rules! element {
    (float $t:ty, $acc:ty, $widen:expr, $narrow:expr) => {
        impl ReduceElement for $t {
            const IS_FLOAT: bool = true;
            type Acc = $acc;
            fn widen(self) -> $acc {
                $widen(self)
            }
            fn narrow(acc: $acc) -> Self {
                $narrow(acc)
            }
            fn divide(acc: $acc, by: usize) -> $acc {
                acc / by as $acc
            }
            fn is_nan(acc: $acc) -> bool {
                acc.is_nan()
            }
            fn scale(acc: $acc, by: f64) -> $acc {
                acc * by as $acc
            }
        }
    };
    (int $t:ty) => {
        impl ReduceElement for $t {
            const IS_FLOAT: bool = false;
            type Acc = std::num::Wrapping<$t>;
            fn widen(self) -> Self::Acc {
                std::num::Wrapping(self)
            }
            fn narrow(acc: Self::Acc) -> Self {
                acc.0
            }
            fn is_nan(_: Self::Acc) -> bool {
                false
            }
            fn bits(op: ReduceOp, a: Self::Acc, b: Self::Acc) -> Self::Acc {
                match op {
                    ReduceOp::And => a & b,
                    ReduceOp::Or => a | b,
                    _ => a ^ b,
                }
            }
        }
    };
}
element!(float f32, f32, |x| x, |x| x);
element!(float f64, f64, |x| x, |x| x);
element!(float f16, f32, f16::to_f32, f16::from_f32);
element!(float bf16, f32, bf16::to_f32, bf16::from_f32);
element!(float F8E4M3, f32, widen_f8, F8E4M3::from_f32);
element!(int u8);
element!(int u32);
element!(int i16);
element!(int i32);
element!(int i64);

/// Converts an 8-bit float: 4 bits of exponent, 3 of mantissa, no infinity. `F8E4M3::to_f32` normalizes in a loop,
/// which compilers have turned into an endless loop when they unrolled it over a slice.
fn widen_f8(x: F8E4M3) -> f32 {
    let bits = u32::from(x.to_bits());
    let (sign, exponent, mantissa) = ((bits & 0x80) << 24, (bits >> 3) & 0xF, bits & 7);
    let magnitude = match (exponent, mantissa) {
        (0xF, 7) => f32::NAN,
        (0, _) => mantissa as f32 / 512.0,
        _ => f32::from_bits((exponent + 120) << 23 | mantissa << 20),
    };
    f32::from_bits(magnitude.to_bits() | sign)
}

/// Evaluates `$body` with `$t` as the element type of `$dtype`, for the dtypes that collectives support.
macro_rules! with_element {
    ($dtype:expr, $t:ident => $body:expr) => {{
        macro_rules! arm {
            ($element:ty) => {{
                type $t = $element;
                $body
            }};
        }
        match $dtype {
            candle_core::DType::U8 => arm!(u8),
            candle_core::DType::U32 => arm!(u32),
            candle_core::DType::I16 => arm!(i16),
            candle_core::DType::I32 => arm!(i32),
            candle_core::DType::I64 => arm!(i64),
            candle_core::DType::F8E4M3 => arm!(float8::F8E4M3),
            candle_core::DType::BF16 => arm!(half::bf16),
            candle_core::DType::F16 => arm!(half::f16),
            candle_core::DType::F32 => arm!(f32),
            candle_core::DType::F64 => arm!(f64),
            other => Err($crate::Error::Unsupported(format!(
                "{} tensors in a process group; cast to one of {}",
                other.as_str(),
                $crate::call::carried()
            ))),
        }
    }};
}
pub(super) use with_element;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_8_bit_float_widens_to_its_value() {
        for bits in 0..=u8::MAX {
            let x = F8E4M3::from_bits(bits);
            let (got, want) = (widen_f8(x), std::hint::black_box(x).to_f32());
            assert!(
                got == want && got.is_sign_negative() == want.is_sign_negative()
                    || got.is_nan() && want.is_nan()
            );
            assert!(got.is_nan() || F8E4M3::from_f32(got) == x, "{bits}");
        }
    }
}
