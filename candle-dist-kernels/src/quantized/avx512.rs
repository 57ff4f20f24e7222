//! Lanes of processors with AVX-512 and its dot products of bytes.

use super::format::{CHUNK, ROWS};
use super::lanes::{Kernel, Lanes};
use std::arch::x86_64::*;

/// One vector of 512 bits.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx512(());

impl Avx512 {
    /// The lanes, if the processor has them.
    pub(super) fn new() -> Option<Self> {
        (is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("f16c"))
        .then_some(Self(()))
    }
}

// SAFETY of all blocks below: an `Avx512` exists only where `new` found the instructions. Loads and stores are as long
// as the arrays, and no address need be aligned.
impl Lanes for Avx512 {
    type Codes = __m512i;
    type Sums = __m512i;
    type Floats = __m512;
    const HAS_MANY: bool = true;

    #[inline(always)]
    fn run<K: Kernel>(self, kernel: K) {
        #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,f16c")]
        fn run<K: Kernel>(lanes: Avx512, kernel: K) {
            kernel.run(lanes);
        }
        // SAFETY: see above.
        unsafe { run(self, kernel) }
    }

    #[inline(always)]
    fn zeros(self) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_setzero_ps() }
    }

    #[inline(always)]
    fn halves(self, from: &[u8; 2 * ROWS]) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())) }
    }

    #[inline(always)]
    fn unsigned(self, from: &[u8; ROWS]) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.as_ptr().cast()))) }
    }

    #[inline(always)]
    fn signed(self, from: &[u8; ROWS]) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.as_ptr().cast()))) }
    }

    #[inline(always)]
    fn bits(self, chunk: &[u8; CHUNK], right: i32, mask: u8) -> __m512i {
        // SAFETY: see above.
        unsafe {
            let chunk = _mm512_loadu_si512(chunk.as_ptr().cast());
            let count = _mm_cvtsi32_si128(right.abs());
            let moved = match right {
                0 => chunk,
                1.. => _mm512_srl_epi16(chunk, count),
                _ => _mm512_sll_epi16(chunk, count),
            };
            if mask == 0xff { moved } else { _mm512_and_si512(moved, _mm512_set1_epi8(mask.cast_signed())) }
        }
    }

    #[inline(always)]
    fn or(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_or_si512(a, b) }
    }

    #[inline(always)]
    fn column(self, codes: __m512i, column: i32, zero: i32) -> __m512 {
        // SAFETY: see above.
        unsafe {
            let codes = _mm512_srl_epi32(codes, _mm_cvtsi32_si128(8 * column));
            let codes = _mm512_and_si512(codes, _mm512_set1_epi32(0xff));
            _mm512_cvtepi32_ps(_mm512_sub_epi32(codes, _mm512_set1_epi32(zero)))
        }
    }

    #[inline(always)]
    fn start(self, sum: i32) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_set1_epi32(sum) }
    }

    #[inline(always)]
    fn dot(self, sums: __m512i, codes: __m512i, word: i32, _: i32) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_dpbusd_epi32(sums, codes, _mm512_set1_epi32(word)) }
    }

    #[inline(always)]
    fn room(self, _: i32) -> usize {
        usize::MAX
    }

    #[inline(always)]
    fn settle(self, sums: __m512i) -> __m512i {
        sums
    }

    #[inline(always)]
    fn floats(self, sums: __m512i) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_cvtepi32_ps(sums) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn times(self, a: __m512, factor: f32) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_mul_ps(a, _mm512_set1_ps(factor)) }
    }

    #[inline(always)]
    fn store(self, floats: __m512, to: &mut [f32; ROWS]) {
        // SAFETY: see above.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), floats) }
    }

    #[inline(always)]
    fn prefetch(self, from: *const u8) {
        // SAFETY: see above. A prefetch of any address is harmless.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast()) }
    }
}
