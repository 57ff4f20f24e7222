//! What a builder knows of the units of a model.
use super::FullyShardOptions;
use super::shared::{UnitList, lock};
use super::unit::Unit;
use crate::DTensor;
use crate::layout::{Placement, Shard};
use candle_dist::{DeviceMesh, ProcessGroup};
use std::sync::{Arc, Mutex, Weak};

/// The axes over which parameters are fully sharded, with their units.
pub(crate) struct Sharder {
    shared: Arc<UnitList<Unit>>,
    /// The units of all models of the same parameters.
    all: Arc<Mutex<Vec<Weak<Unit>>>>,
}

impl Sharder {
    /// Shards over `axes`, from the outermost to the innermost, whose ranks are those of `group`.
    pub(crate) fn new(axes: Vec<usize>, group: &ProcessGroup, options: FullyShardOptions) -> Self {
        Self { shared: Arc::new(UnitList::new(axes, group, options)), all: Arc::default() }
    }

    /// Returns the same for another model of the same parameters. A unit is not the neighbor of those of other models, which
    /// some ranks may still have and others not.
    pub(crate) fn again(&self) -> Self {
        let UnitList { axes, group, options, .. } = &*self.shared;
        Self { shared: Arc::new(UnitList::new(axes.clone(), group, *options)), all: self.all.clone() }
    }

    /// Returns the axes, from the outermost to the innermost.
    pub(crate) fn axes(&self) -> &[usize] {
        &self.shared.axes
    }

    /// Returns the ranks of all axes.
    pub(crate) fn group(&self) -> &ProcessGroup {
        &self.shared.group
    }

    /// Returns the number of ranks of all axes.
    pub(crate) fn size(&self) -> usize {
        self.shared.group.size()
    }

    /// Returns the options of all units.
    pub(crate) fn options(&self) -> FullyShardOptions {
        self.shared.options
    }

    /// Adds a unit that is built at this path.
    pub(crate) fn unit(&self, path: &str) -> Arc<Unit> {
        let unit = self.shared.add(|number| Arc::new(Unit::new(self.shared.clone(), number, path)));
        let mut all = lock(&self.all);
        all.retain(|unit| unit.strong_count() > 0);
        all.push(Arc::downgrade(&unit));
        unit
    }

    /// Returns the unit that gathers this weight.
    pub(crate) fn owner(&self, weight: &DTensor) -> Option<Arc<Unit>> {
        lock(&self.all).iter().filter_map(Weak::upgrade).find(|unit| unit.has(weight))
    }

    /// Returns how these axes cut a parameter with `rank` dims that `placements` cut on the other axes of `mesh`.
    ///
    /// It is cut along its first dim that no axis further in cuts, so that pieces of pieces join in order; `None` if
    /// there is no such dim.
    pub(crate) fn placement(
        &self,
        mesh: &DeviceMesh,
        placements: &[Placement],
        rank: usize,
    ) -> Option<Placement> {
        let others = (self.axes()[0] + 1..mesh.ndim()).filter(|axis| !self.axes().contains(axis));
        let inner = |shard| others.clone().any(|axis| mesh.shape()[axis] > 1 && placements[axis] == shard);
        (0..rank).map(Shard).find(|&shard| !inner(shard))
    }
}
