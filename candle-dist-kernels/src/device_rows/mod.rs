//! Rows of a table that is not on the host: on CUDA devices by kernels of this crate, elsewhere by candle's operations.
//!
//! candle's own kernels for `scatter` and `index_add` start one thread for each column, which loops over all rows, and they
//! count elements in 32 bits.
#[cfg(feature = "cuda")]
mod cuda;
pub(crate) mod launch;

use super::row_order::NOWHERE;
use candle_core::{Result, Tensor, bail};
use candle_dist_base::{Fresh, empty};

/// Returns the rows of a contiguous table `[.., width]` of floats at `rows`, `[n]` of u32: `[n, width]`. The row [`NOWHERE`] is
/// filled with `fill`.
pub(super) fn take(table: &Tensor, rows: &Tensor, fill: f64) -> Result<Fresh> {
    let (table, shape) = (table.detach(), (rows.dim(0)?, table.dim(1)?));
    if rows.elem_count() * shape.1 == 0 {
        return Fresh::copy_of(&Tensor::zeros(shape, table.dtype(), table.device())?);
    }
    #[cfg(feature = "cuda")]
    if table.device().is_cuda() {
        return cuda::take(&table, rows, fill);
    }
    let found = table.index_select(rows, 0)?;
    if fill == 0.0 {
        return Fresh::copy_of(&found); // what candle reads for no row
    }
    let filled = empty::full(fill, shape, table.dtype(), table.device())?;
    let is_filled = rows.eq(NOWHERE)?.unsqueeze(1)?.broadcast_as(shape)?;
    Fresh::copy_of(&is_filled.where_cond(&filled, &found)?)
}

/// Writes `values`, `[n, width]`, to distinct rows of a contiguous table of floats in place. The table has these rows.
pub(super) fn put(table: &Tensor, rows: &Tensor, values: &Tensor) -> Result<()> {
    if values.dims() != [rows.dim(0)?, table.dim(1)?] {
        bail!("values {:?} for {:?} rows of a table {:?}", values.dims(), rows.dims(), table.dims());
    }
    if values.elem_count() == 0 {
        return Ok(());
    }
    let (values, table) = (values.detach().contiguous()?, table.detach());
    #[cfg(feature = "cuda")]
    if table.device().is_cuda() {
        return cuda::put(&table, rows, &values);
    }
    table.scatter_set(&rows.unsqueeze(1)?.broadcast_as(values.shape())?.contiguous()?, &values, 0)
}
