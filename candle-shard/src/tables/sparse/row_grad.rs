//! Gradients stored by rows.
use crate::{Error, Result, kernels};
use candle_core::Tensor;
use candle_dist::{empty, rows};
use std::sync::Arc;

/// The gradient of a table `[rows, width]`, stored by rows; all other rows are zero.
///
/// Clones share memory.
#[derive(Debug, Clone)]
pub struct RowGrad {
    rows: Arc<[u32]>,
    values: Tensor,
}

impl RowGrad {
    /// Sums the rows of `values`, `[rows.len(), width]` of floats, that have the same row number in `rows`.
    ///
    /// On the CPU they are added in the order of the list, so the bits do not depend on threads. Elsewhere they are added in
    /// pairs, and the sums again, so the bits are the same in each run. 16-bit floats are added in f32 and rounded once. The
    /// cost depends on the list, not on the size of the table.
    ///
    /// # Errors
    /// If the numbers of rows and values differ.
    pub fn new(rows: impl Into<Arc<[u32]>>, values: &Tensor) -> Result<Self> {
        let rows = rows.into();
        check(&rows, values)?;
        let (rows, values) = kernels::sum_rows(&rows, &values.detach())?;
        Ok(Self { rows: rows.into(), values })
    }

    /// Returns the row numbers, each once, in ascending order.
    pub fn rows(&self) -> &[u32] {
        &self.rows
    }

    /// Returns their gradients: `[rows().len(), width]`.
    pub fn values(&self) -> &Tensor {
        &self.values
    }

    /// Converts to a dense gradient of a table with `rows` rows.
    ///
    /// # Errors
    /// If the table has fewer rows than this gradient needs.
    pub fn to_dense(&self, rows: usize) -> Result<Tensor> {
        if let Some(&last) = self.rows.last().filter(|&&last| last as usize >= rows) {
            return Error::op(
                "to_dense",
                format!("a gradient of row {last} has no place in a table of {rows} rows"),
            );
        }
        let dense = Tensor::zeros((rows, self.values.dim(1)?), self.values.dtype(), self.values.device())?;
        kernels::put_rows(&dense, &self.rows, &self.values)?;
        Ok(dense)
    }

    /// Returns the Euclidean norm of all values, in f64, for clipping; covers only this device's part of a table.
    pub fn norm(&self) -> Result<f64> {
        let all: Vec<u32> = (0..self.rows.len() as u32).collect();
        Ok(kernels::power_sums(&self.values, &all, 2.0)?.iter().sum::<f64>().sqrt())
    }

    /// Multiplies all values by `factor`.
    pub fn scale(&self, factor: f64) -> Result<Self> {
        Ok(Self {
            rows: self.rows.clone(),
            values: empty::compute(&self.values, |values| values.affine(factor, 0.0))?,
        })
    }

    pub(super) fn into_part(self) -> RowContribution {
        RowContribution::new(self.rows, self.values)
    }
}

/// Refuses arguments that are not a list of rows with one gradient each.
fn check(rows: &[u32], values: &Tensor) -> Result<()> {
    let (shape, dtype) = (values.shape(), values.dtype());
    if values.rank() != 2 || values.dims()[0] != rows.len() || !dtype.is_float() {
        let len = rows.len();
        return Error::op(
            "RowGrad",
            format!("values {shape:?} {dtype:?} for {len} rows: expected floats [{len}, width]"),
        );
    }
    Ok(())
}

/// The contribution of one lookup to a gradient: `grad` is `[rows.len(), width]`, and rows may repeat.
#[derive(Debug, Clone)]
pub(super) struct RowContribution {
    pub(super) rows: Arc<[u32]>,
    pub(super) grad: Tensor,
    /// When it was added.
    pub(super) mark: u64,
}

impl RowContribution {
    pub(super) fn new(rows: Arc<[u32]>, grad: Tensor) -> Self {
        Self { rows, grad, mark: rows::mark() }
    }

    /// Joins all parts in their order; `None` without parts.
    pub(super) fn joined(parts: &[Self]) -> Result<Option<Self>> {
        let [first, others @ ..] = parts else { return Ok(None) };
        if others.is_empty() {
            return Ok(Some(first.clone()));
        }
        let rows: Arc<[u32]> = parts.iter().flat_map(|part| part.rows.iter().copied()).collect();
        let grads: Vec<&Tensor> = parts.iter().map(|part| &part.grad).collect();
        Ok(Some(Self::new(rows, Tensor::cat(&grads, 0)?)))
    }
}
