//! Scaling of rows above the norm limit, in place, before a lookup.
use super::fetch::mask_and_shift;
use super::inputs::Wanted;
use super::options::Renorm;
use super::table::Table;
use crate::Result;
use crate::kernels;
use candle_core::{Device, Tensor};
use candle_dist::ProcessGroup;

/// Scales the rows that any rank looks up down to `max_norm`, in the table itself.
///
/// Only those rows are read, and only rows that are too long are written. For a table cut by columns, one small
/// collective sums the parts of the norms.
pub(crate) fn limit_norms(table: &Table, wanted: &[Wanted], limit: &Renorm) -> Result<()> {
    let local = table.local.tensor();
    let mine = table.own_rows(table.group.rank());
    let rows: Vec<u32> = wanted.iter().flat_map(|wanted| mask_and_shift(wanted, &mine)).collect();
    let rows = kernels::unique_rows(&rows);
    limit_rows(local, &rows, limit, table.by_columns().then_some(&table.group))
}

/// Scales the `rows` of a table that are longer than `max_norm`. Each row is listed once.
///
/// `groups` hold the other columns of the same rows, and each of their ranks calls this function; it runs one small
/// collective per group.
pub(crate) fn limit_rows<'a>(
    table: &Tensor,
    rows: &[u32],
    limit: &Renorm,
    groups: impl IntoIterator<Item = &'a ProcessGroup>,
) -> Result<()> {
    let mut sums = kernels::power_sums(table, rows, limit.norm_type)?;
    for group in groups {
        let parts = Tensor::from_vec(sums, rows.len(), &Device::Cpu)?;
        sums = group.all_reduce(&parts, kernels::combine(limit.norm_type))?.to_vec1()?;
    }
    let norms: Vec<f64> = sums.into_iter().map(|sum| kernels::finish(sum, limit.norm_type, table.dtype())).collect();
    Ok(kernels::scale_rows(table, rows, &norms, limit.max_norm)?)
}
