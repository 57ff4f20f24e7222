//! Rows of tables that lookups change in place, as `max_norm` does.
//!
//! Replicas of a model look up unlike rows. Without more, each would change its own copy of a table. So who keeps copies alike
//! watches their tables, and what changes rows in place says which.
use crate::{Collective, Cut, ProcessGroup, Result, empty};
use candle_core::{Device, Tensor, TensorId, Var};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

/// The rows of a table on this rank that have changed in place since [`share`].
#[derive(Debug)]
pub struct RowChanges {
    table: TensorId,
    rows: Mutex<BTreeSet<u32>>,
}

static WATCHED: LazyLock<Mutex<HashMap<TensorId, Vec<Weak<RowChanges>>>>> = LazyLock::new(Mutex::default);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Says that a lookup has changed these rows of a table.
pub fn changed(table: &Tensor, rows: impl Iterator<Item = u32> + Clone) {
    tell(table, rows, |_| true);
}

fn tell(table: &Tensor, rows: impl Iterator<Item = u32> + Clone, whom: impl Fn(&RowChanges) -> bool) {
    let watched = lock(&WATCHED);
    let all = watched.get(&table.id()).into_iter().flatten().filter_map(Weak::upgrade);
    let all: Vec<Arc<RowChanges>> = all.collect();
    // The last handle may end here, which locks the list too.
    drop(watched);
    for changes in all.into_iter().filter(|changes| whom(changes)) {
        lock(&changes.rows).extend(rows.clone());
    }
}

impl RowChanges {
    /// Watches a table while the value lives.
    pub fn watch(table: &Tensor) -> Arc<Self> {
        let changes = Arc::new(Self { table: table.id(), rows: Mutex::default() });
        lock(&WATCHED).entry(table.id()).or_default().push(Arc::downgrade(&changes));
        changes
    }

    /// Returns whether rows have changed.
    pub fn is_empty(&self) -> bool {
        lock(&self.rows).is_empty()
    }

    /// Returns the rows that have changed, and forgets them.
    pub(crate) fn take(&self) -> Vec<u32> {
        std::mem::take(&mut *lock(&self.rows)).into_iter().collect()
    }
}

/// Gives the rows of these tables that any rank of `group` has changed to the copies of all. Every rank calls it.
///
/// Copies that were alike before change alike, so a row that several ranks have changed is the same on each. Should they differ,
/// that of the first of these ranks counts.
///
/// # Errors
/// If the communication fails.
#[track_caller]
pub fn share(tables: &[(&Var, &RowChanges)], group: &ProcessGroup) -> Result<()> {
    let mine: Vec<Vec<u32>> = tables.iter().map(|(_, changes)| changes.take()).collect();
    let counts = Tensor::from_iter(mine.iter().map(|rows| rows.len() as i64), &Device::Cpu)?;
    let counts = group.all_gather(&counts.unsqueeze(0)?, 0)?.to_vec2::<i64>()?;
    for (at, ((table, changes), mine)) in tables.iter().zip(mine).enumerate() {
        let counts: Vec<usize> = counts.iter().map(|of_rank| of_rank[at] as usize).collect();
        exchange(table, changes, mine, &counts, group)?;
    }
    Ok(())
}

/// Does the part of [`share`] for one table, with the rows `mine` of this rank, which were [taken](RowChanges::take) from
/// `changes`, and the number of rows of each rank.
#[track_caller]
pub(crate) fn exchange(
    table: &Var,
    changes: &RowChanges,
    mine: Vec<u32>,
    counts: &[usize],
    group: &ProcessGroup,
) -> Result<()> {
    if counts.iter().all(|&count| count == 0) {
        return Ok(());
    }
    let own: HashSet<u32> = mine.iter().copied().collect();
    let values = empty::index_select(table, &mine, 0)?;
    let mine = Tensor::from_vec(mine, counts[group.rank()], &Device::Cpu)?;
    let rows = group.call(Collective::all_gather(Cut::new(0, counts))).run(&mine)?.to_vec1::<u32>()?;
    let values = group.call(Collective::all_gather(Cut::new(0, counts))).run(&values)?;
    // A device may write rows that come twice in any order.
    let mut seen = HashSet::new();
    let (places, rows): (Vec<u32>, Vec<u32>) = (0..).zip(rows).filter(|(_, row)| seen.insert(*row)).unzip();
    let values = empty::index_select(&values, &places, 0)?;
    if values.elem_count() > 0 {
        let index = Tensor::new(&rows[..], table.device())?.unsqueeze(1)?;
        table.scatter_set(&index.broadcast_as(values.dims())?.contiguous()?, &values, 0)?;
    }
    // Those who share the table with other ranks give them these rows too. They know of this rank's own rows already, and if
    // they heard of these again, two of them would pass rows to each other without end.
    let new = rows.iter().copied().filter(|row| !own.contains(row));
    tell(table, new, |other| !std::ptr::eq(other, changes));
    Ok(())
}

impl Drop for RowChanges {
    fn drop(&mut self) {
        let mut watched = lock(&WATCHED);
        if let Some(all) = watched.get_mut(&self.table) {
            all.retain(|changes| changes.strong_count() > 0);
            if all.is_empty() {
                watched.remove(&self.table);
            }
        }
    }
}
