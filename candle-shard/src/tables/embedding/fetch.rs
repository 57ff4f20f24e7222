//! Steps 2 to 4: masks and shifts the ids, looks up local rows, distributes the results and reorders their columns.
use super::inputs::{LookupInputs, SortedIds};
use super::table::EmbeddingTable;
use crate::lookup::{Renorm, limit_rows};
use crate::{Result, kernels};
use candle_core::{Tensor, Var};
use candle_dist::Cut;
use candle_dist::functional::Step;

/// Returns the indices within `range` of those `wanted` rows that lie in it.
fn mask_and_shift(
    wanted: &[u32],
    range: &std::ops::Range<usize>,
) -> impl ExactSizeIterator<Item = u32> + Clone {
    // Ids are sorted, so those in a range are consecutive.
    let place = |bound: usize| wanted.partition_point(|&id| (id as usize) < bound);
    let start = range.start as u32;
    wanted[place(range.start)..place(range.end)].iter().map(move |id| id - start)
}

/// The rows that a rank looks up.
pub(super) struct FetchedRows {
    /// `[n, width]`, differentiable: gradients go back to the ranks that hold the rows.
    pub(super) rows: Tensor,
    /// The index in `rows` of each row that this rank looks up.
    pub(super) order: Vec<u32>,
}

/// Sends each rank the rows that it looks up, in one collective. The gradient of the row `still` is not used.
pub(super) fn fetch(
    table: &EmbeddingTable,
    inputs: &LookupInputs,
    still: Option<u32>,
) -> Result<FetchedRows> {
    if table.by_columns() { fetch_columns(table, inputs, still) } else { fetch_rows(table, inputs, still) }
}

/// Looks up local rows. They are part of the backward pass of the other ranks even where the local shard is empty.
fn look_up(table: &EmbeddingTable, rows: Vec<u32>, still: Option<u32>, tracked: bool) -> Result<Tensor> {
    let found = table.lookup(rows, still)?;
    Ok(if tracked && !found.track_op() { Var::from_tensor(&found)?.into_inner() } else { found })
}

/// Looks up the local rows that the ranks request, and sends each rank its rows.
fn fetch_rows(
    table: &EmbeddingTable,
    LookupInputs { wanted, tracked }: &LookupInputs,
    still: Option<u32>,
) -> Result<FetchedRows> {
    let (ranks, me) = (table.parts.len(), table.group.rank());
    let held = |by: usize, wanted: &'_ SortedIds| mask_and_shift(wanted, &table.own_rows(by)).len();
    let counts: Vec<Vec<usize>> =
        (0..ranks).map(|by| wanted.iter().map(|wanted| held(by, wanted)).collect()).collect();
    let mine = table.own_rows(me);
    let still = still.filter(|&row| mine.contains(&(row as usize))).map(|row| row - mine.start as u32);
    let found = look_up(table, rows_here(table, wanted), still, *tracked)?;
    let rows = Step::all_to_all_single(&counts).apply(&found, &table.group)?;
    // The rows from one rank are consecutive in the wanted rows.
    let mut starts = vec![0; ranks];
    for rank in 1..ranks {
        starts[rank] = starts[rank - 1] + counts[rank - 1][me] as u32;
    }
    let order = table.order().into_iter().flat_map(|rank| (starts[rank]..).take(counts[rank][me])).collect();
    Ok(FetchedRows { rows, order })
}

/// Returns the local indices of the rows that the ranks look up here, rank by rank.
fn rows_here(table: &EmbeddingTable, wanted: &[SortedIds]) -> Vec<u32> {
    let mine = table.own_rows(table.group.rank());
    wanted.iter().flat_map(|wanted| mask_and_shift(wanted, &mine)).collect()
}

/// Looks up the local columns of all wanted rows, and sends each rank the columns of its rows.
fn fetch_columns(
    table: &EmbeddingTable,
    LookupInputs { wanted, tracked }: &LookupInputs,
    still: Option<u32>,
) -> Result<FetchedRows> {
    let counts: Vec<usize> = wanted.iter().map(Vec::len).collect();
    let found = look_up(table, wanted.concat(), still, *tracked)?;
    let exchange = Step::AllToAll { split: Cut::new(0, &counts), concat: Cut::new(1, &table.sizes()) };
    let joined = exchange.apply(&found, &table.group)?;
    let order = (0..counts[table.group.rank()] as u32).collect();
    Ok(FetchedRows { rows: rearrange_columns(joined, table)?, order })
}

/// Reorders columns from the order of the ranks to the order of the table.
fn rearrange_columns(joined: Tensor, table: &EmbeddingTable) -> Result<Tensor> {
    let (order, sizes) = (table.order(), table.sizes());
    if order.iter().filter(|&&rank| sizes[rank] > 0).is_sorted() {
        return Ok(joined);
    }
    let columns = |&rank: &usize| joined.narrow(1, sizes[..rank].iter().sum(), sizes[rank]);
    let pieces = order.iter().filter(|&&rank| sizes[rank] > 0).map(columns);
    Ok(Tensor::cat(&pieces.collect::<candle_core::Result<Vec<_>>>()?, 1)?)
}

/// Scales the rows that any rank looks up down to `max_norm`, in the table itself.
///
/// Only those rows are read, and only rows that are too long are written. For a table cut by columns, one small
/// collective sums the parts of the norms.
pub(super) fn limit_norms(table: &EmbeddingTable, wanted: &[SortedIds], limit: &Renorm) -> Result<()> {
    let rows = kernels::unique_rows(&rows_here(table, wanted));
    limit_rows(&table.local, &rows, limit, table.by_columns().then_some(&table.group))
}
