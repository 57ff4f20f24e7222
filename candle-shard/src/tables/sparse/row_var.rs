//! Variables whose gradients are collected by rows.
use super::row_grad::{RowContribution, RowGrad};
use crate::lookup::{Renorm, limit_rows};
use crate::{Error, Result, kernels};
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, MetalStorage, Shape, Tensor, Var};
use candle_dist::backend::Ready;
use candle_dist::rows::{RowGradient, TableEntry};
use candle_dist::{ShardedVar, empty};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A table `[rows, width]` (f32, f64, f16 or bf16) for row lookups, with a gradient stored by rows.
///
/// The gradient behaves like `.grad` in PyTorch: backward passes add to it until [`zero_grad`](Self::zero_grad),
/// [`take_grad`](Self::take_grad) or an optimizer's step takes it. It is not in the `GradStore` that candle's backward
/// pass returns. Recomputed parts of the graph ([`nn::recompute`](crate::nn::recompute)) add to it in the same way.
/// Until the gradient is taken, the contributions of all lookups are kept separately.
///
/// What scales, averages or bounds the gradients of a `GradStore` does so for these rows too, where it is told of the table by
/// its [`var`](Self::var): [`DataParallel`](candle_dist::DataParallel), [`ClipGradNorm`](candle_dist::ClipGradNorm). A
/// [`GradAccumulator`](candle_dist::GradAccumulator) finds it by itself, as a pipeline with a loss that counts does.
///
/// A clone is the same variable, with the same gradient.
#[derive(Debug, Clone)]
pub struct RowVar {
    var: Var,
    /// Represents the table in candle's graph; a gradient of this scalar is cheap.
    handle: Var,
    pending: PendingRows,
    /// Lets those who see only variables find the gradient.
    _entry: Arc<TableEntry>,
    /// Says that the table is a shard, if it is one.
    _declared: Option<ShardedVar>,
}

/// The contributions of the lookups.
#[derive(Debug, Default)]
struct RowContributions(Mutex<Vec<RowContribution>>);

type PendingRows = Arc<RowContributions>;

fn lock(pending: &RowContributions) -> MutexGuard<'_, Vec<RowContribution>> {
    pending.0.lock().unwrap_or_else(PoisonError::into_inner)
}

impl RowGradient for RowContributions {
    fn rows(&self) -> candle_core::Result<Option<(Vec<u32>, Tensor)>> {
        let joined = RowContribution::joined(&lock(self));
        let grad = joined.and_then(|part| part.map(|part| RowGrad::new(part.rows, &part.grad)).transpose());
        let grad = grad.map_err(candle_core::Error::wrap)?;
        Ok(grad.map(|grad| (grad.rows().to_vec(), grad.values().clone())))
    }

    fn replace(&self, rows: Vec<u32>, values: Tensor) -> candle_core::Result<()> {
        *lock(self) = vec![RowContribution::new(rows.into(), values)];
        Ok(())
    }

    fn scale(&self, since: u64, factor: f64) -> candle_core::Result<()> {
        for part in lock(self).iter_mut().filter(|part| part.mark >= since) {
            part.grad = empty::compute(&part.grad, |grad| grad.affine(factor, 0.0))?;
        }
        Ok(())
    }
}

/// Refuses a table that is too large for candle's kernels on GPUs, which fill it and its states: they count elements in 32 bits.
pub(crate) fn check_size(op: &'static str, elements: usize, is_on_host: bool) -> Result<()> {
    if is_on_host || elements <= u32::MAX as usize {
        return Ok(());
    }
    let most = u32::MAX;
    Error::op(
        op,
        format!(
            "{elements} elements in one shard on a GPU: expected at most {most}; shard it over more ranks"
        ),
    )
}

impl RowVar {
    /// Wraps a variable so that its gradient is collected by rows.
    ///
    /// # Errors
    /// If `var` is not a table of floats, or has more than 2³² - 1 elements on a GPU.
    pub fn new(var: Var) -> Result<Self> {
        let (shape, dtype) = (var.shape(), var.dtype());
        if var.rank() != 2 || !kernels::is_computed(dtype) {
            let got = format!("a variable {shape:?} {dtype:?}");
            return Error::op("RowVar", format!("{got}: expected [rows, width] of f32, f64, f16 or bf16"));
        }
        check_size("RowVar", var.elem_count(), var.device().is_cpu())?;
        let (handle, pending) = (Var::zeros((), dtype, var.device())?, PendingRows::default());
        let gradient: Arc<dyn RowGradient> = pending.clone();
        let entry = Arc::new(TableEntry::new(&var, &handle, &gradient));
        Ok(Self { handle, var, pending, _entry: entry, _declared: None })
    }

    /// Keeps the declaration that the table is a shard.
    pub(crate) fn declared(self, declared: ShardedVar) -> Self {
        Self { _declared: Some(declared), ..self }
    }

    /// Returns the table itself: always the same memory, which optimizers and [`renorm`](Self::renorm) change in place.
    ///
    /// If a graph uses it directly, it gets candle's dense gradient, which is not part of [`grad`](Self::grad).
    pub fn var(&self) -> &Var {
        &self.var
    }

    /// Returns the table's `rows` in the order of the list, which may contain duplicates: `[rows.len(), width]`.
    ///
    /// The result always has a gradient, even without rows; without a backward pass the lookup costs no more than the
    /// copy.
    ///
    /// # Errors
    /// If the table does not have one of the rows.
    pub fn lookup(&self, rows: impl Into<Arc<[u32]>>) -> Result<Tensor> {
        self.lookup_but(rows, None)
    }

    /// Like [`lookup`](Self::lookup), but drops the gradient of the row `still`: PyTorch's `padding_idx`.
    pub fn lookup_but(&self, rows: impl Into<Arc<[u32]>>, still: Option<u32>) -> Result<Tensor> {
        let rows = rows.into();
        let made = Ready::new(kernels::take_rows(&self.var, &rows)?);
        let still = still.filter(|still| rows.contains(still));
        Ok(self.handle.apply_op1(RowLookup { rows, still, pending: self.pending.clone(), made })?)
    }

    /// Returns the gradient so far; `None` if no backward pass has reached the table.
    ///
    /// On the CPU, rows are merged in the order of the backward passes and then of the list; elsewhere as in [`RowGrad::new`].
    /// A row that was looked up stays even if its gradient is zero.
    pub fn grad(&self) -> Result<Option<RowGrad>> {
        let joined = RowContribution::joined(&lock(&self.pending))?;
        joined.map(|part| RowGrad::new(part.rows, &part.grad)).transpose()
    }

    /// Like [`grad`](Self::grad), but also clears the gradient.
    pub fn take_grad(&self) -> Result<Option<RowGrad>> {
        self.take_part()?.map(|part| RowGrad::new(part.rows, &part.grad)).transpose()
    }

    /// Clears the gradient.
    pub fn zero_grad(&self) {
        lock(&self.pending).clear();
    }

    /// Adds to the gradient, as a backward pass does: for example a clipped gradient after
    /// [`take_grad`](Self::take_grad).
    ///
    /// # Errors
    /// If the gradient has another width or dtype, a row outside the table, or is on another device.
    pub fn add_grad(&self, grad: RowGrad) -> Result<()> {
        let (values, [rows, width]) = (grad.values(), [self.var.dims()[0], self.var.dims()[1]]);
        let inside = grad.rows().last().is_none_or(|&last| (last as usize) < rows);
        if values.dims()[1] != width || values.dtype() != self.var.dtype() || !inside {
            let (shape, dtype, last) = (values.shape(), values.dtype(), grad.rows().last().unwrap_or(&0));
            let got = format!("a gradient {shape:?} {dtype:?} up to row {last}");
            return Error::op(
                "add_grad",
                format!("{got} of a table [{rows}, {width}] {:?}", self.var.dtype()),
            );
        }
        if !values.device().same_device(self.var.device()) {
            let [of_grad, of_table] = [values, &self.var].map(|x| x.device().location());
            let got = format!("a gradient on {of_grad:?} of a table on {of_table:?}");
            return Error::op(
                "add_grad",
                format!("{got}: expected the table's device, `table.var().device()`"),
            );
        }
        lock(&self.pending).push(grad.into_part());
        Ok(())
    }

    /// Scales those of the `rows` whose `norm_type`-norm is above `max_norm` down to it, in place and without a
    /// gradient.
    ///
    /// PyTorch's embedding does this for `max_norm` before a lookup of `rows`: the norm is rounded to the table's
    /// dtype, and a row with a larger one is multiplied by `max_norm / (norm + 1e-7)`, rounded in the same way. All
    /// other rows stay bit-identical, and so do rows whose norm is NaN. `norm_type` may be ±∞, 0 (the number of
    /// non-zero elements) or negative.
    ///
    /// # Errors
    /// If the table does not have one of the rows, if `max_norm` is not above 0, or if `norm_type` is NaN.
    pub fn renorm(&self, rows: &[u32], max_norm: f64, norm_type: f64) -> Result<()> {
        if max_norm.is_nan() || max_norm <= 0.0 || norm_type.is_nan() {
            let reason =
                format!("max_norm {max_norm} with norm_type {norm_type}: expected one above 0, and no NaN");
            return Error::op("renorm", reason);
        }
        limit_rows(&self.var, &kernels::unique_rows(rows), &Renorm { max_norm, norm_type }, None)
    }

    /// Takes the gradient as the unmerged contributions of the lookups.
    pub(super) fn take_part(&self) -> Result<Option<RowContribution>> {
        let mut pending = lock(&self.pending);
        let joined = RowContribution::joined(&pending)?;
        pending.clear();
        Ok(joined)
    }
}

/// The graph node of a lookup.
struct RowLookup {
    rows: Arc<[u32]>,
    /// One of the rows, which gets no gradient.
    still: Option<u32>,
    pending: PendingRows,
    made: Ready,
}

impl CustomOp1 for RowLookup {
    fn name(&self) -> &'static str {
        "lookup"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        self.made.cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        self.made.cuda()
    }

    fn metal_fwd(&self, _: &MetalStorage, _: &Layout) -> candle_core::Result<(MetalStorage, Shape)> {
        self.made.metal()
    }

    fn bwd(&self, handle: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let (mut rows, mut grad) = (self.rows.clone(), grad.detach());
        if let Some(still) = self.still {
            let kept: Vec<u32> = (0..rows.len() as u32).filter(|&i| rows[i as usize] != still).collect();
            rows = kept.iter().map(|&i| rows[i as usize]).collect();
            grad = empty::index_select(&grad, &kept, 0)?;
        }
        lock(&self.pending).push(RowContribution::new(rows, grad));
        handle.zeros_like().map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::check_size;

    #[test]
    fn tables_that_kernels_cannot_count_are_refused_on_gpus() {
        let most = u32::MAX as usize;
        assert!(check_size("RowVar", most, false).is_ok() && check_size("RowVar", most + 1, true).is_ok());
        let refused = check_size("RowVar", most + 1, false).expect_err("too large").to_string();
        assert!(refused.contains("4294967296 elements in one shard on a GPU"), "{refused}");
    }
}
