//! What the units of one model have in common.
use super::FullyShardOptions;
use super::unit::{Reducing, Unit};
use crate::DTensor;
use crate::placement::{Placement, Shard};
use candle_dist::{DeviceMesh, ProcessGroup};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// An axis over which parameters are sharded fully, and the units in the order in which they were built.
pub(crate) struct Sharder {
    pub(crate) axis: usize,
    pub(super) group: ProcessGroup,
    pub(crate) options: FullyShardOptions,
    units: Mutex<Vec<Weak<Unit>>>,
    progress: Mutex<Progress>,
}

/// Where a pass through the units is.
#[derive(Default)]
pub(super) struct Progress {
    /// The unit that ran last.
    pub(super) last: Option<usize>,
    /// Gradients under way.
    pub(super) reducing: Option<Reducing>,
}

impl Sharder {
    pub(crate) fn new(axis: usize, group: &ProcessGroup, options: FullyShardOptions) -> Self {
        let (units, progress) = (Mutex::default(), Mutex::default());
        Self { axis, group: group.clone(), options, units, progress }
    }

    /// A further unit.
    pub(crate) fn unit(self: &Arc<Self>) -> Arc<Unit> {
        let mut units = lock(&self.units);
        let unit = Arc::new(Unit::new(self.clone(), units.len()));
        units.push(Arc::downgrade(&unit));
        unit
    }

    /// The unit of this number.
    pub(super) fn find(&self, number: usize) -> Option<Arc<Unit>> {
        lock(&self.units).get(number)?.upgrade()
    }

    /// The units that there still are.
    pub(super) fn units(&self) -> Vec<Arc<Unit>> {
        lock(&self.units).iter().filter_map(Weak::upgrade).collect()
    }

    /// The unit that makes this weight whole.
    pub(crate) fn owner(&self, weight: &DTensor) -> Option<Arc<Unit>> {
        self.units().into_iter().find(|unit| unit.has(weight))
    }

    pub(super) fn progress(&self) -> MutexGuard<'_, Progress> {
        lock(&self.progress)
    }

    /// How a parameter with `rank` dims, cut as `placements` say on the other axes of `mesh`, is cut on this one: along its
    /// first dim that no inner axis cuts, so that pieces of pieces join in order; `None` if there is no such dim.
    pub(crate) fn placement(&self, mesh: &DeviceMesh, placements: &[Placement], rank: usize) -> Option<Placement> {
        let inner = |shard| (self.axis + 1..mesh.ndim()).any(|a| mesh.shape()[a] > 1 && placements[a] == shard);
        (0..rank).map(Shard).find(|&shard| !inner(shard))
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
