//! State that the units of one model share.
use super::FullyShardOptions;
use crate::Result;
use crate::autograd::{off_graph, shared};
use crate::layout::Axes;
use crate::tensor::Variable;
use candle_core::{Tensor, Var};
use candle_dist::{DeviceMesh, PendingTensors, ProcessGroup, sum_dtype};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// The axes over which parameters are fully sharded, and the units `U` in the order of their construction.
pub(super) struct UnitList<U> {
    /// From the outermost to the innermost.
    pub(super) axes: Vec<usize>,
    /// The ranks of all these axes.
    pub(super) group: ProcessGroup,
    pub(super) options: FullyShardOptions,
    units: Mutex<Vec<Weak<U>>>,
    progress: Mutex<Progress>,
}

/// The position of a pass in the units.
#[derive(Default)]
pub(super) struct Progress {
    /// The unit that ran last.
    pub(super) last: Option<usize>,
    /// Gradients whose reduce_scatter is running.
    pub(super) reducing: Option<PendingReduction>,
}

/// This rank's piece of a parameter.
#[derive(Clone)]
pub(super) struct ParameterPiece {
    pub(super) var: Var,
    pub(super) variable: Arc<Variable>,
    pub(super) mesh: DeviceMesh,
    /// Other axes, on which each rank has a part of the gradient of the piece.
    pub(super) partial: Axes,
}

impl ParameterPiece {
    /// Adds to the gradient of this piece.
    pub(super) fn add(&self, grad: &Tensor) -> Result<()> {
        match self.partial {
            0 => Ok(off_graph::add(self.var.id(), grad)?),
            axes => shared::add(&self.mesh, axes, &self.variable, grad),
        }
    }
}

/// Gradients on their way to the ranks that hold the pieces.
pub(super) struct PendingReduction {
    pub(super) pieces: Vec<ParameterPiece>,
    pub(super) sums: PendingTensors,
    /// Whether all parameters have gradients; otherwise the last sums are the numbers of ranks that have each of them.
    pub(super) has_all: bool,
    pub(super) group: ProcessGroup,
}

impl PendingReduction {
    /// Adds the sums to the gradients that the backward pass collects.
    pub(super) fn finish(self) -> Result<()> {
        let mut sums = self.sums.wait()?;
        let mut present = vec![1.0; self.pieces.len()];
        if let Some(last) = sums.pop_if(|_| !self.has_all) {
            present = self.group.to_host(&last)?.flatten_all()?.to_vec1::<f32>()?;
        }
        let sums = self.pieces.iter().zip(sums).zip(present);
        for ((piece, sum), _) in sums.filter(|(_, present)| *present > 0.0) {
            piece.add(&sum.to_dtype(sum_dtype(piece.var.dtype()))?)?;
        }
        Ok(())
    }
}

impl<U> UnitList<U> {
    pub(super) fn new(axes: Vec<usize>, group: &ProcessGroup, options: FullyShardOptions) -> Self {
        let (units, progress) = (Mutex::default(), Mutex::default());
        Self { axes, group: group.clone(), options, units, progress }
    }

    /// Adds the unit that `make` creates from its number.
    pub(super) fn add(&self, make: impl FnOnce(usize) -> Arc<U>) -> Arc<U> {
        let mut units = lock(&self.units);
        let unit = make(units.len());
        units.push(Arc::downgrade(&unit));
        unit
    }

    /// Returns the unit with this number.
    pub(super) fn find(&self, number: usize) -> Option<Arc<U>> {
        lock(&self.units).get(number)?.upgrade()
    }

    /// Returns the units that still exist.
    pub(super) fn units(&self) -> Vec<Arc<U>> {
        lock(&self.units).iter().filter_map(Weak::upgrade).collect()
    }

    pub(super) fn progress(&self) -> MutexGuard<'_, Progress> {
        lock(&self.progress)
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
