//! Runs of units: whole while their part of the model computes.
use super::nodes::UnitEnd;
use super::shared::lock;
use super::unit::Unit;
use crate::Result;
use crate::autograd::order::{self, NodeSpan};
use crate::autograd::{counts, nesting};
use candle_core::{DType, Tensor};
use candle_dist::backend::{Fresh, Ready};
use candle_dist::{ReduceOp, TensorTree};
use std::sync::Arc;

/// A running call, which ends when this is dropped, even on a panic.
struct RunGuard<'a>(&'a Unit);

impl<'a> RunGuard<'a> {
    fn new(unit: &'a Unit) -> Self {
        lock(&unit.state).running += 1;
        Self(unit)
    }
}

impl Drop for RunGuard<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.running = state.running.saturating_sub(1); // a failed backward pass resets it
    }
}

/// Returns whether a result has a gradient.
fn is_tracked(made: &impl TensorTree) -> bool {
    made.tensors().into_iter().any(Tensor::track_op)
}

impl Unit {
    /// Runs `f` while the parameters are whole.
    pub(super) fn run<T: TensorTree>(self: &Arc<Self>, f: impl FnOnce() -> Result<T>) -> Result<T> {
        if nesting::is_recomputing() {
            // The backward pass continues into this run.
            self.open()?;
            return self.marked(f);
        }
        if lock(&self.state).running == 0 {
            let last = self.shared.progress().last.replace(self.number);
            // A prefetch that was started before another unit ran, or before a step, may be older than the parameters.
            let is_next = last.map(|last| last + 1) == Some(self.number);
            lock(&self.state).coming.take_if(|coming| !is_next || coming.changes != counts::changes());
            if self.is_stale()? {
                lock(&self.state).coming = None;
            }
            self.gather()?;
            self.prefetch(Some(self.number + 1))?;
        }
        let running = RunGuard::new(self);
        let made = self.marked(f);
        drop(running);
        let is_kept =
            matches!(&made, Ok(made) if is_tracked(made)) && !self.shared.options.reshard_after_forward;
        if lock(&self.state).running == 0 && !is_kept {
            self.release()?;
        }
        made
    }

    /// Runs `f`; the backward pass of each of its results makes the unit whole before entering it.
    fn marked<T: TensorTree>(self: &Arc<Self>, f: impl FnOnce() -> Result<T>) -> Result<T> {
        order::ask();
        let segments = counts::segments();
        let (made, span) = NodeSpan::of(f)?;
        let made = made?;
        if !is_tracked(&made) {
            return Ok(made);
        }
        let stays = counts::segments() != segments || lock(&self.held).iter().any(|held| held.is_frozen);
        made.map_tensors(|made| {
            if !made.track_op() {
                return Ok(made.clone());
            }
            let end = UnitEnd { unit: self.clone(), span, stays, made: Ready::new(Fresh::copy_of(made)?) };
            Ok(made.apply_op1(end)?)
        })
    }

    /// Returns whether any rank's parameters have changed since the prefetch.
    ///
    /// Writes to a variable, by an optimizer of candle or by `Var::set`, cannot be observed, so values are compared. A
    /// rank may find no change where another one does, for example in an empty piece, so the ranks agree. The host reads
    /// one number of the device, unless the options say that nobody writes so.
    fn is_stale(&self) -> Result<bool> {
        if !self.shared.options.foreign_writes {
            return Ok(false);
        }
        let group = self.group();
        let state = lock(&self.state);
        let held = lock(&self.held);
        let (Some(coming), Some(first)) = (&state.coming, held.first()) else { return Ok(false) };
        let mut changes = Vec::with_capacity(held.len());
        let cut = held.iter().filter(|held| held.cut.is_some());
        for (held, sent) in cut.zip(&coming.sent).filter(|(_, sent)| sent.elem_count() > 0) {
            let now = held.piece.var.as_detached_tensor().to_dtype(sent.dtype())?;
            changes.push(now.ne(sent)?.flatten_all()?.max_keepdim(0)?);
        }
        let changed = match &changes[..] {
            [] => Tensor::zeros(1, DType::U32, first.whole.device())?,
            changes => Tensor::cat(changes, 0)?.max_keepdim(0)?.to_dtype(DType::U32)?,
        };
        let changed = if group.size() == 1 { changed } else { group.all_reduce(&changed, ReduceOp::Max)? };
        Ok(group.to_host(&changed)?.to_vec1::<u32>()?[0] > 0)
    }
}
