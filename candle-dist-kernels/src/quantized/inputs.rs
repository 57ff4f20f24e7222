//! Inputs of products, rounded to eight bits.

use crate::rows::by_blocks;

use super::format::{COLUMNS, GROUPS};

/// 32 elements of a row of the input as multiples of a scale.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C, align(16))]
pub(super) struct InputBlock {
    /// The multiples, from -127 to 127, four of them in the bytes of each word, the first in the lowest.
    pub(super) words: [i32; GROUPS],
    /// NaN if an element is not finite.
    pub(super) scale: f32,
    /// The sums of the multiples of the first and the last 16 elements.
    pub(super) sums: [i32; 2],
    /// The sum of all elements after rounding.
    pub(super) total: f32,
}

/// Below this, elements count as 0: their scale has no inverse.
const LEAST: f32 = 1e-36;

/// `1.5 · 2²³`: a number of smaller size that is added to it is rounded to an integer, ties to even, in its low bits.
const ROUND: f32 = 12_582_912.0;

/// Rounds rows whose length is a multiple of 32.
pub(super) fn round(x: &[f32]) -> Vec<InputBlock> {
    let mut out = vec![InputBlock::default(); x.len() / COLUMNS];
    let (blocks, _) = x.as_chunks::<COLUMNS>();
    by_blocks(
        &mut out,
        1,
        COLUMNS,
        #[inline(always)]
        |first, out| out.iter_mut().zip(&blocks[first..]).for_each(|(out, block)| *out = round_block(block)),
    );
    out
}

#[inline(always)]
fn round_block(x: &[f32; COLUMNS]) -> InputBlock {
    // The bits of absolute values ascend as the values do, and those of NaN are the largest.
    let most = f32::from_bits(x.iter().fold(0, |most, x| most.max(x.to_bits() & 0x7fff_ffff)));
    if !most.is_finite() {
        return InputBlock { scale: f32::NAN, total: f32::NAN, ..Default::default() };
    }
    if most < LEAST {
        return InputBlock::default();
    }
    let (scale, inverse) = (most / 127.0, 127.0 / most);
    let multiples: [i32; COLUMNS] = std::array::from_fn(|i| {
        (x[i] * inverse + ROUND).to_bits().cast_signed() - ROUND.to_bits().cast_signed()
    });
    let words = std::array::from_fn(|g| {
        i32::from_le_bytes(std::array::from_fn(|c| multiples[4 * g + c] as u8)) // the low byte of a small number
    });
    let sum = |part: &[i32]| part.iter().sum::<i32>();
    let sums = [sum(&multiples[..16]), sum(&multiples[16..])];
    InputBlock { words, scale, sums, total: scale * (sums[0] + sums[1]) as f32 }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    fn multiples(input: &InputBlock) -> Vec<i8> {
        input.words.iter().flat_map(|word| word.to_le_bytes()).map(u8::cast_signed).collect()
    }

    #[test]
    fn elements_are_rounded_to_the_nearest_multiple() {
        let x: Vec<f32> =
            (0..96).map(|i| ((i * i) as f32 * 0.37).sin() * [1.0, 1e-20, 1e20][i / 32]).collect();
        for (input, x) in round(&x).iter().zip(x.chunks_exact(32)) {
            let got = multiples(input);
            for (&multiple, &x) in got.iter().zip(x) {
                assert!((f32::from(multiple) * input.scale - x).abs() <= input.scale * 0.50001);
            }
            assert_eq!(got.iter().map(|m| m.abs()).max(), Some(127));
            let sum = |part: &[i8]| part.iter().map(|&m| i32::from(m)).sum::<i32>();
            assert_eq!(input.sums, [sum(&got[..16]), sum(&got[16..])]);
            assert_eq!(input.total, input.scale * (input.sums[0] + input.sums[1]) as f32);
        }
    }

    #[test]
    fn what_is_not_finite_is_kept_and_what_is_too_small_is_zero() {
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 13, 31] {
                let mut x = [1.0; 32];
                x[at] = bad;
                let input = &round(&x)[0];
                assert!(input.scale.is_nan() && input.total.is_nan(), "{bad} at {at}");
            }
        }
        for small in [0.0, -0.0, 1e-37, -1e-42] {
            let input = &round(&[small; 32])[0];
            assert_eq!((input.scale, multiples(input)), (0.0, vec![0; 32]));
        }
        assert_eq!(multiples(&round(&[f32::MIN; 32])[0]), [-127; 32]);
    }
}
