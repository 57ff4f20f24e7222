//! Gradients by rows of tables, which are not in a `GradStore`.
//!
//! candle's gradient of a lookup has the size of the table. A table whose gradient is kept by rows has a *handle* instead, a
//! scalar variable that stands for it in candle's graph. The `GradStore` of a pass has zeros for the handle, which says that the pass
//! has reached the table. So what scales, averages or bounds the gradients of a `GradStore` finds the rows here, by the
//! handle or by the variable of the table.
//!
//! Each contribution has the mark of its time, so that a step of several passes can scale what it has added, and nothing
//! from before.
use candle_core::backprop::GradStore;
use candle_core::{Result, Tensor, TensorId, Var};
use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

/// The gradient of one table.
pub trait RowGradient: Send + Sync {
    /// Returns the rows, each once, and their gradients; `None` if no pass has reached the table.
    fn rows(&self) -> Result<Option<(Vec<u32>, Tensor)>>;

    /// Replaces the gradient by one of these rows, each of which may come several times.
    fn replace(&self, rows: Vec<u32>, values: Tensor) -> Result<()>;

    /// Multiplies what was added at the mark `since` and later.
    fn scale(&self, since: u64, factor: f64) -> Result<()>;
}

/// A table that this module knows while this value lives.
pub struct TableEntry {
    handle: TensorId,
    table: TensorId,
    /// Tells this entry from others of the same table.
    number: u64,
}

struct TableRecord {
    gradient: Weak<dyn RowGradient>,
    /// The other of handle and table.
    other: TensorId,
    is_handle: bool,
    shape: Vec<usize>,
    /// The number of the entry that made this record.
    number: u64,
}

static TABLES: LazyLock<Mutex<HashMap<TensorId, TableRecord>>> = LazyLock::new(Mutex::default);
static MARKS: AtomicU64 = AtomicU64::new(0);
static ENTRIES: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// The mark of what this thread adds now.
    static MARK: Cell<u64> = const { Cell::new(0) };
}

fn lock() -> MutexGuard<'static, HashMap<TensorId, TableRecord>> {
    TABLES.lock().unwrap_or_else(PoisonError::into_inner)
}

impl TableEntry {
    /// Makes a table known, whose `handle` stands for it in graphs.
    pub fn new(table: &Var, handle: &Var, gradient: &Arc<dyn RowGradient>) -> Self {
        let (table_id, handle_id, shape) = (table.id(), handle.id(), table.dims().to_vec());
        let number = ENTRIES.fetch_add(1, Ordering::Relaxed);
        let known = |other, is_handle| TableRecord {
            gradient: Arc::downgrade(gradient),
            other,
            is_handle,
            shape: shape.clone(),
            number,
        };
        let mut tables = lock();
        tables.insert(table_id, known(handle_id, false));
        tables.insert(handle_id, known(table_id, true));
        Self { handle: handle_id, table: table_id, number }
    }
}

impl Drop for TableEntry {
    fn drop(&mut self) {
        // A later entry of the same table stays.
        let mut tables = lock();
        for id in [self.handle, self.table] {
            if tables.get(&id).is_some_and(|record| record.number == self.number) {
                tables.remove(&id);
            }
        }
    }
}

impl fmt::Debug for TableEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TableEntry").field(&self.table).finish()
    }
}

/// Begins a new time on this thread, and returns its mark.
pub fn next_mark() -> u64 {
    let mark = MARKS.fetch_add(1, Ordering::Relaxed) + 1;
    MARK.set(mark);
    mark
}

/// Returns the mark of what this thread adds now.
pub fn mark() -> u64 {
    MARK.get()
}

/// Returns the gradient of a table, by its variable or by its handle.
pub fn of(variable: TensorId) -> Option<Arc<dyn RowGradient>> {
    lock().get(&variable).and_then(|known| known.gradient.upgrade())
}

/// Returns the shape of a table by its handle; `None` for any other variable.
pub fn shape_of_handle(variable: TensorId) -> Option<Vec<usize>> {
    lock().get(&variable).filter(|known| known.is_handle).map(|known| known.shape.clone())
}

/// Returns the shape of a table that has rows of a gradient, that the pass of these gradients has reached, and that is not among
/// `variables`.
pub fn left_out(grads: &GradStore, variables: &HashSet<TensorId>) -> Result<Option<Vec<usize>>> {
    let reached: Vec<(Arc<dyn RowGradient>, Vec<usize>)> = {
        let tables = lock();
        let handles = grads.get_ids().filter_map(|id| tables.get(id)).filter(|known| known.is_handle);
        let others = handles.filter(|known| !variables.contains(&known.other));
        others.filter_map(|known| Some((known.gradient.upgrade()?, known.shape.clone()))).collect()
    };
    for (gradient, shape) in reached {
        if gradient.rows()?.is_some() {
            return Ok(Some(shape));
        }
    }
    Ok(None)
}

/// Multiplies what passes of these gradients have added since a mark to the gradients of tables.
pub fn scale(grads: &GradStore, since: u64, factor: f64) -> Result<()> {
    let reached: Vec<Arc<dyn RowGradient>> = {
        let tables = lock();
        let handles = grads.get_ids().filter_map(|id| tables.get(id)).filter(|known| known.is_handle);
        handles.filter_map(|known| known.gradient.upgrade()).collect()
    };
    reached.into_iter().try_for_each(|gradient| gradient.scale(since, factor))
}
