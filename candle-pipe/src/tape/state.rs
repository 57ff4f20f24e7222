//! The variables of a stage that its forward passes change, such as running statistics and codebooks.
use super::StageModule;
use crate::Result;
use crate::graph::Ctx;
use candle_core::backprop::GradStore;
use candle_core::{Tensor, TensorId, Var};
use candle_dist::bits::{digest, same_elements};
use std::collections::{BTreeMap, HashSet};

/// What the passes of a stage have shown of its variables.
#[derive(Default)]
pub(super) struct StageState {
    /// The small variables without a gradient, and those that a forward pass has changed, by name.
    buffers: BTreeMap<String, Buffer>,
    /// The other variables. As far as is known, only optimizers change them.
    fixed: HashSet<TensorId>,
    /// The step of the last forward pass.
    step: Option<u64>,
}

/// The number of elements from which on a variable is not copied before a forward pass has changed it. Statistics and
/// codebooks are smaller, frozen weights may be larger.
const LARGE: usize = 1 << 22;

struct Buffer {
    var: Var,
    /// A copy of its last known value.
    value: Tensor,
    /// Whether a forward pass has changed it.
    is_moving: bool,
}

/// Variables with copies of their values; passes between which they do not change share the copies.
#[derive(Default)]
pub(super) struct VariableSnapshot(Vec<(Var, Tensor)>);

impl StageState {
    /// Drops the copies of variables that turn out to have gradients and that no forward pass has changed.
    pub(super) fn found(&mut self, grads: &GradStore) {
        let fixed = &mut self.fixed;
        self.buffers.retain(|_, Buffer { var, is_moving, .. }| {
            let stays = *is_moving || grads.get(var).is_none();
            if !stays {
                fixed.insert(var.id());
            }
            stays
        });
    }

    /// Returns the present values of the buffers.
    fn snapshot(&mut self) -> Result<VariableSnapshot> {
        for Buffer { var, value, .. } in self.buffers.values_mut() {
            if !same_elements(&var.as_detached_tensor(), value)? {
                *value = copy(var)?;
            }
        }
        Ok(VariableSnapshot(
            self.buffers.values().map(|buffer| (buffer.var.clone(), buffer.value.clone())).collect(),
        ))
    }
}

impl VariableSnapshot {
    /// Runs `f` with these values. Afterwards the variables have their present ones again.
    pub(super) fn during<R>(&self, f: impl FnOnce() -> Result<R>) -> Result<R> {
        let mut now = Vec::with_capacity(self.0.len());
        for (var, value) in &self.0 {
            if same_elements(&var.as_detached_tensor(), value)? {
                now.push(value.clone());
            } else {
                now.push(copy(var)?);
                var.set(value)?;
            }
        }
        let made = f();
        self.0.iter().zip(&now).try_for_each(|((var, _), value)| var.set(value))?;
        made
    }
}

fn copy(variable: &Tensor) -> Result<Tensor> {
    Ok(variable.detach().force_contiguous()?)
}

/// Runs the forward pass `run` of a stage. Also returns the values that its buffers had before; `None` if the pass changes a
/// variable that was not copied before. Ranks with parts of the stage have the same answer, because they share its calls: where one has
/// changed a row of a table that others lack, none runs the stage again.
///
/// `reached` returns the variables on which the results depend.
pub(super) fn watched<R>(
    stage: &StageModule,
    ctx: &Ctx,
    run: impl FnOnce() -> Result<R>,
    reached: impl FnOnce(&R) -> HashSet<TensorId>,
) -> Result<(R, Option<VariableSnapshot>)> {
    let (is_first, due, mut before) = {
        let mut state = stage.state().borrow_mut();
        let is_first = state.step.replace(ctx.step) != Some(ctx.step);
        // To read all weights in every pass, or from another device, is slow.
        let is_due = |variable: &Tensor| match state.fixed.contains(&variable.id()) {
            true => is_first && variable.device().is_cpu(),
            false => true,
        };
        let due =
            stage.variables().iter().filter(|(_, variable)| variable.elem_count() > 0 && is_due(variable));
        let due = due.filter(|(name, _)| !state.buffers.contains_key(*name));
        (is_first, due.collect::<Vec<_>>(), state.snapshot()?)
    };
    let digests = || due.iter().map(|(_, variable)| Ok(digest(variable)?)).collect::<Result<Vec<_>>>();
    let digests_before = digests()?;
    let made = run()?;
    let digests_after = digests()?;

    let mut state = stage.state().borrow_mut();
    let is_new = due.iter().any(|(_, variable)| !state.fixed.contains(&variable.id()));
    let reached = if is_new { reached(&made) } else { HashSet::new() };
    let mut is_known = true;
    for ((name, variable), (old, new)) in due.into_iter().zip(digests_before.iter().zip(&digests_after)) {
        let (id, is_moving) = (variable.id(), old != new);
        let is_fixed = state.fixed.contains(&id) || reached.contains(&id) || variable.elem_count() >= LARGE;
        if is_fixed && !is_moving {
            state.fixed.insert(id);
            continue;
        }
        let (var, value) = (Var::from_tensor(variable)?, copy(variable)?);
        if is_moving {
            is_known = false;
        } else {
            before.0.push((var.clone(), value.clone()));
        }
        state.buffers.insert(name.clone(), Buffer { var, value, is_moving });
    }
    // A later backward pass must not mistake it for a variable that only optimizers change.
    for buffer in state.buffers.values_mut().filter(|buffer| !buffer.is_moving) {
        buffer.is_moving = !same_elements(&buffer.var.as_detached_tensor(), &buffer.value)?;
    }
    drop(state);
    // Variables that are not copied are read in the first pass of a step only.
    if let Some(ranks) = stage.ranks()?.filter(|_| is_first) {
        let ranks = ranks.with_description("the comparison of what a recomputed stage has changed");
        let is_alike = ranks.compare(if is_known { "nothing else" } else { "more" })?.is_none();
        is_known = is_known && is_alike;
    }
    Ok((made, is_known.then_some(before)))
}
