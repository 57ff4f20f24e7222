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
                self.rows(&bytes[..32], |rows, high| {
                    rows.iter_mut().enumerate().for_each(|(i, row)| add_bits(row, &high[0], i, 1, 2));
                });
                self.scales = signed_scales(&bytes[96..108]);
                self.scale = pair(108);
            }
            GgmlDType::Q4K | GgmlDType::Q5K => {
                (self.scale, self.minimum) = (pair(0), pair(2));
                for i in 0..8 {
                    (self.scales[i], self.minimums[i]) = scale_and_minimum(i, &bytes[4..16]);
                }
                let nibbles = if dtype == GgmlDType::Q4K { 16 } else { 48 };
                self.rows(&bytes[nibbles..], |rows, low| {
                    rows.iter_mut().enumerate().for_each(|(i, row)| bits(row, &low[i / 2], i % 2 * 4, 15));
                });
                if dtype == GgmlDType::Q5K {
                    self.rows(&bytes[16..48], |rows, high| {
                        rows.iter_mut().enumerate().for_each(|(i, row)| add_bits(row, &high[0], i, 1, 4));
                    });
                }
            }
            GgmlDType::Q6K => {
                self.rows(&bytes[..192], |rows, from| {
                    for (i, row) in rows.iter_mut().enumerate() {
                        let (half, quarter) = (i / 4, i % 4);
                        bits(row, &from[2 * half + quarter % 2], quarter / 2 * 4, 15);
                        add_bits(row, &from[4 + half], 2 * quarter, 3, 4);
                    }
                });
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
        self.rows(bytes, |rows, from| {
            rows.iter_mut().enumerate().for_each(|(i, row)| bits(row, &from[i / 4], i % 4 * 2, 3));
        });
    }

    /// Calls `write` with the codes and these bytes, in rows of 32: then the compiler knows how long they are.
    fn rows(&mut self, bytes: &[u8], write: impl FnOnce(&mut [[u8; 32]], &[[u8; 32]])) {
        write(self.codes.as_chunks_mut().0, bytes.as_chunks().0);
    }
}

/// Takes bits of each byte as a code.
fn bits(row: &mut [u8; 32], from: &[u8; 32], shift: usize, mask: u8) {
    row.iter_mut().zip(from).for_each(|(code, byte)| *code = byte >> shift & mask);
}

/// Adds bits of each byte to a code, from its bit `at` on.
fn add_bits(row: &mut [u8; 32], from: &[u8; 32], shift: usize, mask: u8, at: usize) {
    row.iter_mut().zip(from).for_each(|(code, byte)| *code |= (byte >> shift & mask) << at);
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
