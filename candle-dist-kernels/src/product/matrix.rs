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
    let [a_rows, a_columns] = a.strides.map(|stride| stride as isize);
    let [b_rows, b_columns] = b.strides.map(|stride| stride as isize);
    let mut out = Vec::with_capacity(m * n);
    if m == 1 || n == 1 || k <= 2 {
        out.resize(m * n, T::zero()); // gemm adds to the result of vectors and of thin matrices
    }
    // SAFETY: `Matrix::new` has checked that all elements of `a` and `b` lie in their slices, and `out` has room for
    // `m * n` elements, which no other slice overlaps. gemm does not read the result, as `read_dst` is false, except in the
    // cases where it is filled above. It writes every element.
    unsafe {
        gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            n as isize,
            false,
            a.elements.as_ptr(),
            a_columns,
            a_rows,
            b.elements.as_ptr(),
            b_columns,
            b_rows,
            T::zero(),
            T::one(),
            false,
            false,
            false,
            parallelism,
        );
        out.set_len(m * n);
    }
    Ok(out)
}
