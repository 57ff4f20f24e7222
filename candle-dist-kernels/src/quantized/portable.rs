//! Lanes of any processor.

use super::format::{CHUNK, ROWS};
use super::lanes::{Kernel, Lanes};
use half::f16;
use std::array::from_fn;

/// Arrays, which the compiler may vectorize.
#[derive(Debug, Clone, Copy)]
pub(super) struct PortableLanes;

impl Lanes for PortableLanes {
    type Codes = [u8; CHUNK];
    type Sums = [i32; ROWS];
    type Floats = [f32; ROWS];
    const HAS_MANY: bool = false;

    #[inline(always)]
    fn run<K: Kernel>(self, kernel: K) {
        kernel.run(self);
    }

    #[inline(always)]
    fn zeros(self) -> [f32; ROWS] {
        [0.0; ROWS]
    }

    #[inline(always)]
    fn halves(self, from: &[u8; 2 * ROWS]) -> [f32; ROWS] {
        from_fn(|r| f16::from_le_bytes([from[2 * r], from[2 * r + 1]]).to_f32())
    }

    #[inline(always)]
    fn unsigned(self, from: &[u8; ROWS]) -> [f32; ROWS] {
        from.map(f32::from)
    }

    #[inline(always)]
    fn signed(self, from: &[u8; ROWS]) -> [f32; ROWS] {
        from.map(|x| f32::from(x.cast_signed()))
    }

    #[inline(always)]
    fn bits(self, chunk: &[u8; CHUNK], right: i32, mask: u8) -> [u8; CHUNK] {
        chunk.map(|byte| if right < 0 { byte << -right & mask } else { byte >> right & mask })
    }

    #[inline(always)]
    fn or(self, a: [u8; CHUNK], b: [u8; CHUNK]) -> [u8; CHUNK] {
        from_fn(|i| a[i] | b[i])
    }

    #[inline(always)]
    fn column(self, codes: [u8; CHUNK], column: i32, zero: i32) -> [f32; ROWS] {
        from_fn(|r| (i32::from(codes[4 * r + column as usize]) - zero) as f32)
    }

    #[inline(always)]
    fn start(self, sum: i32) -> [i32; ROWS] {
        [sum; ROWS]
    }

    #[inline(always)]
    fn dot(self, sums: [i32; ROWS], codes: [u8; CHUNK], word: i32, _: i32) -> [i32; ROWS] {
        let x = word.to_le_bytes().map(|byte| i32::from(byte.cast_signed()));
        from_fn(|r| (0..4).fold(sums[r], |sum, c| sum + i32::from(codes[4 * r + c]) * x[c]))
    }

    #[inline(always)]
    fn room(self, _: i32) -> usize {
        usize::MAX
    }

    #[inline(always)]
    fn settle(self, sums: [i32; ROWS]) -> [i32; ROWS] {
        sums
    }

    #[inline(always)]
    fn floats(self, sums: [i32; ROWS]) -> [f32; ROWS] {
        sums.map(|sum| sum as f32)
    }

    #[inline(always)]
    fn add(self, a: [f32; ROWS], b: [f32; ROWS]) -> [f32; ROWS] {
        from_fn(|r| a[r] + b[r])
    }

    #[inline(always)]
    fn sub(self, a: [f32; ROWS], b: [f32; ROWS]) -> [f32; ROWS] {
        from_fn(|r| a[r] - b[r])
    }

    #[inline(always)]
    fn mul(self, a: [f32; ROWS], b: [f32; ROWS]) -> [f32; ROWS] {
        from_fn(|r| a[r] * b[r])
    }

    #[inline(always)]
    fn times(self, a: [f32; ROWS], factor: f32) -> [f32; ROWS] {
        a.map(|a| a * factor)
    }

    #[inline(always)]
    fn store(self, floats: [f32; ROWS], to: &mut [f32; ROWS]) {
        *to = floats;
    }

    #[inline(always)]
    fn prefetch(self, _: *const u8) {}
}
