//! Vectors of floats in the registers of the processor.

use pulp::Simd;

/// A float with vectors of it in the registers of a processor.
pub trait Registers: Copy + 'static {
    /// As many floats as a register holds.
    type Vector<S: Simd>: Copy;

    /// The number of floats of a vector.
    fn lanes<S: Simd>() -> usize;

    /// The vectors of a list, without the rest behind them.
    fn vectors<S: Simd>(list: &[Self]) -> &[Self::Vector<S>];

    /// Like [`vectors`](Self::vectors), to be changed.
    fn vectors_mut<S: Simd>(list: &mut [Self]) -> &mut [Self::Vector<S>];

    /// A vector of equal floats.
    fn splat<S: Simd>(simd: S, x: Self) -> Self::Vector<S>;

    /// Computes `a · b + c`, rounded once where the processor can.
    fn mul_add<S: Simd>(
        simd: S,
        a: Self::Vector<S>,
        b: Self::Vector<S>,
        c: Self::Vector<S>,
    ) -> Self::Vector<S>;
}

macro_rules! registers {
    ($float:ty, $vector:ident, $lanes:ident, $list:ident, $list_mut:ident, $splat:ident, $mul_add:ident) => {
        impl Registers for $float {
            type Vector<S: Simd> = S::$vector;

            #[inline(always)]
            fn lanes<S: Simd>() -> usize {
                S::$lanes
            }

            #[inline(always)]
            fn vectors<S: Simd>(list: &[Self]) -> &[S::$vector] {
                S::$list(list).0
            }

            #[inline(always)]
            fn vectors_mut<S: Simd>(list: &mut [Self]) -> &mut [S::$vector] {
                S::$list_mut(list).0
            }

            #[inline(always)]
            fn splat<S: Simd>(simd: S, x: Self) -> S::$vector {
                simd.$splat(x)
            }

            #[inline(always)]
            fn mul_add<S: Simd>(simd: S, a: S::$vector, b: S::$vector, c: S::$vector) -> S::$vector {
                simd.$mul_add(a, b, c)
            }
        }
    };
}

registers!(f32, f32s, F32_LANES, as_simd_f32s, as_mut_simd_f32s, splat_f32s, mul_add_e_f32s);
registers!(f64, f64s, F64_LANES, as_simd_f64s, as_mut_simd_f64s, splat_f64s, mul_add_e_f64s);
