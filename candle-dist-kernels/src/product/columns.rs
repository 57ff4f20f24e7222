//! Sums of products whose columns several threads compute.
use std::marker::PhantomData;
use std::mem::MaybeUninit;

use candle_core::{Result, bail};
use gemm::Parallelism;

use super::matrix::{Matrix, multiply_into};
use crate::parallel;

/// Some columns of a new matrix, which nothing else uses.
pub(crate) struct NewColumns<'a> {
    first: *mut f32,
    dims: [usize; 2],
    /// From one row to the next.
    stride: usize,
    is_written: bool,
    memory: PhantomData<&'a mut [MaybeUninit<f32>]>,
}

// SAFETY: it is used as a `&mut` of its elements, which `by_columns` gives to no other.
unsafe impl Send for NewColumns<'_> {}

impl NewColumns<'_> {
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

/// Returns a matrix of `rows` rows whose columns are in parts of these `widths`, which add up to all of them. `compute` adds at
/// least one product to the part of a number; on several threads, if the work `is_worth_it`.
pub(crate) fn by_columns(
    rows: usize,
    widths: &[usize],
    is_worth_it: bool,
    compute: impl Fn(usize, &mut NewColumns<'_>) -> Result<()> + Sync,
) -> Result<Vec<f32>> {
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
        bail!("product: some columns have no product");
    }
    // SAFETY: the parts are all columns of all rows, and each was written.
    unsafe { out.set_len(rows * stride) };
    Ok(out)
}
