//! The variables of a builder, by names that are equal on all ranks.
use crate::layout::{Axes, Replicate, Spec};
use candle_core::{Device, Tensor, TensorId};
use candle_dist::sum_dtype;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The number of the next registry.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// The variables of one builder. Ranks may use different ones, or the same ones in different orders.
///
/// What ranks exchange for them is listed by name. It keeps no tensor alive.
pub(crate) struct VarRegistry {
    /// Later registries of a rank have larger numbers.
    pub(crate) number: u64,
    entries: Mutex<BTreeMap<Arc<str>, VarEntry>>,
    /// The variables whose gradient had a part on some rank on these axes; all of them until the ranks know.
    used: Mutex<BTreeMap<Axes, BTreeSet<Arc<str>>>>,
}

/// A variable in a registry.
#[derive(Clone)]
pub(crate) struct VarEntry {
    pub(crate) id: TensorId,
    spec: Arc<Spec>,
    /// The axes on which its gradient stays partial.
    varying: Axes,
    device: Device,
}

/// A variable's name in its registry.
#[derive(Clone)]
pub(crate) struct VarName {
    pub(crate) registry: Arc<VarRegistry>,
    pub(crate) name: Arc<str>,
}

impl VarRegistry {
    pub(crate) fn new() -> Arc<Self> {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Arc::new(Self { number, entries: Mutex::default(), used: Mutex::default() })
    }

    /// Adds a variable in the layout `spec`, whose gradient stays partial on the axes `varying`.
    pub(crate) fn add(
        self: &Arc<Self>,
        name: &str,
        variable: &Tensor,
        spec: &Arc<Spec>,
        varying: Axes,
    ) -> VarName {
        let name: Arc<str> = name.into();
        let entry =
            VarEntry { id: variable.id(), spec: spec.clone(), varying, device: variable.device().clone() };
        lock(&self.entries).insert(name.clone(), entry);
        VarName { registry: self.clone(), name }
    }

    /// Returns the variables whose gradients ranks may have to sum over all of `axes`: first those for which a rank has
    /// had a part in an earlier pass, then the others.
    pub(crate) fn on(&self, axes: Axes) -> [BTreeMap<Arc<str>, VarEntry>; 2] {
        let is_whole = |VarEntry { spec, varying, .. }: &VarEntry| {
            let whole = |axis: usize| spec.placements()[axis] == Replicate || spec.mesh().shape()[axis] == 1;
            varying & axes == 0 && (0..spec.mesh().ndim()).all(|axis| axes & (1 << axis) == 0 || whole(axis))
        };
        let used = lock(&self.used);
        let all = lock(&self.entries);
        let known = used.get(&axes);
        let whole = all
            .iter()
            .filter(|(_, entry)| is_whole(entry))
            .map(|(name, entry)| (name.clone(), entry.clone()));
        let (likely, others) = whole.partition(|(name, _)| known.is_none_or(|known| known.contains(name)));
        [likely, others]
    }

    /// Records variables whose gradient had a part on some rank. All ranks record the same ones.
    pub(crate) fn note_used(&self, axes: Axes, names: impl IntoIterator<Item = Arc<str>>) {
        lock(&self.used).entry(axes).or_default().extend(names);
    }
}

impl VarEntry {
    /// Returns the gradient of a variable that this rank has not used.
    pub(crate) fn zeros(&self) -> candle_core::Result<Tensor> {
        Tensor::zeros(self.spec.local_shape().as_slice(), sum_dtype(self.spec.dtype()), &self.device)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
