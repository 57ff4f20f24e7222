//! Blocks of one row as files store them, taken apart.

use candle_core::quantized::GgmlDType;

/// The most columns of a block.
pub(super) const MOST: usize = 256;

/// A block of a row: codes without a sign, and scales.
#[derive(Debug)]
pub(super) struct CodeBlock {
    pub(super) codes: [u8; MOST],
    /// The scale of the block, an f16.
    pub(super) scale: [u8; 2],
    /// The minimum, or its scale, an f16.
    pub(super) minimum: [u8; 2],
    /// The scales of 16 or 32 columns, as the type has them.
    pub(super) scales: [u8; 16],
    /// The minimums of 32 columns.
    pub(super) minimums: [u8; 8],
}

impl CodeBlock {
    pub(super) fn new() -> Self {
        Self { codes: [0; MOST], scale: [0; 2], minimum: [0; 2], scales: [0; 16], minimums: [0; 8] }
    }

    /// Takes the bytes of a block of type `dtype` apart.
    pub(super) fn read(&mut self, dtype: GgmlDType, bytes: &[u8]) {
        let pair = |at: usize| [bytes[at], bytes[at + 1]];
        match dtype {
            GgmlDType::Q4_0 => {
                self.scale = pair(0);
                self.nibbles(&bytes[2..]);
            }
            GgmlDType::Q4_1 => {
                (self.scale, self.minimum) = (pair(0), pair(2));
                self.nibbles(&bytes[4..]);
            }
            GgmlDType::Q5_0 => {
                self.scale = pair(0);
                self.nibbles(&bytes[6..]);
                self.fifth_bits(&bytes[2..6]);
            }
            GgmlDType::Q5_1 => {
                (self.scale, self.minimum) = (pair(0), pair(2));
                self.nibbles(&bytes[8..]);
                self.fifth_bits(&bytes[4..8]);
            }
            GgmlDType::Q8_0 => {
                self.scale = pair(0);
                // From -128 to 127, stored from 0 to 255.
                self.codes.iter_mut().zip(&bytes[2..]).for_each(|(code, &byte)| *code = byte ^ 0x80);
            }
            GgmlDType::Q2K => {
                self.scales.copy_from_slice(&bytes[..16]);
                self.pairs_of_bits(&bytes[16..80]);
                (self.scale, self.minimum) = (pair(80), pair(82));
            }
            GgmlDType::Q3K => {
                self.pairs_of_bits(&bytes[32..96]);
                for (i, code) in self.codes.iter_mut().enumerate() {
                    *code |= (bytes[i % 32] >> (i / 32) & 1) << 2;
                }
                self.scales = signed_scales(&bytes[96..108]);
                self.scale = pair(108);
            }
            GgmlDType::Q4K | GgmlDType::Q5K => {
                (self.scale, self.minimum) = (pair(0), pair(2));
                for i in 0..8 {
                    (self.scales[i], self.minimums[i]) = scale_and_minimum(i, &bytes[4..16]);
                }
                let nibbles = if dtype == GgmlDType::Q4K { 16 } else { 48 };
                for (i, code) in self.codes.iter_mut().enumerate() {
                    *code = bytes[nibbles + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15;
                    if dtype == GgmlDType::Q5K {
                        *code |= (bytes[16 + i % 32] >> (i / 32) & 1) << 4;
                    }
                }
            }
            GgmlDType::Q6K => {
                for (i, code) in self.codes.iter_mut().enumerate() {
                    let (half, quarter, j) = (i / 128, i % 128 / 32, i % 32);
                    let low = bytes[64 * half + quarter % 2 * 32 + j] >> (quarter / 2 * 4) & 15;
                    let high = bytes[128 + 32 * half + j] >> (2 * quarter) & 3;
                    *code = low | high << 4;
                }
                self.scales.copy_from_slice(&bytes[192..208]);
                self.scale = pair(208);
            }
            _ => {} // no type of weights: `format::layout` refuses it
        }
    }

    fn nibbles(&mut self, bytes: &[u8]) {
        for (i, &byte) in bytes[..16].iter().enumerate() {
            (self.codes[i], self.codes[i + 16]) = (byte & 15, byte >> 4);
        }
    }

    fn fifth_bits(&mut self, bits: &[u8]) {
        for (i, code) in self.codes[..32].iter_mut().enumerate() {
            *code |= (bits[i / 8] >> (i % 8) & 1) << 4;
        }
    }

    fn pairs_of_bits(&mut self, bytes: &[u8]) {
        for (i, code) in self.codes.iter_mut().enumerate() {
            *code = bytes[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
        }
    }
}

/// The scales of a `Q3K` block, six bits each, less 32.
fn signed_scales(bytes: &[u8]) -> [u8; 16] {
    std::array::from_fn(|i| {
        let low = bytes[i % 8] >> (i / 8 * 4) & 15;
        let high = bytes[8 + i % 4] >> (i / 4 * 2) & 3;
        (low | high << 4).wrapping_sub(32)
    })
}

/// The scale and the minimum of 32 columns of a `Q4K` or `Q5K` block, six bits each.
fn scale_and_minimum(i: usize, bytes: &[u8]) -> (u8, u8) {
    match i {
        0..4 => (bytes[i] & 63, bytes[i + 4] & 63),
        _ => (bytes[i + 4] & 15 | bytes[i - 4] >> 6 << 4, bytes[i + 4] >> 4 | bytes[i] >> 6 << 4),
    }
}
