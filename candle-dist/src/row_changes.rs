//! Rows of tables that lookups change in place, as `max_norm` does.
//!
//! Replicas of a model look up unlike rows. Without more, each would change its own copy of a table. So who keeps copies alike
//! watches their tables, and what changes rows in place says which.
use crate::{ProcessGroup, Result, empty};
use candle_core::{Device, Tensor, TensorId, Var};
use std::collections::{BTreeSet, HashMap};
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
    for changes in lock(&WATCHED).get(&table.id()).into_iter().flatten().filter_map(Weak::upgrade) {
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

    fn take(&self) -> Vec<u32> {
        std::mem::take(&mut *lock(&self.rows)).into_iter().collect()
    }
}

/// Gives the rows of these tables that any rank of `group` has changed to the copies of all. Every rank calls it.
///
/// Copies that were alike before change alike, so a row that several ranks have changed is the same on each.
///
/// # Errors
/// If the communication fails.
#[track_caller]
pub fn share(tables: &[(&Var, &RowChanges)], group: &ProcessGroup) -> Result<()> {
    let mine: Vec<Vec<u32>> = tables.iter().map(|(_, changes)| changes.take()).collect();
    let counts = Tensor::from_iter(mine.iter().map(|rows| rows.len() as i64), &Device::Cpu)?;
    let counts = group.all_gather(&counts.unsqueeze(0)?, 0)?.to_vec2::<i64>()?;
    for (at, ((table, _), mine)) in tables.iter().zip(mine).enumerate() {
        let counts: Vec<usize> = counts.iter().map(|of_rank| of_rank[at] as usize).collect();
        if counts.iter().all(|&count| count == 0) {
            continue;
        }
        let values = empty::index_select(table, &mine, 0)?;
        let mine = Tensor::from_vec(mine, counts[group.rank()], &Device::Cpu)?;
        let rows = group.all_gather_uneven(&mine, 0, &counts)?.to_device(table.device())?;
        let values = group.all_gather_uneven(&values, 0, &counts)?;
        if values.elem_count() > 0 {
            table.scatter_set(&rows.unsqueeze(1)?.broadcast_as(values.dims())?.contiguous()?, &values, 0)?;
        }
    }
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
