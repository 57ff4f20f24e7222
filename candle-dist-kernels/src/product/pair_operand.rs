//! The packed operand of products whose numbers are pairs of bf16.
//!
//! Two numbers that follow each other in the inner dim are a word. The instruction multiplies the words of two operands and adds both
//! products to a sum in f32, at twice the rate of f32. Numbers of the other operand are rounded to bf16 when they are used.
use std::ops::Range;

use super::matrix::LeftOperand;
use super::pairs::Pairs;
use crate::{element::narrow_bf16, real::Real, rows::vectorised};

/// Two numbers of bf16: their bits.
type Word = [u16; 2];

/// The columns of a panel: two vectors of sums.
const COLUMNS: usize = 32;

/// Panels of columns, each contiguous, pair by pair. Missing columns of the last panel and a missing last number are zeros.
#[derive(Debug)]
pub(super) struct PairOperand {
    pairs: Pairs,
    words: Vec<Word>,
    rows: usize,
    columns: usize,
}

impl PairOperand {
    /// An operand without elements, if the processor has the instruction.
    pub(super) fn new() -> Option<Self> {
        Pairs::new().map(|pairs| Self { pairs, words: Vec::new(), rows: 0, columns: 0 })
    }

    /// Packs a matrix `[rows, columns]` with these strides over what was packed before. `bits` returns a number as bf16.
    #[inline(always)]
    pub(super) fn pack<E: Copy>(
        &mut self,
        from: &[E],
        [rows, columns]: [usize; 2],
        [of_row, of_column]: [usize; 2],
        bits: impl Fn(E) -> u16 + Copy,
    ) {
        (self.rows, self.columns) = (rows, columns);
        let len = rows.div_ceil(2) * columns.next_multiple_of(COLUMNS);
        self.words.clear();
        self.words.resize(len, [0; 2]);
        let panels = self.words.chunks_exact_mut((rows.div_ceil(2) * COLUMNS).max(1));
        for (i, out) in panels.enumerate() {
            let first = i * COLUMNS;
            let held = COLUMNS.min(columns - first);
            let row = |row: usize| &from[row * of_row + first * of_column..];
            if of_column == 1 {
                for (pair, out) in out.chunks_exact_mut(COLUMNS).enumerate() {
                    let upper = row(2 * pair)[..held].iter();
                    if 2 * pair + 1 < rows {
                        let lower = row(2 * pair + 1)[..held].iter();
                        let words = out.iter_mut().zip(upper).zip(lower);
                        words.for_each(|((out, &a), &b)| *out = [bits(a), bits(b)]);
                    } else {
                        out.iter_mut().zip(upper).for_each(|(out, &a)| *out = [bits(a), 0]);
                    }
                }
                continue;
            }
            // A few pairs of all columns at a time: their words stay in the L1 cache.
            const AT_ONCE: usize = 8;
            for (block, out) in out.chunks_mut(AT_ONCE * COLUMNS).enumerate() {
                let start = 2 * AT_ONCE * block;
                let count = (rows - start).min(2 * AT_ONCE);
                for column in 0..held {
                    let from = &row(start)[column * of_column..];
                    // Rows of expanded tensors are the same.
                    for at in 0..count {
                        out[at / 2 * COLUMNS + column][at % 2] = bits(from[at * of_row]);
                    }
                }
            }
        }
    }

    /// Computes rows of a product, whose left operand is rounded to bf16. See [`ProductRows`](super::ProductRows) for the arguments.
    #[allow(clippy::too_many_arguments)] // those of `ProductRows`
    pub(super) fn multiply<T: Real>(
        &self,
        left: LeftOperand<'_, T>,
        rows: Range<usize>,
        needed: &dyn Fn(Range<usize>) -> [Range<usize>; 2],
        width: usize,
        adds: bool,
        out: &mut [f32],
    ) {
        let [inner, _] = needed(rows.clone());
        if rows.is_empty() || inner.is_empty() {
            return;
        }
        let inner = inner.start / 2..inner.end.div_ceil(2);
        let words = LeftWords::of(left, &rows, (&inner, self.rows));
        let mut first = rows.start;
        while first < rows.end {
            let count = match rows.end - first {
                12.. => 12,
                6.. => 6,
                3.. => 3,
                rest => rest,
            };
            let [of_rows, columns] = needed(first..first + count);
            let of_rows = of_rows.start / 2..of_rows.end.div_ceil(2);
            if !columns.is_empty() && !of_rows.is_empty() {
                let at = (first - rows.start) * words.strides[0]
                    + (of_rows.start - inner.start) * words.strides[1];
                let left = LeftOperand { elements: &words.words[at..], strides: words.strides };
                for index in columns.start / COLUMNS..columns.end.div_ceil(COLUMNS) {
                    let panel = &self.words[index * self.rows.div_ceil(2) * COLUMNS..];
                    let panel = &panel[of_rows.start * COLUMNS..of_rows.end * COLUMNS];
                    let held = COLUMNS.min(self.columns - index * COLUMNS);
                    let out = &mut out[first * width + index * COLUMNS..];
                    self.pairs.tile(count, left, panel, (out, [held, width]), adds);
                }
            }
            first += count;
        }
    }
}

/// Some rows and pairs of a left operand.
struct LeftWords {
    words: Vec<Word>,
    strides: [usize; 2],
}

impl LeftWords {
    /// Rounds these pairs of these rows of an operand with `len` numbers in a row.
    fn of<T: Real>(
        LeftOperand { elements, strides }: LeftOperand<'_, T>,
        rows: &Range<usize>,
        (pairs, len): (&Range<usize>, usize),
    ) -> Self {
        let (start, end) = (2 * pairs.start, len.min(2 * pairs.end));
        let mut words = vec![[0; 2]; rows.len() * pairs.len()];
        let strides = vectorised(
            #[inline(always)]
            || match strides {
                [of_row, 1] => {
                    for (row, out) in rows.clone().zip(words.chunks_exact_mut(pairs.len())) {
                        let from = &elements[row * of_row + start..row * of_row + end];
                        let out = out.as_flattened_mut().iter_mut();
                        out.zip(from).for_each(|(out, &x)| *out = bf16_bits(x));
                    }
                    [pairs.len(), 1]
                }
                [of_row, of_inner] => {
                    for (pair, out) in pairs.clone().zip(words.chunks_exact_mut(rows.len())) {
                        for (at, inner) in (2 * pair..len.min(2 * pair + 2)).enumerate() {
                            let from = &elements[inner * of_inner + rows.start * of_row..];
                            match of_row {
                                1 => {
                                    let from = &from[..rows.len()];
                                    out.iter_mut().zip(from).for_each(|(out, &x)| out[at] = bf16_bits(x));
                                }
                                _ => {
                                    let words = out.iter_mut().enumerate();
                                    words.for_each(|(row, out)| out[at] = bf16_bits(from[row * of_row]));
                                }
                            }
                        }
                    }
                    [1, rows.len()]
                }
            },
        );
        Self { words, strides }
    }
}

/// The bits of the nearest number of bf16.
#[inline(always)]
pub(super) fn bf16_bits<T: Real>(x: T) -> u16 {
    narrow_bf16(x.to_f64() as f32).to_bits()
}
