//! State that the units of one model share.
use super::FullyShardOptions;
use super::pass::Reducing;
use super::unit::Unit;
use crate::DTensor;
use crate::layout::{Placement, Shard};
use candle_dist::{DeviceMesh, ProcessGroup};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// An axis over which parameters are fully sharded, and the units in the order of their construction.
pub(crate) struct Sharder {
    pub(crate) axis: usize,
    pub(super) group: ProcessGroup,
    pub(crate) options: FullyShardOptions,
    units: Mutex<Vec<Weak<Unit>>>,
    progress: Mutex<Progress>,
}

/// The position of a pass in the units.
#[derive(Default)]
pub(super) struct Progress {
    /// The unit that ran last.
    pub(super) last: Option<usize>,
    /// Gradients whose reduce_scatter is running.
    pub(super) reducing: Option<Reducing>,
}

impl Sharder {
    pub(crate) fn new(axis: usize, group: &ProcessGroup, options: FullyShardOptions) -> Self {
        let (units, progress) = (Mutex::default(), Mutex::default());
        Self { axis, group: group.clone(), options, units, progress }
    }

    /// Adds a unit.
    pub(crate) fn unit(self: &Arc<Self>) -> Arc<Unit> {
        let mut units = lock(&self.units);
        let unit = Arc::new(Unit::new(self.clone(), units.len()));
        units.push(Arc::downgrade(&unit));
        unit
    }

    /// Returns the unit with this number.
    pub(super) fn find(&self, number: usize) -> Option<Arc<Unit>> {
        lock(&self.units).get(number)?.upgrade()
    }

    /// Returns the units that still exist.
    pub(super) fn units(&self) -> Vec<Arc<Unit>> {
        lock(&self.units).iter().filter_map(Weak::upgrade).collect()
    }

    /// Returns the unit that gathers this weight.
    pub(crate) fn owner(&self, weight: &DTensor) -> Option<Arc<Unit>> {
        self.units().into_iter().find(|unit| unit.has(weight))
    }

    pub(super) fn progress(&self) -> MutexGuard<'_, Progress> {
        lock(&self.progress)
    }

    /// Returns how this axis cuts a parameter with `rank` dims that `placements` cut on the other axes of `mesh`.
    ///
    /// It is cut along its first dim that no inner axis cuts, so that pieces of pieces join in order; `None` if there
    /// is no such dim.
    pub(crate) fn placement(&self, mesh: &DeviceMesh, placements: &[Placement], rank: usize) -> Option<Placement> {
        let inner = |shard| (self.axis + 1..mesh.ndim()).any(|a| mesh.shape()[a] > 1 && placements[a] == shard);
        (0..rank).map(Shard).find(|&shard| !inner(shard))
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
