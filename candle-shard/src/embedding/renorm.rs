//! Rows that are too long, made shorter in place before they are looked up.
use super::fetch::mask_and_shift;
use super::inputs::Wanted;
use super::options::Renorm;
use super::table::Table;
use crate::Result;
use crate::kernels;
use candle_core::{Device, Tensor};

/// Scales the rows that any rank wants to `max_norm` where they are longer, in the table itself.
///
/// Only those rows are read, and only those too long are written. A table that is cut by columns needs one small
/// collective: each rank knows a part of each norm.
pub(crate) fn limit_norms(table: &Table, wanted: &[Wanted], limit: &Renorm) -> Result<()> {
    let local = table.local.tensor();
    let mine = table.own_rows(table.group.rank());
    let rows: Vec<u32> = wanted.iter().flat_map(|wanted| mask_and_shift(wanted, &mine)).collect();
    let rows = kernels::unique_rows(&rows);
    let mut sums = kernels::power_sums(local, &rows, limit.norm_type)?;
    if table.by_columns() {
        let parts = Tensor::from_vec(sums, rows.len(), &Device::Cpu)?;
        sums = table.group.all_reduce(&parts, kernels::combine(limit.norm_type))?.to_vec1()?;
    }
    let norms: Vec<f64> = sums.into_iter().map(|sum| kernels::finish(sum, limit.norm_type, local.dtype())).collect();
    Ok(kernels::scale_rows(local, &rows, &norms, limit.max_norm)?)
}
