//! Products of up to a few hundred rows with a weight. Each element of the weight is used once for each row.
//!
//! gemm brings both operands into the order of its registers. For 128 rows that takes almost as long for the weight as the
//! product. Here the rows are packed, which are fewer, and some rows of the weight at a time are copied as they are: next to each
//! other they stay in the L1 cache, where rows that lie a power of two apart would push each other out.
//!
//! Each element of the result is one sum in the order of the inner dim, whatever the other rows are.
use candle_core::{Result, bail};

use super::columns::by_columns;
use super::matrix::{LeftOperand, Matrix};
use super::operands::{ProductRows, RightOperand};
use crate::parallel;
use crate::real::Real;

/// The most rows: with more, the packing of the weight is a small part of the product.
pub(super) const MOST: usize = 320;

/// The rows of the weight that are copied at once: some tiles.
const AT_ONCE: usize = 48;

/// The numbers of a row that are copied at once.
const INNER: usize = 256;

/// From one copied row to the next: a cache line more than a power of two.
const STRIDE: usize = INNER + 16;

/// Returns the product of `x [m, k]` and the transpose of `weight [n, k]`, whose rows are contiguous. Neither is empty.
pub(super) fn product<T: Real>(x: Matrix<'_, T>, weight: Matrix<'_, T>) -> Result<Vec<T>> {
    let ([m, k], [n, inner]) = (x.dims, weight.dims);
    if k != inner || weight.strides[1] != 1 {
        bail!("product: [{m}, {k}] by [{n}, {inner}] with strides {:?}", weight.strides);
    }
    let starts: Vec<usize> = (0..k).step_by(INNER).collect();
    let is_shared = m * n * k >= parallel::PRODUCT;
    let pack = |_, &start: &usize| {
        let mut part = RightOperand::new();
        part.pack(
            &x.elements[start * x.strides[1]..],
            [INNER.min(k - start), m],
            [x.strides[1], x.strides[0]],
        );
        part
    };
    let parts = parallel::map(is_shared, starts.iter(), pack);
    let widths: Vec<usize> = (0..n).step_by(AT_ONCE).map(|first| AT_ONCE.min(n - first)).collect();
    by_columns(m, &widths, is_shared, |number, out| {
        let (first, rows) = (number * AT_ONCE, widths[number]);
        let (mut held, mut made) = (vec![T::zero(); AT_ONCE * STRIDE], vec![T::zero(); rows * m]);
        for (&start, right) in starts.iter().zip(&parts) {
            let len = INNER.min(k - start);
            for (row, held) in held.chunks_exact_mut(STRIDE).enumerate().take(rows) {
                let from = &weight.elements[(first + row) * weight.strides[0] + start..][..len];
                held[..len].copy_from_slice(from);
            }
            ProductRows {
                left: LeftOperand { elements: &held, strides: [STRIDE, 1] },
                right,
                rows: 0..rows,
                needed: &|_| [0..len, 0..m],
                width: m,
                adds: start > 0,
            }
            .write(&mut made);
        }
        for row in 0..m {
            let columns = made[row..].iter().step_by(m);
            out.row(row, 0..rows).iter_mut().zip(columns).for_each(|(out, &x)| _ = out.write(x));
        }
        // SAFETY: these are all of its rows and columns.
        unsafe { out.set_written() };
        Ok(())
    })
}
