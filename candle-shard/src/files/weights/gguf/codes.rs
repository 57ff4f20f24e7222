//! Blocks that candle has no products of: indices into tables of code words, digits in base 3, digits of few bits, and floats of 4 bits.
//!
//! A block stands for some elements of a row. The comments say what its bytes are, in their order; `d` is an f16.
use half::f16;

/// A type of such blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::files::weights) enum Code {
    Iq1S,
    Iq1M,
    Iq2Xxs,
    Iq2Xs,
    Iq2S,
    Iq3Xxs,
    Iq3S,
    Iq4Nl,
    Iq4Xs,
    Tq1,
    Tq2,
    Mxfp4,
    Nvfp4,
    Q1,
    Q2,
}

/// Words of 16 bits, made of digits of 2 or 3 bits, the first one lowest. `benchmarks/gguf_facts.py` makes the file; the numbers are
/// ggml's, see the README of this folder.
static GRIDS: &[u8; 2 * (256 + 512 + 1024 + 256 + 512 + 2048)] = include_bytes!("grids.bin");

/// A table of code words in [`GRIDS`].
#[derive(Clone, Copy)]
struct CodeGrid {
    /// The first word.
    start: usize,
    /// The bits of a digit.
    bits: usize,
    /// What the digits stand for.
    values: &'static [f32],
}

const OF_2: &[f32] = &[8.0, 25.0, 43.0];
const IQ2_XXS: CodeGrid = CodeGrid { start: 0, bits: 2, values: OF_2 };
const IQ2_XS: CodeGrid = CodeGrid { start: 256, bits: 2, values: OF_2 };
const IQ2_S: CodeGrid = CodeGrid { start: 768, bits: 2, values: OF_2 };
const IQ3_XXS: CodeGrid =
    CodeGrid { start: 1792, bits: 3, values: &[4.0, 12.0, 20.0, 28.0, 36.0, 44.0, 52.0, 62.0] };
const IQ3_S: CodeGrid =
    CodeGrid { start: 2048, bits: 3, values: &[1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0] };
const IQ1: CodeGrid = CodeGrid { start: 2560, bits: 2, values: &[-1.0, 0.0, 1.0] };

const NONLINEAR: [f32; 16] = [
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0,
];
/// Twice the floats with a sign, two bits of exponent and one of mantissa.
pub(in crate::files::weights) const E2M1: [f32; 16] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0];
const POWERS_OF_3: [u8; 5] = [1, 3, 9, 27, 81];

impl CodeGrid {
    /// Writes the digits of a word, each times `scale`; negative where `signs` has a bit.
    fn write(self, word: usize, scale: f32, signs: u8, out: &mut [f32]) {
        self.write_shifted(word, 0.0, scale, out);
        for (_, out) in out.iter_mut().enumerate().filter(|(at, _)| signs >> at & 1 == 1) {
            *out = -*out;
        }
    }

    /// Writes the digits of a word, each plus `shift` and then times `scale`.
    fn write_shifted(self, word: usize, shift: f32, scale: f32, out: &mut [f32]) {
        let at = 2 * (self.start + word);
        let digits = u16::from_le_bytes([GRIDS[at], GRIDS[at + 1]]);
        for (nth, out) in out.iter_mut().enumerate() {
            let digit = usize::from(digits >> (self.bits * nth)) & ((1 << self.bits) - 1);
            *out = scale * (self.values[digit] + shift);
        }
    }
}

/// Returns the signs of eight elements: those of seven bits, and one that makes their number even.
fn even_signs(bits: u32) -> u8 {
    let seven = (bits & 127) as u8;
    seven | ((seven.count_ones() as u8 & 1) << 7)
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

fn word_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

fn long_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// Returns the lower or the upper four bits.
fn nibble(byte: u8, nth: usize) -> usize {
    usize::from(byte >> (4 * (nth & 1)) & 15)
}

/// Writes the elements of 16 bytes: the lower four bits of all, and then the upper ones.
fn write_nibbles(bytes: &[u8], table: &[f32; 16], scale: f32, out: &mut [f32]) {
    let (lower, upper) = out.split_at_mut(bytes.len());
    for ((lower, upper), &byte) in lower.iter_mut().zip(upper).zip(bytes) {
        (*lower, *upper) = (scale * table[nibble(byte, 0)], scale * table[nibble(byte, 1)]);
    }
}

impl Code {
    /// Returns the elements and the bytes of a block.
    pub(in crate::files::weights) fn block(self) -> (usize, usize) {
        match self {
            Self::Iq1S => (256, 50),
            Self::Iq1M => (256, 56),
            Self::Iq2Xxs => (256, 66),
            Self::Iq2Xs => (256, 74),
            Self::Iq2S => (256, 82),
            Self::Iq3Xxs => (256, 98),
            Self::Iq3S => (256, 110),
            Self::Iq4Nl => (32, 18),
            Self::Iq4Xs => (256, 136),
            Self::Tq1 => (256, 54),
            Self::Tq2 => (256, 66),
            Self::Mxfp4 => (32, 17),
            Self::Nvfp4 => (64, 36),
            Self::Q1 => (128, 18),
            Self::Q2 => (64, 18),
        }
    }

    /// Writes the elements that blocks stand for.
    pub(in crate::files::weights) fn decode(self, blocks: &[u8], out: &mut [f32]) {
        let (elements, bytes) = self.block();
        for (block, out) in blocks.chunks_exact(bytes).zip(out.chunks_exact_mut(elements)) {
            self.decode_block(block, out);
        }
    }

    fn decode_block(self, block: &[u8], out: &mut [f32]) {
        match self {
            Self::Iq1S => iq1_s(block, out),
            Self::Iq1M => iq1_m(block, out),
            Self::Iq2Xxs => iq2_xxs(block, out),
            Self::Iq2Xs => iq2_xs(block, out),
            Self::Iq2S => iq2_s(block, out),
            Self::Iq3Xxs => iq3_xxs(block, out),
            Self::Iq3S => iq3_s(block, out),
            // d, 16 bytes of nibbles.
            Self::Iq4Nl => write_nibbles(&block[2..], &NONLINEAR, half_at(block, 0), out),
            Self::Iq4Xs => iq4_xs(block, out),
            Self::Tq1 => tq1(block, out),
            Self::Tq2 => tq2(block, out),
            // An exponent, 16 bytes of nibbles.
            Self::Mxfp4 => write_nibbles(&block[1..], &E2M1, half_power_of_2(block[0]), out),
            Self::Nvfp4 => nvfp4(block, out),
            Self::Q1 => q1(block, out),
            Self::Q2 => q2(block, out),
        }
    }
}

/// Returns half of 2 to the power of an exponent that is stored with 127 added. The half of the largest one is finite.
pub(in crate::files::weights) fn half_power_of_2(stored: u8) -> f32 {
    match stored {
        // Numbers too small for a normal float.
        0 | 1 => f32::from_bits(1 << (21 + stored)),
        stored => f32::from_bits((u32::from(stored) - 1) << 23),
    }
}

/// d; 32 lower bytes of words; 8 × 16 bits: 4 × 3 upper bits of words, 3 bits of scale, the sign of the shift.
fn iq1_s(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (part, out) in out.chunks_exact_mut(32).enumerate() {
        let upper = word_at(block, 34 + 2 * part);
        let scale = d * f32::from(2 * (upper >> 12 & 7) + 1);
        let shift = if upper >> 15 == 1 { -0.125 } else { 0.125 };
        for (nth, out) in out.chunks_exact_mut(8).enumerate() {
            let word = usize::from(block[2 + 4 * part + nth]) | usize::from(upper >> (3 * nth) & 7) << 8;
            IQ1.write_shifted(word, shift, scale, out);
        }
    }
}

/// 32 lower bytes of words; 32 nibbles: 3 upper bits of a word, the sign of its shift; 4 × 16 bits: 4 × 3 bits of scale, 4 bits of d.
fn iq1_m(block: &[u8], out: &mut [f32]) {
    let scales: [u16; 4] = std::array::from_fn(|nth| word_at(block, 48 + 2 * nth));
    let d = scales.iter().enumerate().fold(0, |d, (nth, scales)| d | scales >> 12 << (4 * nth));
    let d = f16::from_bits(d).to_f32();
    for (nth, out) in out.chunks_exact_mut(8).enumerate() {
        let scale = scales[nth / 8] >> (3 * (nth / 2 % 4)) & 7;
        let upper = nibble(block[32 + nth / 2], nth);
        let shift = if upper & 8 == 8 { -0.125 } else { 0.125 };
        let word = usize::from(block[nth]) | (upper & 7) << 8;
        IQ1.write_shifted(word, shift, d * f32::from(2 * scale + 1), out);
    }
}

/// d; 8 × (4 words, and 32 bits: 4 × 7 bits of signs, 4 bits of scale).
fn iq2_xxs(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (part, out) in out.chunks_exact_mut(32).enumerate() {
        let at = 2 + 8 * part;
        let signs = long_at(block, at + 4);
        let scale = d * (0.5 + (signs >> 28) as f32) * 0.25;
        for (nth, out) in out.chunks_exact_mut(8).enumerate() {
            IQ2_XXS.write(usize::from(block[at + nth]), scale, even_signs(signs >> (7 * nth)), out);
        }
    }
}

/// d; 32 × 16 bits: 9 bits of a word, 7 bits of signs; 16 nibbles of scales.
fn iq2_xs(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (nth, out) in out.chunks_exact_mut(8).enumerate() {
        let word = word_at(block, 2 + 2 * nth);
        let scale = d * (0.5 + nibble(block[66 + nth / 4], nth / 2) as f32) * 0.25;
        IQ2_XS.write(usize::from(word & 511), scale, even_signs(u32::from(word >> 9)), out);
    }
}

/// d; 32 lower bytes of words; 32 bytes of signs; 32 × 2 upper bits of words; 16 nibbles of scales.
fn iq2_s(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (nth, out) in out.chunks_exact_mut(8).enumerate() {
        let upper = usize::from(block[66 + nth / 4] >> (2 * (nth % 4)) & 3);
        let scale = d * (0.5 + nibble(block[74 + nth / 4], nth / 2) as f32) * 0.25;
        IQ2_S.write(usize::from(block[2 + nth]) | upper << 8, scale, block[34 + nth], out);
    }
}

/// d; 64 words of four; 8 × 32 bits: 4 × 7 bits of signs of eight, 4 bits of scale.
fn iq3_xxs(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (nth, out) in out.chunks_exact_mut(4).enumerate() {
        let signs = long_at(block, 66 + 4 * (nth / 8));
        let scale = d * (0.5 + (signs >> 28) as f32) * 0.5;
        let of_eight = even_signs(signs >> (7 * (nth / 2 % 4)));
        IQ3_XXS.write(usize::from(block[2 + nth]), scale, of_eight >> (4 * (nth % 2)), out);
    }
}

/// d; 64 lower bytes of words of four; 64 upper bits of words; 32 bytes of signs of eight; 8 nibbles of scales.
fn iq3_s(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (nth, out) in out.chunks_exact_mut(4).enumerate() {
        let upper = usize::from(block[66 + nth / 8] >> (nth % 8) & 1);
        let scale = d * (1 + 2 * nibble(block[106 + nth / 16], nth / 8)) as f32;
        let of_eight = block[74 + nth / 2];
        IQ3_S.write(usize::from(block[2 + nth]) | upper << 8, scale, of_eight >> (4 * (nth % 2)), out);
    }
}

/// d; 8 × 2 upper bits of scales; 8 nibbles of scales; 8 × 16 bytes of nibbles.
fn iq4_xs(block: &[u8], out: &mut [f32]) {
    let (d, upper) = (half_at(block, 0), word_at(block, 2));
    for (part, out) in out.chunks_exact_mut(32).enumerate() {
        let scale = nibble(block[4 + part / 2], part) | usize::from(upper >> (2 * part) & 3) << 4;
        write_nibbles(&block[8 + 16 * part..][..16], &NONLINEAR, d * (scale as f32 - 32.0), out);
    }
}

/// 48 bytes of five digits each, 4 bytes of four, d. The first digit of 32 bytes, then the second, and so on; then of 16, and of 4.
fn tq1(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 52);
    let digits = [(&block[..32], 5), (&block[32..48], 5), (&block[48..52], 4)].into_iter().flat_map(
        |(bytes, count)| {
            POWERS_OF_3[..count]
                .iter()
                .flat_map(move |power| bytes.iter().map(move |byte| byte.wrapping_mul(*power)))
        },
    );
    for (out, digit) in out.iter_mut().zip(digits) {
        *out = d * (f32::from((u16::from(digit) * 3) >> 8) - 1.0);
    }
}

/// 64 bytes of four digits each, d. The first digit of 32 bytes, then the second, and so on; then of the others.
fn tq2(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 64);
    for (bytes, out) in block[..64].chunks_exact(32).zip(out.chunks_exact_mut(128)) {
        for (nth, out) in out.chunks_exact_mut(32).enumerate() {
            for (out, byte) in out.iter_mut().zip(bytes) {
                *out = d * (f32::from(byte >> (2 * nth) & 3) - 1.0);
            }
        }
    }
}

/// 4 scales, floats without a sign of four bits of exponent and three of mantissa; 4 × 8 bytes of nibbles.
fn nvfp4(block: &[u8], out: &mut [f32]) {
    let (scales, nibbles) = block.split_at(4);
    for ((scale, bytes), out) in scales.iter().zip(nibbles.chunks_exact(8)).zip(out.chunks_exact_mut(16)) {
        write_nibbles(bytes, &E2M1, half_e4m3(*scale), out);
    }
}

/// Returns half of a float with four bits of exponent and three of mantissa, whatever its sign. That which is no number is 0.
pub(super) fn half_e4m3(bits: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(bits >> 3 & 15), f32::from(bits & 7));
    match (bits, exponent) {
        (0x7f, _) => 0.0,
        (_, 0) => mantissa * 2f32.powi(-10),
        _ => (8.0 + mantissa) * 2f32.powi(exponent - 11),
    }
}

/// d; 16 bytes of eight bits: a sign each, which is plus where it is set.
fn q1(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (byte, out) in block[2..].iter().zip(out.chunks_exact_mut(8)) {
        for (nth, out) in out.iter_mut().enumerate() {
            *out = if byte >> nth & 1 == 1 { d } else { -d };
        }
    }
}

/// d; 16 bytes of four digits.
fn q2(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (byte, out) in block[2..].iter().zip(out.chunks_exact_mut(4)) {
        for (nth, out) in out.iter_mut().enumerate() {
            *out = d * (f32::from(byte >> (2 * nth) & 3) - 1.0);
        }
    }
}
