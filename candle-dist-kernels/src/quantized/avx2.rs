//! Lanes of processors with AVX2.

use super::format::{CHUNK, ROWS};
use super::lanes::{Kernel, Lanes};
use std::arch::x86_64::*;

/// Two vectors of 256 bits, of eight rows each.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx2(());

/// Sums of integers: those of 16 bits, two for each row, are settled before they can overflow.
#[derive(Debug, Clone, Copy)]
pub(super) struct IntegerSums {
    wide: [__m256i; 2],
    narrow: [__m256i; 2],
}

/// The largest code whose products with two inputs surely fit in 16 bits.
const FITS: i32 = i16::MAX as i32 / (2 * 127);

impl Avx2 {
    /// The lanes, if the processor has them.
    pub(super) fn new() -> Option<Self> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c")).then_some(Self(()))
    }

    /// Widens sixteen integers of 32 bits.
    #[inline(always)]
    fn floats_of(self, ints: [__m256i; 2]) -> [__m256; 2] {
        // SAFETY: an `Avx2` exists only where `new` found the instructions.
        each(
            ints,
            #[inline(always)]
            |x| unsafe { _mm256_cvtepi32_ps(x) },
        )
    }
}

/// Returns the results of an operation on both. `array::map` is not always inlined, and outside of a function with the
/// instructions each of them is a call.
#[inline(always)]
fn each<A: Copy, R>(a: [A; 2], f: impl Fn(A) -> R) -> [R; 2] {
    [f(a[0]), f(a[1])]
}

/// Returns the results of an operation on both pairs.
#[inline(always)]
fn both<A: Copy, B: Copy, R>(a: [A; 2], b: [B; 2], f: impl Fn(A, B) -> R) -> [R; 2] {
    [f(a[0], b[0]), f(a[1], b[1])]
}

// SAFETY of all blocks below: an `Avx2` exists only where `new` found the instructions. Loads and stores are as long as
// the arrays, and no address need be aligned.
impl Lanes for Avx2 {
    type Codes = [__m256i; 2];
    type Sums = IntegerSums;
    type Floats = [__m256; 2];
    const HAS_MANY: bool = false;

    #[inline(always)]
    fn run<K: Kernel>(self, kernel: K) {
        #[target_feature(enable = "avx2,f16c")]
        fn run<K: Kernel>(lanes: Avx2, kernel: K) {
            kernel.run(lanes);
        }
        // SAFETY: see above.
        unsafe { run(self, kernel) }
    }

    #[inline(always)]
    fn zeros(self) -> [__m256; 2] {
        // SAFETY: see above.
        [unsafe { _mm256_setzero_ps() }; 2]
    }

    #[inline(always)]
    fn halves(self, from: &[u8; 2 * ROWS]) -> [__m256; 2] {
        // SAFETY: see above.
        each(
            [0, 1],
            #[inline(always)]
            |i| unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().add(i * ROWS).cast())) },
        )
    }

    #[inline(always)]
    fn unsigned(self, from: &[u8; ROWS]) -> [__m256; 2] {
        // SAFETY: see above.
        self.floats_of(each(
            [0, 1],
            #[inline(always)]
            |i| unsafe { _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.as_ptr().add(i * ROWS / 2).cast())) },
        ))
    }

    #[inline(always)]
    fn signed(self, from: &[u8; ROWS]) -> [__m256; 2] {
        // SAFETY: see above.
        self.floats_of(each(
            [0, 1],
            #[inline(always)]
            |i| unsafe { _mm256_cvtepi8_epi32(_mm_loadl_epi64(from.as_ptr().add(i * ROWS / 2).cast())) },
        ))
    }

    #[inline(always)]
    fn bits(self, chunk: &[u8; CHUNK], right: i32, mask: u8) -> [__m256i; 2] {
        // SAFETY: see above.
        each(
            [0, 1],
            #[inline(always)]
            |i| unsafe {
                let chunk = _mm256_loadu_si256(chunk.as_ptr().add(i * CHUNK / 2).cast());
                let count = _mm_cvtsi32_si128(right.abs());
                let moved = match right {
                    0 => chunk,
                    1.. => _mm256_srl_epi16(chunk, count),
                    _ => _mm256_sll_epi16(chunk, count),
                };
                if mask == 0xff {
                    moved
                } else {
                    _mm256_and_si256(moved, _mm256_set1_epi8(mask.cast_signed()))
                }
            },
        )
    }

    #[inline(always)]
    fn or(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: see above.
        both(
            a,
            b,
            #[inline(always)]
            |a, b| unsafe { _mm256_or_si256(a, b) },
        )
    }

    #[inline(always)]
    fn column(self, codes: [__m256i; 2], column: i32, zero: i32) -> [__m256; 2] {
        // SAFETY: see above.
        self.floats_of(each(
            codes,
            #[inline(always)]
            |codes| unsafe {
                let codes = _mm256_srl_epi32(codes, _mm_cvtsi32_si128(8 * column));
                let codes = _mm256_and_si256(codes, _mm256_set1_epi32(0xff));
                _mm256_sub_epi32(codes, _mm256_set1_epi32(zero))
            },
        ))
    }

    #[inline(always)]
    fn start(self, sum: i32) -> IntegerSums {
        // SAFETY: see above.
        unsafe { IntegerSums { wide: [_mm256_set1_epi32(sum); 2], narrow: [_mm256_setzero_si256(); 2] } }
    }

    #[inline(always)]
    fn dot(self, sums: IntegerSums, codes: [__m256i; 2], word: i32, most: i32) -> IntegerSums {
        let IntegerSums { wide, narrow } = sums;
        // SAFETY: see above.
        unsafe {
            let x = _mm256_set1_epi32(word);
            if most <= FITS {
                let narrow = both(
                    narrow,
                    codes,
                    #[inline(always)]
                    |sum, codes| _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, x)),
                );
                return IntegerSums { wide, narrow };
            }
            // The products of a pair of whole bytes would saturate: seven bits and the eighth one are multiplied apart.
            let wide = both(
                wide,
                codes,
                #[inline(always)]
                |sum, codes| {
                    let seven = _mm256_and_si256(codes, _mm256_set1_epi8(0x7f));
                    let eighth = _mm256_and_si256(_mm256_srli_epi16::<7>(codes), _mm256_set1_epi8(1));
                    let seven = _mm256_madd_epi16(_mm256_maddubs_epi16(seven, x), _mm256_set1_epi16(1));
                    let eighth = _mm256_madd_epi16(_mm256_maddubs_epi16(eighth, x), _mm256_set1_epi16(128));
                    _mm256_add_epi32(sum, _mm256_add_epi32(seven, eighth))
                },
            );
            IntegerSums { wide, narrow }
        }
    }

    #[inline(always)]
    fn room(self, most: i32) -> usize {
        (FITS / most).max(1) as usize
    }

    #[inline(always)]
    fn settle(self, sums: IntegerSums) -> IntegerSums {
        // SAFETY: see above.
        unsafe {
            let ones = _mm256_set1_epi16(1);
            let wide = both(
                sums.wide,
                sums.narrow,
                #[inline(always)]
                |wide, narrow| _mm256_add_epi32(wide, _mm256_madd_epi16(narrow, ones)),
            );
            IntegerSums { wide, narrow: [_mm256_setzero_si256(); 2] }
        }
    }

    #[inline(always)]
    fn floats(self, sums: IntegerSums) -> [__m256; 2] {
        self.floats_of(sums.wide)
    }

    #[inline(always)]
    fn add(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see above.
        both(
            a,
            b,
            #[inline(always)]
            |a, b| unsafe { _mm256_add_ps(a, b) },
        )
    }

    #[inline(always)]
    fn sub(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see above.
        both(
            a,
            b,
            #[inline(always)]
            |a, b| unsafe { _mm256_sub_ps(a, b) },
        )
    }

    #[inline(always)]
    fn mul(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see above.
        both(
            a,
            b,
            #[inline(always)]
            |a, b| unsafe { _mm256_mul_ps(a, b) },
        )
    }

    #[inline(always)]
    fn times(self, a: [__m256; 2], factor: f32) -> [__m256; 2] {
        // SAFETY: see above.
        each(
            a,
            #[inline(always)]
            |a| unsafe { _mm256_mul_ps(a, _mm256_set1_ps(factor)) },
        )
    }

    #[inline(always)]
    fn store(self, floats: [__m256; 2], to: &mut [f32; ROWS]) {
        let (first, second) = to.split_at_mut(ROWS / 2);
        // SAFETY: see above; each half has eight floats.
        unsafe {
            _mm256_storeu_ps(first.as_mut_ptr(), floats[0]);
            _mm256_storeu_ps(second.as_mut_ptr(), floats[1]);
        }
    }

    #[inline(always)]
    fn prefetch(self, from: *const u8) {
        // SAFETY: see above. A prefetch of any address is harmless.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast()) }
    }
}
