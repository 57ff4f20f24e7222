//! Matrices with any strides, and the product by the library that candle uses.
use candle_core::{Layout, Result, bail};
use gemm::{Parallelism, gemm};

use crate::real::Real;

/// A matrix that is not empty and has any strides.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a, T> {
    /// From the first element on.
    pub(super) elements: &'a [T],
    pub(super) dims: [usize; 2],
    pub(super) strides: [usize; 2],
}

impl<'a, T> Matrix<'a, T> {
    /// Returns an error if the last element is outside of the memory.
    pub(super) fn of(elements: &'a [T], layout: &Layout) -> Result<Self> {
        let (&[rows, columns], &[of_row, of_column]) = (layout.dims(), layout.stride()) else {
            bail!("product: {layout:?} is no matrix")
        };
        Self::new(
            elements.get(layout.start_offset()..).unwrap_or_default(),
            [rows, columns],
            [of_row, of_column],
        )
    }

    pub(crate) fn new(elements: &'a [T], dims: [usize; 2], strides: [usize; 2]) -> Result<Self> {
        let last: usize = dims.iter().zip(&strides).map(|(dim, stride)| (dim - 1) * stride).sum();
        if last >= elements.len() {
            bail!(
                "product: a matrix {dims:?} with strides {strides:?} lies outside of {} elements",
                elements.len()
            );
        }
        Ok(Self { elements, dims, strides })
    }

    /// The transposed matrix.
    pub(super) fn turned(self) -> Self {
        let Self { elements, dims: [rows, columns], strides: [of_row, of_column] } = self;
        Self { elements, dims: [columns, rows], strides: [of_column, of_row] }
    }
}

/// The left operand of products: the element of row `i` and column `k` is at `i · strides[0] + k · strides[1]`.
#[derive(Clone, Copy)]
pub(crate) struct LeftOperand<'a, T> {
    pub(crate) elements: &'a [T],
    pub(crate) strides: [usize; 2],
}

/// Returns the product of matrices that fit.
pub(super) fn multiply<T: Real>(
    a: Matrix<'_, T>,
    b: Matrix<'_, T>,
    parallelism: Parallelism,
) -> Result<Vec<T>> {
    let ([m, k], [inner, n]) = (a.dims, b.dims);
    if k != inner {
        bail!("product: [{m}, {k}] does not fit [{inner}, {n}]");
    }
    let mut out = Vec::with_capacity(m * n);
    // SAFETY: `out` has room for `m` rows of `n` elements, which no other slice overlaps, and all are written.
    unsafe {
        multiply_into((out.as_mut_ptr(), n), false, a, b, parallelism);
        out.set_len(m * n);
    }
    Ok(out)
}

/// Writes the product of `a [m, k]` and `b [k, n]` into rows that begin `stride` elements after each other, or adds it to them.
///
/// # Safety
/// The matrices fit. From `out` on there are `m` such rows of `n` elements, which nothing else uses. To be added to, they have been
/// written.
pub(super) unsafe fn multiply_into<T: Real>(
    (out, stride): (*mut T, usize),
    adds: bool,
    a: Matrix<'_, T>,
    b: Matrix<'_, T>,
    parallelism: Parallelism,
) {
    let ([m, k], [_, n]) = (a.dims, b.dims);
    let is_thin = m == 1 || n == 1 || k <= 2;
    if is_thin && !adds {
        // gemm adds to the result of vectors and of thin matrices.
        for row in 0..m {
            // SAFETY: the row has `n` elements here. Zeros are bits of zeros.
            unsafe { out.add(row * stride).write_bytes(0, n) };
        }
    }
    let [a_rows, a_columns] = a.strides.map(|stride| stride as isize);
    let [b_rows, b_columns] = b.strides.map(|stride| stride as isize);
    // SAFETY: `Matrix::new` has checked that all elements of `a` and `b` lie in their slices. gemm reads the result only if
    // it `adds`, except in the cases where it is filled above. It writes every element.
    unsafe {
        gemm(
            m,
            n,
            k,
            out,
            1,
            stride as isize,
            adds,
            a.elements.as_ptr(),
            a_columns,
            a_rows,
            b.elements.as_ptr(),
            b_columns,
            b_rows,
            T::one(),
            T::one(),
            false,
            false,
            false,
            parallelism,
        );
    }
}
