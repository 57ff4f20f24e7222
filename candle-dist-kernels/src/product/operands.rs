//! Products of an operand that lies in memory with one that is packed for the registers.
//!
//! Each element of a result is one sum in the order of the inner dim, which begins with what the result holds if it is
//! added to. So its bits depend on its row and its column only, and not on how the rows are cut.
use candle_core::DType;
use half::bf16;
use pulp::{Arch, Simd, WithSimd};
use std::ops::Range;

use super::matrix::LeftOperand;
use super::pair_operand::{PairOperand, bf16_bits};
use crate::{real::Real, rows::vectorised};

/// The vectors of a panel: the columns of the result that one pass over the inner dim computes.
const VECTORS: usize = 2;

/// The most columns of a panel.
const MOST_COLUMNS: usize = 32;

/// The bytes of a cache line.
const LINE: usize = 64;

/// The right operand of products: panels of columns, each contiguous, row by row. Missing columns of the last panel are zeros.
#[derive(Debug)]
pub(crate) struct RightOperand<T> {
    memory: Vec<T>,
    /// Where the panels begin: at the start of a cache line.
    start: usize,
    rows: usize,
    columns: usize,
    panel: usize,
    /// In place of all others: pairs of bf16.
    pairs: Option<PairOperand>,
}

impl<T: Real> RightOperand<T> {
    /// An operand without elements.
    pub(crate) fn new() -> Self {
        Self { memory: Vec::new(), start: 0, rows: 0, columns: 0, panel: panel_columns::<T>(), pairs: None }
    }

    /// An operand without elements that multiplies pairs of bf16, if the processor can: then both operands are rounded to bf16.
    pub(crate) fn of_bf16() -> Self {
        Self { pairs: PairOperand::new().filter(|_| T::DTYPE == DType::F32), ..Self::new() }
    }

    /// Packs a matrix of bf16 like [`pack`](Self::pack).
    pub(crate) fn pack_bf16(&mut self, from: &[bf16], dims: [usize; 2], strides: [usize; 2]) {
        match &mut self.pairs {
            Some(pairs) => vectorised(
                #[inline(always)]
                || pairs.pack(from, dims, strides, bf16::to_bits),
            ),
            None => {
                let last: usize =
                    dims.iter().zip(strides).map(|(dim, stride)| dim.saturating_sub(1) * stride).sum();
                let wide = from.iter().take(last + 1).map(|x| T::from_f64(x.to_f64()));
                self.pack(&wide.collect::<Vec<T>>(), dims, strides);
            }
        }
    }

    /// Packs a matrix `[rows, columns]` with these strides over what was packed before.
    pub(crate) fn pack(&mut self, from: &[T], [rows, columns]: [usize; 2], strides: [usize; 2]) {
        if let Some(pairs) = &mut self.pairs {
            return vectorised(
                #[inline(always)]
                || pairs.pack(from, [rows, columns], strides, bf16_bits),
            );
        }
        (self.rows, self.columns) = (rows, columns);
        let len = rows * columns.next_multiple_of(self.panel);
        let slack = LINE / size_of::<T>();
        if self.memory.len() < len + slack {
            self.memory = vec![T::zero(); len + slack];
            self.start = self.memory.as_ptr().align_offset(LINE).min(slack);
        }
        let panels = self.memory[self.start..][..len].chunks_exact_mut((rows * self.panel).max(1));
        for (i, out) in panels.enumerate() {
            let first = i * self.panel;
            let from = &from[(first * strides[1]).min(from.len())..];
            let held = self.panel.min(columns - first);
            match strides {
                [of_row, 1] => {
                    for (row, out) in out.chunks_exact_mut(self.panel).enumerate() {
                        let (out, rest) = out.split_at_mut(held);
                        out.copy_from_slice(&from[row * of_row..][..held]);
                        rest.fill(T::zero());
                    }
                }
                [1, of_column] => turn(from, [rows, held], of_column, out, self.panel),
                [of_row, of_column] => {
                    for (row, out) in out.chunks_exact_mut(self.panel).enumerate() {
                        for (column, out) in out.iter_mut().enumerate() {
                            *out = match column < held {
                                true => from[row * of_row + column * of_column],
                                false => T::zero(),
                            };
                        }
                    }
                }
            }
        }
    }

    /// The rows of a panel.
    fn panel(&self, index: usize, rows: &Range<usize>) -> &[T] {
        let first = self.start + index * self.rows * self.panel;
        &self.memory[first + rows.start * self.panel..first + rows.end * self.panel]
    }
}

/// Packs columns that are contiguous, a few rows at a time.
fn turn<T: Real>(from: &[T], [rows, columns]: [usize; 2], of_column: usize, out: &mut [T], panel: usize) {
    const AT_ONCE: usize = 8;
    if columns < panel {
        out.fill(T::zero());
    }
    let whole = rows / AT_ONCE * AT_ONCE;
    for (block, out) in out[..whole * panel].chunks_exact_mut(AT_ONCE * panel).enumerate() {
        for column in 0..columns {
            let from = &from[column * of_column + block * AT_ONCE..][..AT_ONCE];
            for (row, &x) in from.iter().enumerate() {
                out[row * panel + column] = x;
            }
        }
    }
    for row in whole..rows {
        for column in 0..columns {
            out[row * panel + column] = from[column * of_column + row];
        }
    }
}

/// The columns of a panel on this processor.
fn panel_columns<T: Real>() -> usize {
    struct Columns<T>(std::marker::PhantomData<T>);

    impl<T: Real> WithSimd for Columns<T> {
        type Output = usize;

        fn with_simd<S: Simd>(self, _: S) -> usize {
            VECTORS * T::lanes::<S>()
        }
    }

    Arch::new().dispatch(Columns::<T>(std::marker::PhantomData))
}

/// A product of some rows with a right operand.
pub(crate) struct ProductRows<'a, T> {
    pub(crate) left: LeftOperand<'a, T>,
    pub(crate) right: &'a RightOperand<T>,
    /// The rows of the left operand and of the result.
    pub(crate) rows: Range<usize>,
    /// The part of the inner dim that some rows need, and the columns of the result that they need. Whole panels of
    /// columns are written.
    pub(crate) needed: &'a dyn Fn(Range<usize>) -> [Range<usize>; 2],
    /// The elements of a row of the result.
    pub(crate) width: usize,
    /// Whether the products are added to the result, or replace it.
    pub(crate) adds: bool,
}

impl<T: Real> ProductRows<'_, T> {
    /// Computes the product.
    pub(crate) fn write(self, out: &mut [T]) {
        if let Some(pairs) = &self.right.pairs {
            let Self { left, rows, needed, width, adds, .. } = self;
            if let Some(out) = T::as_f32_mut(out) {
                pairs.multiply(left, rows, needed, width, adds, out);
            }
            return;
        }
        Arch::new().dispatch(ProductCall { product: self, out });
    }
}

struct ProductCall<'a, 'b, T> {
    product: ProductRows<'a, T>,
    out: &'b mut [T],
}

impl<T: Real> WithSimd for ProductCall<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { product, out } = self;
        let mut first = product.rows.start;
        while first < product.rows.end {
            let rest = product.rows.end - first;
            // A tile needs registers for its sums, for a vector of each column, and for one element of a row.
            first += match rest {
                12.. if S::REGISTER_COUNT >= 12 * VECTORS + 3 => product.tiles::<S, 12>(simd, first, out),
                6.. if S::REGISTER_COUNT >= 6 * VECTORS + 3 => product.tiles::<S, 6>(simd, first, out),
                4.. => product.tiles::<S, 4>(simd, first, out),
                2.. => product.tiles::<S, 2>(simd, first, out),
                _ => product.tiles::<S, 1>(simd, first, out),
            };
        }
    }
}

impl<T: Real> ProductRows<'_, T> {
    /// Computes `R` rows from `first` on, and returns `R`.
    #[inline(always)]
    fn tiles<S: Simd, const R: usize>(&self, simd: S, first: usize, out: &mut [T]) -> usize {
        let [inner, columns] = (self.needed)(first..first + R);
        let LeftOperand { elements, strides } = self.left;
        if columns.is_empty() || inner.is_empty() {
            return R;
        }
        let left = &elements[first * strides[0] + inner.start * strides[1]..];
        let panel = self.right.panel;
        for index in columns.start / panel..columns.end.div_ceil(panel) {
            let right = T::vectors::<S>(self.right.panel(index, &inner));
            let out = &mut out[first * self.width + index * panel..];
            let held = panel.min(self.right.columns - index * panel);
            match strides {
                [1, of_inner] => self.tile::<S, R>(simd, (left, [1, of_inner]), right, out, held),
                _ => self.tile::<S, R>(simd, (left, strides), right, out, held),
            }
        }
        R
    }

    /// Computes a tile of the result, whose sums stay in registers.
    #[inline(always)]
    fn tile<S: Simd, const R: usize>(
        &self,
        simd: S,
        (left, [of_row, of_inner]): (&[T], [usize; 2]),
        right: &[T::Vector<S>],
        out: &mut [T],
        held: usize,
    ) {
        let zero = T::splat(simd, T::zero());
        let mut sums = [[zero; VECTORS]; R];
        let mut edge = [T::zero(); MOST_COLUMNS];
        let is_whole = held == VECTORS * T::lanes::<S>();
        if self.adds {
            for (i, sums) in sums.iter_mut().enumerate() {
                let row = &out[i * self.width..][..held];
                let vectors = if is_whole {
                    T::vectors::<S>(row)
                } else {
                    edge[..held].copy_from_slice(row);
                    T::vectors::<S>(&edge)
                };
                sums.copy_from_slice(&vectors[..VECTORS]);
            }
        }
        let (right, _) = right.as_chunks::<VECTORS>();
        assert!((R - 1) * of_row + (right.len().max(1) - 1) * of_inner < left.len());
        for (k, columns) in right.iter().enumerate() {
            for (i, sums) in sums.iter_mut().enumerate() {
                // SAFETY: `i` is below `R` and `k` below the length of `right`, so the assertion above bounds the index.
                let x = unsafe { *left.get_unchecked(i * of_row + k * of_inner) };
                let x = T::splat(simd, x);
                for (sum, &column) in sums.iter_mut().zip(columns) {
                    *sum = T::mul_add(simd, x, column, *sum);
                }
            }
        }
        for (i, sums) in sums.iter().enumerate() {
            let row = &mut out[i * self.width..][..held];
            if is_whole {
                T::vectors_mut::<S>(row).copy_from_slice(sums);
            } else {
                T::vectors_mut::<S>(&mut edge)[..VECTORS].copy_from_slice(sums);
                row.copy_from_slice(&edge[..held]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers whose products and sums are exact.
    fn numbers(len: usize) -> Vec<f32> {
        (0..len).map(|i| (i * 37 % 23) as f32 - 11.0).collect()
    }

    #[test]
    fn products_are_those_of_plain_loops_for_all_strides_and_edges() {
        for (m, k, n) in [(1, 1, 1), (3, 5, 2), (12, 8, 32), (13, 9, 33), (31, 17, 80), (26, 64, 64)] {
            let (a, b) = (numbers(2 * m * k + 7), numbers(2 * k * n + 5));
            // Rows and columns of expanded tensors are the same.
            for (left, right) in [
                ([k, 1], [n, 1]),
                ([1, m], [1, k]),
                ([k, 1], [1, k]),
                ([1, m], [n, 1]),
                ([k, 1], [0, 1]),
                ([k, 1], [1, 0]),
                ([k, 1], [0, 0]),
                ([2 * k, 2], [2, 2 * k]),
            ] {
                // Small whole numbers are numbers of bf16 too.
                for (mut packed, is_packed_from_bf16) in [
                    (RightOperand::new(), false),
                    (RightOperand::of_bf16(), false),
                    (RightOperand::of_bf16(), true),
                ] {
                    packed.pack(&numbers(90 * 90), [90, 90], [90, 1]);
                    match is_packed_from_bf16 {
                        false => packed.pack(&b, [k, n], right),
                        true => {
                            let b: Vec<_> = b.iter().map(|&x| bf16::from_f32(x)).collect();
                            packed.pack_bf16(&b, [k, n], right);
                        }
                    }
                    for adds in [false, true] {
                        let mut out = numbers(m * n);
                        let want: Vec<f32> = (0..m * n)
                            .map(|at| {
                                let (i, j) = (at / n, at % n);
                                let product =
                                    |l: usize| a[i * left[0] + l * left[1]] * b[l * right[0] + j * right[1]];
                                (0..k).map(product).sum::<f32>() + if adds { out[at] } else { 0.0 }
                            })
                            .collect();
                        ProductRows {
                            left: LeftOperand { elements: &a, strides: left },
                            right: &packed,
                            rows: 0..m,
                            needed: &|_| [0..k, 0..n],
                            width: n,
                            adds,
                        }
                        .write(&mut out);
                        assert_eq!(out, want, "[{m}, {k}, {n}], strides {left:?} and {right:?}, adds {adds}");
                    }
                }
            }
        }
    }

    #[test]
    fn rows_need_only_their_parts() {
        let (a, b) = (numbers(20 * 10), numbers(10 * 70));
        // Pairs are of whole words, whose other number has a weight of zero in attention.
        for (mut packed, inner) in [(RightOperand::new(), 3..7), (RightOperand::of_bf16(), 4..8)] {
            packed.pack(&b, [10, 70], [70, 1]);
            let mut out = vec![0.5; 20 * 70];
            ProductRows {
                left: LeftOperand { elements: &a, strides: [10, 1] },
                right: &packed,
                rows: 3..5,
                needed: &|rows| {
                    assert_eq!(rows, 3..5);
                    [inner.clone(), 66..70]
                },
                width: 70,
                adds: false,
            }
            .write(&mut out);
            for (at, &x) in out.iter().enumerate() {
                let (i, j) = (at / 70, at % 70);
                if !(3..5).contains(&i) || j < 64 {
                    assert!(x == 0.5 || (3..5).contains(&i), "[{i}, {j}]");
                } else {
                    let want = inner.clone().map(|l| a[i * 10 + l] * b[l * 70 + j]).sum::<f32>();
                    assert_eq!(x, want, "[{i}, {j}]");
                }
            }
        }
    }
}
