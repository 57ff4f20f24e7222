//! What a tensor was computed from: which parameters, and on which axes from each rank's own data.
use crate::layout::{Axes, Spec};
use rustc_hash::FxHasher;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// The parameters from which a tensor was computed, in any order.
///
/// Calls that move the tensor carry them, so that ranks which run different layers get an error and do not mix them. On
/// an axis where the ranks hold their own data, such as rows of a batch, they may use different layers.
#[derive(Clone, Default)]
pub(crate) struct Lineage {
    /// The sum of the hashes of the names.
    sum: u64,
    /// The first name in the order of names.
    first: Option<Arc<str>>,
    /// The axes on which each rank has computed from data of its own.
    by_data: Axes,
}

impl Lineage {
    /// Returns the lineage of a tensor that was given in this layout.
    pub(super) fn of_data(spec: &Spec) -> Self {
        Self { sum: 0, first: None, by_data: spec.cut_axes() }
    }

    /// Returns the lineage of a parameter.
    pub(super) fn of_parameter(name: &str) -> Self {
        Self { sum: hash(name), first: Some(name.into()), by_data: 0 }
    }

    /// Returns the lineage of a tensor in this layout that was computed from others.
    pub(super) fn of_all<'a>(all: impl Iterator<Item = &'a Self>, spec: &Spec) -> Self {
        let mut joined = Self::default();
        for Self { sum, first, by_data } in all {
            joined.sum = joined.sum.wrapping_add(*sum);
            joined.by_data |= by_data;
            if first.is_some() && (joined.first.is_none() || *first < joined.first) {
                joined.first = first.clone();
            }
        }
        joined.by_data &= spec.cut_axes();
        joined
    }

    /// Returns the lineage of this tensor after a move of `axes` to the layout `spec`.
    pub(super) fn moved(&self, axes: Axes, spec: &Spec) -> Self {
        let by_data = self.by_data & spec.cut_axes();
        // The tensors that were joined may have come from different layers.
        let kept = if self.by_data & axes == 0 { self.clone() } else { Self::default() };
        Self { by_data, ..kept }
    }

    /// Returns the first name.
    pub(super) fn first(&self) -> Option<&str> {
        self.first.as_deref()
    }

    /// Returns whether the ranks of `axes` have computed the tensor from the same data.
    pub(super) fn is_alike(&self, axes: Axes) -> bool {
        self.by_data & axes == 0
    }

    /// Returns a description for calls over `axes` that move this tensor.
    pub(super) fn description(&self, axes: Axes) -> Option<Arc<str>> {
        let first = self.first.as_ref().filter(|_| self.is_alike(axes))?;
        Some(match self.sum == hash(first) {
            true => first.clone(),
            false => format!("{first} and more, with the hash {:016x}", self.sum).into(),
        })
    }
}

fn hash(name: &str) -> u64 {
    let mut hasher = FxHasher::default();
    name.hash(&mut hasher);
    hasher.finish()
}
