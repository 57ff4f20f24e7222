//! Products of bf16 matrices by the instruction that multiplies pairs and adds them to a sum in f32.
//!
//! Both operands are packed first: two numbers that meet the same pair are a word of 32 bits, and the words of the lines
//! that one tile of the result uses lie side by side. The sums of a tile stay in registers from the first pair to the
//! last. So the bits of an element depend on its row and its column only.
use candle_core::Result;
use half::bf16;
use half::slice::HalfFloatSliceExt;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::columns::{NewColumns, by_columns};
use super::matrix::{LeftOperand, Matrix};
use crate::element::Element;
use crate::parallel;
use crate::rows::new_by_blocks;

/// The instruction.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pairs(());

/// The rows of a tile of the result.
const ROWS: usize = 12;

/// The columns of a tile of the result: two vectors.
const COLUMNS: usize = 32;

/// The lanes of a vector.
const LANES: usize = 16;

/// The words of rows that stay in a core's L2 cache while all columns pass.
const ROWS_AT_ONCE: usize = 64 * 1024;

/// The elements of a panel of columns that is packed at once. It stays in the L2 cache too.
const PANEL: usize = 128 * 1024;

/// The most columns of a panel.
const MOST: usize = 2048;

impl Pairs {
    /// The instruction, if the processor has it.
    pub(super) fn new() -> Option<Self> {
        (is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512bf16"))
        .then_some(Self(()))
    }

    /// Returns the product of matrices that are not empty. `most` bounds the columns of a panel.
    pub(super) fn product<O: Element<Real = f32>>(
        self,
        a: Matrix<'_, bf16>,
        b: Matrix<'_, bf16>,
        most: Option<usize>,
    ) -> Result<Vec<O>> {
        let (lines, [m, k]) = (b.turned(), a.dims);
        let [n, inner] = lines.dims;
        if k != inner {
            candle_core::bail!("product: [{m}, {k}] does not fit [{inner}, {n}]");
        }
        let is_shared = m * n * k >= parallel::PRODUCT;
        let threads = if is_shared { parallel::threads() } else { 1 };
        let share = n.div_ceil(threads).next_multiple_of(COLUMNS);
        let panel = (PANEL / k).clamp(COLUMNS, MOST).min(share);
        let panel = most.unwrap_or(panel / COLUMNS * COLUMNS);
        let rows = self.pack::<ROWS>(a, 0, m);
        let widths: Vec<usize> = (0..n).step_by(panel).map(|start| panel.min(n - start)).collect();
        by_columns(m, &widths, is_shared, |number, out| {
            let columns = parallel::alone(|| self.pack::<COLUMNS>(lines, number * panel, widths[number]));
            // SAFETY: a `Pairs` exists only where `new` found the instructions. Tiles are all rows of these columns.
            unsafe {
                multiply_panel([m, widths[number], k], &rows, &columns, out);
                out.set_written();
            }
            Ok(())
        })
    }

    /// Packs `count` rows from `start` on in groups of `R`: for each pair of columns the words of the `R` rows.
    fn pack<const R: usize>(self, from: Matrix<'_, bf16>, start: usize, count: usize) -> Vec<u32> {
        let words = R * from.dims[1].div_ceil(2);
        let (out, _) = new_by_blocks(
            count.div_ceil(R) * words,
            words,
            words,
            #[inline(always)]
            |first, out| {
                for (i, out) in out.chunks_exact_mut(words).enumerate() {
                    let before = (first + i) * R;
                    // SAFETY: a `Pairs` exists only where `new` found the instructions.
                    unsafe { pack_group::<R>(from, start + before, R.min(count - before), out) };
                }
            },
        );
        out
    }
}

/// Packs `lines` rows, at most `R`, from row `start` on. `out` holds zeros.
#[target_feature(enable = "avx512f,avx512bw")]
fn pack_group<const R: usize>(from: Matrix<'_, bf16>, start: usize, lines: usize, out: &mut [u32]) {
    let ([_, len], [of_row, of_column]) = (from.dims, from.strides);
    let bits = &from.elements.reinterpret_cast()[start * of_row..];
    match [of_row, of_column] {
        [_, 1] => pack_rows::<R>(bits, [lines, len], of_row, out),
        [1, _] => pack_columns::<R>(bits, [lines, len], of_column, out),
        _ => pack_any::<R>(bits, [lines, len], from.strides, out),
    }
}

/// Packs rows that are contiguous, sixteen words of sixteen rows at a time.
#[target_feature(enable = "avx512f,avx512bw")]
fn pack_rows<const R: usize>(bits: &[u16], [rows, len]: [usize; 2], of_row: usize, out: &mut [u32]) {
    for first in (0..R).step_by(LANES) {
        let width = LANES.min(R - first);
        let lanes = ((1u32 << width) - 1) as u16;
        for (block, out) in out.chunks_mut(LANES * R).enumerate() {
            let start = block * 2 * LANES;
            let count = (2 * LANES).min(len - start);
            let mut words = [_mm512_setzero_si512(); LANES];
            for (i, words) in words.iter_mut().enumerate().take(rows.saturating_sub(first)) {
                let numbers = &bits[(first + i) * of_row + start..][..count];
                // SAFETY: the mask has one bit for each of the numbers, and others are not read.
                *words = unsafe {
                    _mm512_maskz_loadu_epi16(u32::MAX >> (2 * LANES - count), numbers.as_ptr().cast())
                };
            }
            for (out, words) in out.chunks_exact_mut(R).zip(turn(words)) {
                let out = &mut out[first..first + width];
                // SAFETY: the mask has one bit for each word of `out`, and others are not written.
                unsafe { _mm512_mask_storeu_epi32(out.as_mut_ptr().cast(), lanes, words) };
            }
        }
    }
}

/// Packs rows of a matrix whose columns are contiguous.
#[target_feature(enable = "avx512f,avx512bw")]
fn pack_columns<const R: usize>(bits: &[u16], [rows, len]: [usize; 2], of_column: usize, out: &mut [u32]) {
    let column = |i: usize| &bits[i * of_column..][..rows];
    let zeros = [0; R];
    for (pair, out) in out.chunks_exact_mut(R).enumerate() {
        let first = column(2 * pair);
        let second = if 2 * pair + 1 < len { column(2 * pair + 1) } else { &zeros[..rows] };
        let word = |first: u16, second: u16| u32::from(first) | u32::from(second) << 16;
        if let (Some(first), Some(second)) = (first.first_chunk::<R>(), second.first_chunk::<R>())
            && let Some(out) = out.first_chunk_mut::<R>()
        {
            *out = std::array::from_fn(|i| word(first[i], second[i]));
            continue;
        }
        for ((out, &first), &second) in out.iter_mut().zip(first).zip(second) {
            *out = word(first, second);
        }
    }
}

fn pack_any<const R: usize>(
    bits: &[u16],
    [rows, len]: [usize; 2],
    [of_row, of_column]: [usize; 2],
    out: &mut [u32],
) {
    let at =
        |row: usize, column: usize| if column < len { bits[row * of_row + column * of_column] } else { 0 };
    for (pair, out) in out.chunks_exact_mut(R).enumerate() {
        for (row, out) in out[..rows].iter_mut().enumerate() {
            *out = u32::from(at(row, 2 * pair)) | u32::from(at(row, 2 * pair + 1)) << 16;
        }
    }
}

/// Transposes sixteen rows of sixteen words.
#[inline]
#[target_feature(enable = "avx512f")]
fn turn(rows: [__m512i; LANES]) -> [__m512i; LANES] {
    let zeros = [_mm512_setzero_si512(); LANES];
    let (mut twos, mut fours, mut turned) = (zeros, zeros, zeros);
    for i in 0..8 {
        twos[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        twos[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    for i in 0..4 {
        fours[4 * i] = _mm512_unpacklo_epi64(twos[4 * i], twos[4 * i + 2]);
        fours[4 * i + 1] = _mm512_unpackhi_epi64(twos[4 * i], twos[4 * i + 2]);
        fours[4 * i + 2] = _mm512_unpacklo_epi64(twos[4 * i + 1], twos[4 * i + 3]);
        fours[4 * i + 3] = _mm512_unpackhi_epi64(twos[4 * i + 1], twos[4 * i + 3]);
    }
    // Quarter `q` of `fours[4 * i + c]` is column `4 * q + c` of the rows from `4 * i` on.
    for c in 0..4 {
        const EVEN: i32 = 0x88;
        const ODD: i32 = 0xdd;
        let [even, odd] = [
            _mm512_shuffle_i32x4::<EVEN>(fours[c], fours[4 + c]),
            _mm512_shuffle_i32x4::<ODD>(fours[c], fours[4 + c]),
        ];
        let [even_below, odd_below] = [
            _mm512_shuffle_i32x4::<EVEN>(fours[8 + c], fours[12 + c]),
            _mm512_shuffle_i32x4::<ODD>(fours[8 + c], fours[12 + c]),
        ];
        turned[c] = _mm512_shuffle_i32x4::<EVEN>(even, even_below);
        turned[4 + c] = _mm512_shuffle_i32x4::<EVEN>(odd, odd_below);
        turned[8 + c] = _mm512_shuffle_i32x4::<ODD>(even, even_below);
        turned[12 + c] = _mm512_shuffle_i32x4::<ODD>(odd, odd_below);
    }
    turned
}

/// Multiplies packed rows with packed columns.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn multiply_panel<O: Element<Real = f32>>(
    [m, n, k]: [usize; 3],
    rows: &[u32],
    columns: &[u32],
    out: &mut NewColumns<'_, O>,
) {
    let pairs = k.div_ceil(2);
    let (of_rows, of_columns) = (ROWS * pairs, COLUMNS * pairs);
    let at_once = (ROWS_AT_ONCE / of_rows).max(1);
    for (block, rows) in rows.chunks(at_once * of_rows).enumerate() {
        for (j, columns) in columns.chunks_exact(of_columns).enumerate() {
            for (i, rows) in rows.chunks_exact(of_rows).enumerate() {
                let at = [(block * at_once + i) * ROWS, j * COLUMNS];
                let size = [ROWS.min(m - at[0]), COLUMNS.min(n - at[1])];
                match size[0] {
                    1 => multiply_tile::<1, O>(rows, columns, (at, size), out),
                    2 => multiply_tile::<2, O>(rows, columns, (at, size), out),
                    3 | 4 => multiply_tile::<4, O>(rows, columns, (at, size), out),
                    5..=8 => multiply_tile::<8, O>(rows, columns, (at, size), out),
                    _ => multiply_tile::<ROWS, O>(rows, columns, (at, size), out),
                }
            }
        }
    }
}

impl Pairs {
    /// Computes `count` rows, of which there are at most 12, of a panel of columns; they are added to `out` if it says so. `left` begins with
    /// the first row and pair, and `out` with the first row, of `width` elements, of which the panel has `held`.
    pub(super) fn tile(
        self,
        count: usize,
        left: LeftOperand<'_, [u16; 2]>,
        panel: &[[u16; 2]],
        out: (&mut [f32], [usize; 2]),
        adds: bool,
    ) {
        // SAFETY: a `Pairs` exists only where `new` found the instructions.
        unsafe {
            match count {
                12 => panel_tile::<12>(left, panel, out, adds),
                6 => panel_tile::<6>(left, panel, out, adds),
                3 => panel_tile::<3>(left, panel, out, adds),
                2 => panel_tile::<2>(left, panel, out, adds),
                _ => panel_tile::<1>(left, panel, out, adds),
            }
        }
    }
}

/// Computes `R` rows of a panel of columns, whose sums stay in registers.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn panel_tile<const R: usize>(
    LeftOperand { elements, strides: [of_row, of_pair] }: LeftOperand<'_, [u16; 2]>,
    panel: &[[u16; 2]],
    (out, [held, width]): (&mut [f32], [usize; 2]),
    adds: bool,
) {
    let masks = [held.min(LANES), held.saturating_sub(LANES)].map(|lanes| ((1u32 << lanes) - 1) as u16);
    let mut sums = [[_mm512_setzero_ps(); 2]; R];
    if adds {
        for (i, sums) in sums.iter_mut().enumerate() {
            let row = &out[i * width..][..held];
            // SAFETY: the masks have a bit for each of the `held` elements, and others are not read.
            *sums = unsafe {
                [
                    _mm512_maskz_loadu_ps(masks[0], row.as_ptr()),
                    _mm512_maskz_loadu_ps(masks[1], row.as_ptr().wrapping_add(LANES)),
                ]
            };
        }
    }
    let (panel, _) = panel.as_chunks::<COLUMNS>();
    assert!((R - 1) * of_row + (panel.len().max(1) - 1) * of_pair < elements.len());
    for (k, columns) in panel.iter().enumerate() {
        let (left, right) = columns.split_at(LANES);
        // SAFETY: both halves are a vector of words. A vector of words and one of pairs are the same bits.
        let [left, right]: [__m512bh; 2] = unsafe {
            std::mem::transmute([
                _mm512_loadu_epi32(left.as_ptr().cast()),
                _mm512_loadu_epi32(right.as_ptr().cast()),
            ])
        };
        for (i, sums) in sums.iter_mut().enumerate() {
            // SAFETY: `i` is below `R` and `k` below the length of `panel`, so the assertion above bounds the index.
            let [a, b] = unsafe { *elements.get_unchecked(i * of_row + k * of_pair) };
            let word = u32::from(a) | u32::from(b) << 16;
            // SAFETY: as above.
            let row: __m512bh = unsafe { std::mem::transmute(_mm512_set1_epi32(word.cast_signed())) };
            sums[0] = _mm512_dpbf16_ps(sums[0], row, left);
            sums[1] = _mm512_dpbf16_ps(sums[1], row, right);
        }
    }
    for (i, sums) in sums.iter().enumerate() {
        let row = &mut out[i * width..][..held];
        // SAFETY: as for the loads, and others are not written.
        unsafe {
            _mm512_mask_storeu_ps(row.as_mut_ptr(), masks[0], sums[0]);
            _mm512_mask_storeu_ps(row.as_mut_ptr().wrapping_add(LANES), masks[1], sums[1]);
        }
    }
}

/// Computes a tile of the result, which begins at a row and a column. It multiplies `R` rows, and keeps `size` of them.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn multiply_tile<const R: usize, O: Element<Real = f32>>(
    rows: &[u32],
    columns: &[u32],
    ([row, column], size): ([usize; 2], [usize; 2]),
    out: &mut NewColumns<'_, O>,
) {
    let mut sums = [[_mm512_setzero_ps(); 2]; R];
    let ((rows, _), (columns, _)) = (rows.as_chunks::<ROWS>(), columns.as_chunks::<COLUMNS>());
    for (rows, columns) in rows.iter().zip(columns) {
        let (left, right) = columns.split_at(LANES);
        // SAFETY: both halves are a vector of words. A vector of words and one of pairs are the same bits.
        let [left, right]: [__m512bh; 2] = unsafe {
            std::mem::transmute([
                _mm512_loadu_epi32(left.as_ptr().cast()),
                _mm512_loadu_epi32(right.as_ptr().cast()),
            ])
        };
        for (sums, &row) in sums.iter_mut().zip(rows) {
            // SAFETY: as above.
            let row: __m512bh = unsafe { std::mem::transmute(_mm512_set1_epi32(row.cast_signed())) };
            sums[0] = _mm512_dpbf16_ps(sums[0], row, left);
            sums[1] = _mm512_dpbf16_ps(sums[1], row, right);
        }
    }
    for (i, sums) in sums.iter().enumerate().take(size[0]) {
        // SAFETY: two vectors of 16 floats are 32 floats.
        let sums: [f32; COLUMNS] = unsafe { std::mem::transmute(*sums) };
        let out = out.row(row + i, column..column + size[1]);
        match <&mut [MaybeUninit<O>; COLUMNS]>::try_from(&mut *out) {
            Ok(out) => (0..COLUMNS).for_each(|j| _ = out[j].write(O::store(sums[j]))),
            Err(_) => out.iter_mut().zip(sums).for_each(|(out, sum)| _ = out.write(O::store(sum))),
        }
    }
}
