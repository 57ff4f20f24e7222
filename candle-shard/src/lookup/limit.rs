//! The limit for the norm of rows, in place.
use super::options::Renorm;
use crate::{Result, kernels};
use candle_core::{Device, Tensor};
use candle_dist::{ProcessGroup, row_changes};

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
    let norms: Vec<f64> =
        sums.into_iter().map(|sum| kernels::finish(sum, limit.norm_type, table.dtype())).collect();
    kernels::scale_rows(table, rows, &norms, limit.max_norm)?;
    let scaled = rows.iter().zip(&norms).filter(|(_, norm)| **norm > limit.max_norm);
    row_changes::changed(table, scaled.map(|(row, _)| *row));
    Ok(())
}
