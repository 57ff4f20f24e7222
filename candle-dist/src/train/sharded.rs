//! Variables that are shards of parameters.
use crate::{DeviceMesh, ProcessGroup};
use candle_core::{Tensor, TensorId, Var};
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

/// Ranks of the world that hold different parts of one parameter.
pub(super) type PartRanks = Arc<[usize]>;

/// For each variable that is a shard, the ranks that hold the other shards, for each axis that cuts it.
static ROWS: LazyLock<Mutex<HashMap<TensorId, Arc<[PartRanks]>>>> = LazyLock::new(Mutex::default);

fn lock() -> MutexGuard<'static, HashMap<TensorId, Arc<[PartRanks]>>> {
    ROWS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A variable that is this rank's shard of a parameter: other ranks hold other parts of it.
///
/// While a clone of this value lives, [`sync_params`](crate::sync_params),
/// [`verify_parameter_shapes`](crate::verify_parameter_shapes) and [`DataParallel`](crate::DataParallel) refuse the variable for a
/// group that contains two of these ranks, and [`ClipGradNorm`](crate::ClipGradNorm) refuses it if it does not sum over them.
/// candle-shard keeps such a value in each `DTensor`, `ShardedTensor` and `RowVar` that is a variable. Make your own for shards that you cut by hand.
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use candle_dist::{Result, ShardedVar, SyncOptions, World, sync_params};
///
/// let errors = World::threads(2).run(|ctx| -> Result<String> {
///     let mesh = ctx.mesh(&[("tp", 2)])?;
///     let half = Var::zeros(3, DType::F32, &Device::Cpu)?; // of a vector of 6
///     let _shard = ShardedVar::new(&half, &mesh, [0]);
///     let error = sync_params(ctx.group(), &[("weight", half)], &SyncOptions::default()).unwrap_err();
///     Ok(error.to_string())
/// })?;
/// assert!(errors[1].contains("\"weight\" is a shard, and ranks [0, 1] hold other parts of the parameter"));
/// assert_eq!(errors[0], errors[1]);
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
#[must_use = "the variable counts as a shard only while this value lives"]
#[derive(Clone)]
pub struct ShardedVar(Arc<ShardedEntry>);

/// The entry of a variable in the list, which ends when this is dropped.
struct ShardedEntry(TensorId, Arc<[PartRanks]>);

impl ShardedVar {
    /// Declares that each rank along these axes of the mesh holds another part than `var`. Axes of one rank count for nothing.
    ///
    /// Creates no groups and sends nothing.
    pub fn new(var: &Var, mesh: &DeviceMesh, axes: impl IntoIterator<Item = usize>) -> Self {
        let rows = axes.into_iter().filter(|&axis| mesh.shape().get(axis).is_some_and(|&size| size > 1));
        Self::of(var, rows.map(|axis| mesh.ranks_along(&[axis]).into()).collect())
    }

    /// Declares that each rank of `group` holds another part than `var`, or none.
    pub fn over(var: &Var, group: &ProcessGroup) -> Self {
        Self::of(var, (group.size() > 1).then(|| group.ranks().into()).into_iter().collect())
    }

    fn of(var: &Var, rows: Vec<PartRanks>) -> Self {
        let rows: Arc<[PartRanks]> = rows.into();
        lock().insert(var.id(), rows.clone());
        Self(Arc::new(ShardedEntry(var.id(), rows)))
    }
}

impl Drop for ShardedEntry {
    fn drop(&mut self) {
        // A later declaration of the same variable stays.
        let mut all = lock();
        if all.get(&self.0).is_some_and(|rows| Arc::ptr_eq(rows, &self.1)) {
            all.remove(&self.0);
        }
    }
}

impl fmt::Debug for ShardedVar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ShardedVar").field(&self.0.0).finish()
    }
}

/// Returns for each axis that cuts a variable the ranks that hold different parts; nothing for other variables.
pub(super) fn rows_of(variable: &Tensor) -> Option<Arc<[PartRanks]>> {
    if !variable.is_variable() {
        return None;
    }
    lock().get(&variable.id()).filter(|rows| !rows.is_empty()).cloned()
}

/// Returns why ranks of `group` hold different parameters of the name, if two of them are in one of its `rows`.
pub(super) fn conflict(name: &str, rows: &[impl AsRef<[usize]>], group: &[usize]) -> Option<String> {
    let row = rows
        .iter()
        .map(AsRef::as_ref)
        .find(|row| row.iter().filter(|rank| group.contains(rank)).count() > 1)?;
    let fix = "give a group whose ranks hold the same part, such as another axis of the mesh";
    Some(format!("{name} is a shard, and ranks {row:?} hold other parts of the parameter; {fix}"))
}
