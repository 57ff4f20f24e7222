//! What a builder knows of the units of a model.
use super::FullyShardOptions;
use super::shared::Shared;
use super::unit::Unit;
use crate::DTensor;
use crate::layout::{Placement, Shard};
use candle_dist::{DeviceMesh, ProcessGroup};
use std::sync::Arc;

/// An axis over which parameters are fully sharded, with its units.
pub(crate) struct Sharder {
    pub(crate) axis: usize,
    shared: Arc<Shared<Unit>>,
}

impl Sharder {
    pub(crate) fn new(axis: usize, group: &ProcessGroup, options: FullyShardOptions) -> Self {
        Self { axis, shared: Arc::new(Shared::new(axis, group, options)) }
    }

    /// Returns the options of all units.
    pub(crate) fn options(&self) -> FullyShardOptions {
        self.shared.options
    }

    /// Adds a unit.
    pub(crate) fn unit(&self) -> Arc<Unit> {
        self.shared.add(|number| Arc::new(Unit::new(self.shared.clone(), number)))
    }

    /// Returns the unit that gathers this weight.
    pub(crate) fn owner(&self, weight: &DTensor) -> Option<Arc<Unit>> {
        self.shared.units().into_iter().find(|unit| unit.has(weight))
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
