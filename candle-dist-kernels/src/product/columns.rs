//! New matrices whose columns several threads compute.
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

use candle_core::{Result, bail};
use gemm::Parallelism;

use super::matrix::{Matrix, multiply_into};
use crate::parallel;

/// Some columns of a new matrix, which nothing else uses.
pub(crate) struct NewColumns<'a, T> {
    first: *mut T,
    dims: [usize; 2],
    /// From one row to the next.
    stride: usize,
    is_written: bool,
    memory: PhantomData<&'a mut [MaybeUninit<T>]>,
}

// SAFETY: it is used as a `&mut` of its elements, which `by_columns` gives to no other.
unsafe impl<T: Send> Send for NewColumns<'_, T> {}

impl<T> NewColumns<'_, T> {
    /// Returns some columns of a row, to be written.
    pub(super) fn row(&mut self, row: usize, columns: Range<usize>) -> &mut [MaybeUninit<T>] {
        let [rows, width] = self.dims;
        assert!(row < rows && columns.start <= columns.end && columns.end <= width);
        // SAFETY: the part has this row, whose elements nothing else uses.
        unsafe {
            let first = self.first.add(row * self.stride + columns.start).cast();
            std::slice::from_raw_parts_mut(first, columns.len())
        }
    }

    /// Says that all elements have been written.
    ///
    /// # Safety
    /// They have.
    pub(super) unsafe fn set_written(&mut self) {
        self.is_written = true;
    }
}

impl NewColumns<'_, f32> {
    /// Adds the product of matrices that fit. The first one is the sum so far.
    pub(crate) fn add_product(&mut self, a: Matrix<'_, f32>, b: Matrix<'_, f32>) -> Result<()> {
        let ([m, k], [inner, n]) = (a.dims, b.dims);
        if k != inner || [m, n] != self.dims {
            let [rows, columns] = self.dims;
            bail!("product: [{m}, {k}] by [{inner}, {n}] is not [{rows}, {columns}]");
        }
        // SAFETY: the part has `m` rows of `n` elements, which nothing else uses.
        unsafe { multiply_into((self.first, self.stride), self.is_written, a, b, Parallelism::None) };
        self.is_written = true;
        Ok(())
    }
}

/// Returns a matrix of `rows` rows whose columns are in parts of these `widths`, which add up to all of them. `compute` writes the
/// part of a number; on several threads, if the work `is_worth_it`.
pub(crate) fn by_columns<T: Send>(
    rows: usize,
    widths: &[usize],
    is_worth_it: bool,
    compute: impl Fn(usize, &mut NewColumns<'_, T>) -> Result<()> + Sync,
) -> Result<Vec<T>> {
    let stride: usize = widths.iter().sum();
    let mut out = Vec::with_capacity(rows * stride);
    if rows * stride == 0 {
        return Ok(out);
    }
    let memory = out.as_mut_ptr();
    let mut start = 0;
    let parts = widths.iter().map(|&width| {
        // SAFETY: the parts lie one behind another in the first row.
        let first = unsafe { memory.add(start) };
        start += width;
        NewColumns { first, dims: [rows, width], stride, is_written: false, memory: PhantomData }
    });
    let written = parallel::map(is_worth_it, parts, |number, mut part| {
        compute(number, &mut part)?;
        Ok(part.is_written)
    });
    if written.into_iter().collect::<Result<Vec<bool>>>()?.contains(&false) {
        bail!("product: some columns were not written");
    }
    // SAFETY: the parts are all columns of all rows, and each was written.
    unsafe { out.set_len(rows * stride) };
    Ok(out)
}
