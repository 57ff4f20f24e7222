//! Scaling of rows above the norm limit, in place, before a lookup.
use super::fetch::mask_and_shift;
use super::table::Table;
use crate::lookup::{Renorm, Wanted, limit_rows};
use crate::{Result, kernels};

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
