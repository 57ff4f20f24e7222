//! Products of up to a few hundred rows with a weight. Each element of the weight is used once for each row.
//!
//! gemm brings both operands into the order of its registers. For 128 rows that takes almost as long for the weight as the
//! product. Here the rows are packed, which are fewer, and some rows of the weight at a time are copied as they are: next to each
//! other they stay in the L1 cache, where rows that lie a power of two apart would push each other out.
//!
//! Each element of the result is one sum in the order of the inner dim, whatever the other rows are.
use std::ops::Range;

use candle_core::{Result, bail};

use super::columns::by_columns;
use super::matrix::{LeftOperand, Matrix};
use super::operands::{ProductRows, RightOperand};
use crate::parallel;
use crate::real::Real;

/// The most rows: with more, the packing of the weight is a small part of the product.
const MOST: usize = 320;

/// The most rows if the rows of the weight push each other out of the cache, which makes gemm's packing slow.
const MOST_ALIGNED: usize = 768;

/// Rows that lie a multiple of these bytes apart push each other out.
const ALIGNED: usize = 2048;

/// The rows of the weight that are copied at once: some tiles.
const AT_ONCE: usize = 48;

/// The numbers of a row that are copied at once.
const INNER: usize = 256;

/// From one copied row to the next: a cache line more than a power of two.
const STRIDE: usize = INNER + 16;

/// The most rows of `x` that are multiplied at once: with `INNER` numbers of each, half of an L2 cache of 1 MiB.
const ROWS: usize = 512;

/// Says whether this is the faster product of `rows` rows with a weight whose rows are `stride` elements apart.
pub(super) fn is_faster<T>(rows: usize, stride: usize) -> bool {
    rows <= if (stride * size_of::<T>()).is_multiple_of(ALIGNED) { MOST_ALIGNED } else { MOST }
}

/// Returns the product of `x [m, k]` and the transpose of `weight [n, k]`, whose rows are contiguous. Neither is empty.
pub(super) fn product<T: Real>(x: Matrix<'_, T>, weight: Matrix<'_, T>) -> Result<Vec<T>> {
    let ([m, k], [n, inner]) = (x.dims, weight.dims);
    if k != inner || weight.strides[1] != 1 {
        bail!("product: [{m}, {k}] by [{n}, {inner}] with strides {:?}", weight.strides);
    }
    let at_once = m.div_ceil(m.div_ceil(ROWS)).next_multiple_of(32);
    let chunks: Vec<_> = (0..m).step_by(at_once).map(|start| start..m.min(start + at_once)).collect();
    let starts: Vec<usize> = (0..k).step_by(INNER).collect();
    let is_shared = m * n * k >= parallel::PRODUCT;
    let pack = |_, (rows, start): (&Range<usize>, usize)| {
        let mut part = RightOperand::new();
        part.pack(
            &x.elements[rows.start * x.strides[0] + start * x.strides[1]..],
            [INNER.min(k - start), rows.len()],
            [x.strides[1], x.strides[0]],
        );
        part
    };
    let of_chunks = chunks.iter().flat_map(|rows| starts.iter().map(move |&start| (rows, start)));
    let parts = parallel::map(is_shared, of_chunks, pack);
    let widths: Vec<usize> = (0..n).step_by(AT_ONCE).map(|first| AT_ONCE.min(n - first)).collect();
    by_columns(m, &widths, is_shared, |number, out| {
        let (first, rows) = (number * AT_ONCE, widths[number]);
        // Not a power of two: a row of the result takes an element of each row.
        let width = at_once + 16;
        let (mut held, mut made) = (vec![T::zero(); AT_ONCE * STRIDE], vec![T::zero(); rows * width]);
        for (chunk, parts) in chunks.iter().zip(parts.chunks_exact(starts.len())) {
            for (&start, right) in starts.iter().zip(parts) {
                let len = INNER.min(k - start);
                for (row, held) in held.chunks_exact_mut(STRIDE).enumerate().take(rows) {
                    let from = &weight.elements[(first + row) * weight.strides[0] + start..][..len];
                    held[..len].copy_from_slice(from);
                }
                ProductRows {
                    left: LeftOperand { elements: &held, strides: [STRIDE, 1] },
                    right,
                    rows: 0..rows,
                    needed: &|_| [0..len, 0..chunk.len()],
                    width,
                    adds: start > 0,
                }
                .write(&mut made);
            }
            for (at, row) in chunk.clone().enumerate() {
                let columns = made[at..].iter().step_by(width);
                out.row(row, 0..rows).iter_mut().zip(columns).for_each(|(out, &x)| _ = out.write(x));
            }
        }
        // SAFETY: these are all of its rows and columns.
        unsafe { out.set_written() };
        Ok(())
    })
}
