//! The scalar functions of the kernels, written so that loops over them vectorize.

use candle_core::cpu::erf::{erf_f32, erf_f64, erfc_f64};
use candle_core::{DType, WithDType};

use super::registers::Registers;

/// Returns whether ops compute with this dtype, in itself or in f32.
pub fn is_computed(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64)
}

/// A float compute type.
pub trait Real: WithDType + Registers {
    /// Returns the square root.
    fn sqrt(self) -> Self;

    /// Returns the natural logarithm.
    fn ln(self) -> Self;

    /// Returns the hyperbolic tangent.
    fn tanh(self) -> Self;

    /// Returns the error function.
    fn erf(self) -> Self;

    /// Returns `e^self - 1`, also accurate near 0.
    fn exp_m1(self) -> Self;

    /// Returns this number to the power of `e`.
    fn powf(self, e: Self) -> Self;

    /// Returns `e^(self + low)` for `self ≤ 0` and a `low` much smaller than 1, to about one ulp.
    ///
    /// Subnormal results are flushed to 0; NaN stays NaN.
    fn exp_neg(self, low: Self) -> Self;

    /// Returns the distribution function and the density of the standard normal at `self`.
    fn normal(self) -> (Self, Self);

    /// Returns the elements if they are f32.
    fn as_f32_mut(elements: &mut [Self]) -> Option<&mut [f32]>;
}

/// `e^x = 2^n · e^r` with `|r| ≤ ln(2)/2`, and `e^r` by its Taylor polynomial.
///
/// Adding `round` shifts the fraction bits of `n` out of the mantissa and leaves `n` in its lowest bits.
macro_rules! exp_neg {
    ($float:ty, $x:expr, $low:expr, round: $round:expr, mantissa: $mantissa:expr, bias: $bias:expr,
     ln2: $ln2_high:expr, $ln2_low:expr, lowest: $lowest:expr, factorials: [$($factorial:expr),+]) => {{
        let (x, low) = ($x, $low);
        let shifted = x * std::f64::consts::LOG2_E as $float + $round;
        let n = shifted - $round;
        let r = (x - n * $ln2_high) - n * $ln2_low + low;
        let mut series: $float = 0.0;
        $(series = series * r + 1.0 / $factorial;)+
        let power = <$float>::from_bits((shifted.to_bits() << $mantissa).wrapping_add($bias << $mantissa));
        if x < $lowest { 0.0 } else { series * power }
    }};
}

impl Real for f32 {
    #[inline(always)]
    /// Returns the square root.
    fn sqrt(self) -> Self {
        f32::sqrt(self)
    }

    #[inline(always)]
    /// Returns the natural logarithm.
    fn ln(self) -> Self {
        f32::ln(self)
    }

    #[inline(always)]
    fn tanh(self) -> Self {
        f32::tanh(self)
    }

    #[inline(always)]
    fn exp_m1(self) -> Self {
        f32::exp_m1(self)
    }

    #[inline(always)]
    fn erf(self) -> Self {
        erf_f32(self)
    }

    #[inline(always)]
    fn powf(self, e: Self) -> Self {
        f32::powf(self, e)
    }

    #[inline(always)]
    fn exp_neg(self, low: Self) -> Self {
        // The high part of ln 2 has 9 bits, so its product with n is exact.
        exp_neg!(f32, self, low, round: 12_582_912.0, mantissa: 23, bias: 127,
            ln2: 355.0 / 512.0, -2.121_944_4e-4, lowest: -87.3,
            factorials: [5040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0])
    }

    #[inline(always)]
    fn normal(self) -> (Self, Self) {
        // From here on the tail is below the smallest normal number.
        const FAR: f32 = 14.0;
        let t = self.abs();
        let t = if t > FAR { FAR } else { t };
        // t² is needed to more than 24 bits: the square of the upper half of t is exact.
        let head = f32::from_bits(t.to_bits() & 0xffff_f000);
        let e = (-0.5 * head * head).exp_neg(-0.5 * (t - head) * (t + head));
        // The upper tail divided by e^(-t²/2), as z·P(z - 3/4) with z = 1/(1 + 0.6 t): P interpolates at the Chebyshev
        // nodes of [0, FAR], relative error 3e-8.
        let z = 1.0 / (1.0 + 0.6 * t);
        let mut p: f32 = P[0];
        for c in &P[1..] {
            p = p * (z - 0.75) + c;
        }
        let tail = e * (z * p);
        // Near the middle, 1/2 plus the Taylor series of the density's integral has less rounding error.
        let mut q: f32 = 0.0;
        for c in &Q {
            q = q * (t * t) + c;
        }
        let cdf = if t < 1.0 {
            0.5 + self * q
        } else if self > 0.0 {
            1.0 - tail
        } else {
            tail
        };
        (cdf, e * INV_SQRT_TAU as f32)
    }

    fn as_f32_mut(elements: &mut [Self]) -> Option<&mut [f32]> {
        Some(elements)
    }
}

/// `(-1/2)ᵏ / (k! (2k + 1) √(2π))` for k from 7 to 0.
const Q: [f32; 8] = {
    let mut q = [0.0; 8];
    let (mut k, mut term) = (0, INV_SQRT_TAU);
    while k < 8 {
        q[7 - k] = (term / (2 * k + 1) as f64) as f32;
        k += 1;
        term *= -0.5 / k as f64;
    }
    q
};

const P: [f32; 12] = [
    -0.022_688_91,
    0.064_746_95,
    0.076_968_03,
    -0.040_831_503,
    0.025_759_51,
    0.004_402_734,
    -0.058_454_92,
    0.085_709_326,
    -0.026_269_725,
    -0.139_357_15,
    0.235_230_65,
    0.450_032_53,
];

/// `1 / √(2π)`.
const INV_SQRT_TAU: f64 = 0.398_942_280_401_432_7;

impl Real for f64 {
    #[inline(always)]
    /// Returns the square root.
    fn sqrt(self) -> Self {
        f64::sqrt(self)
    }

    #[inline(always)]
    /// Returns the natural logarithm.
    fn ln(self) -> Self {
        f64::ln(self)
    }

    #[inline(always)]
    fn tanh(self) -> Self {
        f64::tanh(self)
    }

    #[inline(always)]
    fn exp_m1(self) -> Self {
        f64::exp_m1(self)
    }

    #[inline(always)]
    fn erf(self) -> Self {
        erf_f64(self)
    }

    #[inline(always)]
    fn powf(self, e: Self) -> Self {
        f64::powf(self, e)
    }

    #[inline(always)]
    fn exp_neg(self, low: Self) -> Self {
        exp_neg!(f64, self, low, round: 6_755_399_441_055_744.0, mantissa: 52, bias: 1023,
            ln2: 0.693_147_180_369_123_8, 1.908_214_929_270_587_7e-10, lowest: -708.0,
            factorials: [6_227_020_800.0, 479_001_600.0, 39_916_800.0, 3_628_800.0, 362_880.0, 40_320.0, 5040.0, 720.0,
                120.0, 24.0, 6.0, 2.0, 1.0, 1.0])
    }

    #[inline(always)]
    fn normal(self) -> (Self, Self) {
        let cdf = 0.5 * erfc_f64(-self * std::f64::consts::FRAC_1_SQRT_2);
        (cdf, (-0.5 * self * self).exp_neg(0.0) * INV_SQRT_TAU)
    }

    fn as_f32_mut(_: &mut [Self]) -> Option<&mut [f32]> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponentials_are_accurate_to_two_ulp() {
        for i in 0..200_000 {
            let x = -(i as f64) * 4.36e-4;
            let got = (x as f32).exp_neg(0.0) as f64;
            let want = f64::exp(x as f32 as f64);
            assert!((got / want - 1.0).abs() < 2.4e-7, "{x}: {got} for {want}");
            let x = x * 8.0;
            let (got, want) = (x.exp_neg(0.0), x.exp());
            assert!((got / want - 1.0).abs() < 4.5e-16, "{x}: {got} for {want}");
        }
    }

    #[test]
    fn exponentials_keep_nan_and_vanish_far_out() {
        assert!(f32::NAN.exp_neg(0.0).is_nan() && f64::NAN.exp_neg(0.0).is_nan());
        for far in [-88.0, -1e4, -1e9, f32::MIN, f32::NEG_INFINITY] {
            assert_eq!(far.exp_neg(0.0), 0.0);
            assert_eq!((far as f64 * 10.0).exp_neg(0.0), 0.0);
        }
        assert_eq!((0f32.exp_neg(0.0), 0f64.exp_neg(0.0)), (1.0, 1.0));
    }

    #[test]
    fn the_f32_normal_has_the_accuracy_of_f32() {
        for i in -130_000..=130_000 {
            let x = i as f32 * 1e-4;
            let (cdf, density) = x.normal();
            let (want_cdf, want_density) = (x as f64).normal();
            assert!((cdf as f64 - want_cdf).abs() < 1.2e-7, "{x}: {cdf} for {want_cdf}");
            // Also accurate where the tail is small, where 1 + erf would cancel.
            assert!((cdf as f64 / want_cdf - 1.0).abs() < 6e-7, "{x}: {cdf} for {want_cdf}");
            assert!((density as f64 / want_density - 1.0).abs() < 3e-7, "{x}: {density} for {want_density}");
            let (erf, want_erf) = (2.0 * cdf as f64 - 1.0, 1.0 - 2.0 * (-x as f64).normal().0);
            assert!((erf - want_erf).abs() < 2.4e-7, "{x}: erf {erf} for {want_erf}");
        }
        assert_eq!((f32::INFINITY.normal().0, f32::NEG_INFINITY.normal().0), (1.0, 0.0));
        assert!(f32::NAN.normal().0.is_nan());
    }
}
