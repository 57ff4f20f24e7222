//! The gradient state of a tensor: what its gradient is on each axis, and which uses share communication.
//!
//! # What the gradient of a tensor is
//!
//! candle differentiates each rank's local program. So the gradient of a local tensor is laid out, and the placement of
//! the tensor on an axis says how:
//!
//! | the tensor on an axis | bit of `varying` | its gradient there |
//! |---|---|---|
//! | `Shard(d)` | 0 | the shard |
//! | `Partial(op)` | 0 | replicated |
//! | `Replicate`, *invariant* | 0 | replicated |
//! | `Replicate`, *varying* | 1 | a partial sum: each rank has a part |
//!
//! Everything that makes a tensor keeps this true:
//!
//! - **Leaves** are invariant, unless [`DTensor::varying_on`] says that their gradients are summed later.
//! - **Ops** (`rules/op_spec.rs`): where the output is not `Replicate`, each rank computes only a part of the gradient of a
//!   replicated input. So such an input is used through its *varying view*, an identity whose backward is an all_reduce.
//!   Where the output is `Replicate` and an input varies, all replicated inputs are used through varying views, and the
//!   output varies.
//! - **Moves** (`redistribute/table.rs`, `redistribute/moves.rs`): a gather gives an invariant tensor with a slice as its
//!   backward, or a varying one with a reduce_scatter. All other moves of an axis clear its bit.
//! - **[`DTensor::backward`]** (`redistribute/whole.rs`) seeds a varying loss with 1 on the first rank of the axis and
//!   with 0 on the others.
//! - A tensor without a gradient counts as invariant, whatever its bits: [`DTensor::varying`].
//!
//! # What uses share
//!
//! A tracked tensor has a [`Trail`], in which its varying views and the results of its moves are kept: several uses make
//! one communication, also in the backward pass. There is no trail where the memory is that of a variable
//! (`in_variable`): an optimizer writes there, and a kept copy would be old. Each use of such a tensor is a copy
//! ([`DTensor::used`]) that knows its [`Origin`]; `autograd/shared.rs` sums the gradients of all copies once.
use super::dtensor::{DTensor, Origin, Trail, Variable};
use super::lineage::Lineage;
use super::registry::VarRegistry;
use crate::layout::{Axes, Placement, Replicate, Spec};
use crate::{Error, Result};
use candle_core::Tensor;
use candle_dist::{FreeableTensor, ProcessGroup};
use std::sync::{Arc, PoisonError};

impl DTensor {
    /// Marks this tensor as made of `source` without a copy: if that is a parameter's memory, so is this.
    pub(crate) fn aliasing(mut self, source: &Self) -> Self {
        if source.in_variable {
            (self.in_variable, self.trail) = (true, None);
            self.shard = source.shard.clone();
        }
        self
    }

    /// Creates a parameter whose memory changes between uses, so that no copy of it may be cached.
    pub(crate) fn parameter(local: Tensor, spec: Spec) -> Self {
        Self { trail: None, in_variable: true, ..Self::leaf(local, spec.shared()) }
    }

    /// Creates a view of this tensor that is varying on `varying`, and shares the cache of views.
    pub(crate) fn viewed(&self, local: Tensor, varying: Axes) -> Self {
        let Self { spec, trail, in_variable, lineage, .. } = self.clone();
        Self { local, spec, varying, trail, leaf: false, in_variable, made_of: None, lineage, shard: None }
    }

    /// Creates a copy of this variable for one use that is varying on `varying`.
    pub(crate) fn used(&self, local: Tensor, varying: Axes, used: (Origin, Axes)) -> Self {
        let trail = Some(Arc::new(Trail { used: Some(used), ..Trail::default() }));
        let Self { spec, lineage, .. } = self.clone();
        Self {
            local,
            spec,
            varying,
            trail,
            leaf: false,
            in_variable: false,
            made_of: None,
            lineage,
            shard: None,
        }
    }

    /// Marks this tensor as the parameter `name`.
    pub(crate) fn named(self, name: &str) -> Self {
        Self { lineage: Lineage::of_parameter(name), ..self }
    }

    /// Marks this tensor as the result of a move of `axes` of `source`.
    pub(crate) fn moved_from(mut self, source: &Self, axes: Axes) -> Self {
        self.lineage = source.lineage.moved(axes, &self.spec);
        self
    }

    /// Refuses a fully sharded parameter, or a view of it, whose memory is free.
    pub(crate) fn check_memory(&self, op: &'static str) -> Result<()> {
        // Reading the storage takes a lock, so it is done only where memory can be freed. A view that was given as a local
        // tensor is found when candle has failed.
        if !self.in_variable || self.local.is_variable() {
            return Ok(());
        }
        self.memory_error(op).map_or(Ok(()), Err)
    }

    /// Returns an error if the memory is free.
    pub(crate) fn memory_error(&self, op: &'static str) -> Option<Error> {
        if FreeableTensor::has_memory(&self.local) {
            return None;
        }
        let name = self.lineage.first().unwrap_or("a parameter");
        let fix = "whole only while FullyShard::run runs; use it there, and return all that depends on it from there";
        let reason = format!("{name} is read outside of its unit, where it has no memory: it is {fix}");
        Some(Error::Op { op, reason })
    }

    /// Returns a group of the ranks of `axes` whose calls carry what this tensor was computed from.
    pub(crate) fn described(&self, group: ProcessGroup, axes: Axes) -> ProcessGroup {
        match self.lineage.description(axes) {
            Some(description) => group.with_description(description),
            None => group,
        }
    }

    /// Returns a group of the ranks of `axes` whose calls carry what all of `inputs` were computed from.
    ///
    /// An input that each rank has computed from its own data on these axes is left out.
    pub(crate) fn described_by(inputs: &[Self], group: ProcessGroup, axes: Axes) -> ProcessGroup {
        let alike = inputs.iter().filter(|input| input.lineage.is_alike(axes)).map(|input| &input.lineage);
        let joined = inputs.first().map(|first| Lineage::of_all(alike, &first.spec));
        match joined.and_then(|lineage| lineage.description(axes)) {
            Some(description) => group.with_description(description),
            None => group,
        }
    }

    /// Marks this tensor as made by a local op from `source`, in the same layout.
    pub(crate) fn made_locally_of(mut self, source: &Self) -> Self {
        if source.in_variable && source.tracked() {
            self.made_of = source.variable();
        }
        self
    }

    /// Returns the variable that this is, or from which local ops made it without a copy that may be cached.
    pub(crate) fn origin(&self) -> Option<Origin> {
        if !self.in_variable || self.trail.is_some() {
            return None;
        }
        let view = (!self.local.is_variable()).then(|| self.local.clone());
        self.variable().map(|variable| Origin { variable, view })
    }

    /// Returns the variable that this is, or from which local ops made it.
    pub(crate) fn variable(&self) -> Option<Arc<Variable>> {
        let itself = || Arc::new(Variable { tensor: self.local.clone(), name: None, ordinal: None });
        self.made_of.clone().or_else(|| self.local.is_variable().then(itself))
    }

    /// Names this variable, so that ranks know which one it is.
    pub(crate) fn registered(mut self, registry: &Arc<VarRegistry>, name: &str) -> Self {
        let name = registry.add(name, &self.local, &self.spec, self.varying);
        self.made_of =
            Some(Arc::new(Variable { tensor: self.local.clone(), name: Some(name), ordinal: None }));
        self
    }

    /// Returns whether this was given or made by a factory, not the result of an op.
    pub(crate) fn is_leaf(&self) -> bool {
        self.leaf
    }

    /// Returns whether the memory is that of a parameter.
    pub(crate) fn is_in_variable(&self) -> bool {
        self.in_variable
    }

    pub(crate) fn gathered_from(mut self, source: &DTensor, axis: usize) -> Self {
        if self.trail.is_some() {
            self.trail = Some(Arc::new(Trail { gathered: Some((source.clone(), axis)), ..Trail::default() }));
        }
        self
    }

    /// Leaves the gradient of this leaf on `axis` as a partial sum, to be reduced later with others in one call.
    ///
    /// The tensor must be `Replicate` on the axis. See [`nn::Parameters::reduce`](crate::nn::Parameters::reduce).
    ///
    /// # Errors
    /// If it is not replicated there, or is the result of an op with a gradient: the op's gradient would be mistaken
    /// for the whole one.
    pub fn varying_on(mut self, axis: usize) -> Result<Self> {
        if self.tracked() && !self.leaf {
            return Err(Error::Layout(format!(
                "{} is the result of an op, so its gradient on axis {axis} is what the op takes it for; let the leaves \
                 that it is made of vary",
                self.spec
            )));
        }
        if self.placements().get(axis) != Some(&Replicate) {
            return Err(Error::Layout(format!(
                "{} is not replicated on axis {axis}, so cannot vary there; redistribute it first",
                self.spec
            )));
        }
        self.varying |= 1 << axis;
        Ok(self)
    }

    /// Returns whether the gradient on a replicated axis is a partial sum.
    pub fn is_varying(&self, axis: usize) -> bool {
        1u32.checked_shl(axis as u32).is_some_and(|bit| self.varying & bit != 0)
    }

    pub(crate) fn varying(&self) -> Axes {
        if self.tracked() { self.varying } else { 0 }
    }

    pub(crate) fn tracked(&self) -> bool {
        self.local.track_op()
    }

    pub(crate) fn trail(&self) -> Option<&Trail> {
        self.trail.as_deref()
    }

    /// Returns a cached view that is varying on exactly these axes, or makes one.
    pub(crate) fn view(&self, axes: Axes, make: impl FnOnce() -> Result<Tensor>) -> Result<Tensor> {
        let Some(trail) = &self.trail else { return make() };
        let mut views = trail.views.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, view)) = views.iter().find(|(a, _)| *a == axes) {
            return Ok(view.clone());
        }
        let view = make()?;
        views.push((axes, view.clone()));
        Ok(view)
    }

    /// Returns the result of an earlier move to default sizes, or makes one and caches it.
    ///
    /// `make` must not return a tensor whose trail refers to this one: the two would keep each other alive.
    pub(crate) fn kept_move(
        &self,
        (axes, to, varying): (Axes, Placement, Axes),
        make: impl FnOnce() -> Result<Self>,
    ) -> Result<Self> {
        let Some(trail) = &self.trail else { return make() };
        let mut moved = trail.moved.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((.., made)) = moved.iter().find(|(a, p, v, _)| (*a, *p, *v) == (axes, to, varying)) {
            return Ok(made.clone());
        }
        let made = make()?;
        moved.push((axes, to, varying, made.clone()));
        Ok(made)
    }

    /// Returns this tensor detached from the graph.
    pub fn detach(&self) -> Self {
        let detached = DTensor::assemble(self.to_local().detach(), self.shared_spec().clone(), 0);
        detached.aliasing(self).moved_from(self, 0)
    }
}
