//! Units in a backward pass: gathered when it reaches them, reduced and dropped when it has left them.
use super::no_sync;
use super::nodes::InPass;
use super::shared::{PendingReduction, lock};
use super::unit::{Unit, UnitParameter, UnitState};
use crate::Result;
use crate::autograd::order::{self, NodeSpan};
use crate::autograd::{hooks, nesting};
use candle_core::backprop::GradStore;
use candle_core::{Tensor, TensorId};
use candle_dist::backend::Cuts;
use candle_dist::{Collective, Cut, GradMark, ReduceOp, add_grad, sum_dtype};
use std::cell::RefCell;
use std::sync::Arc;
use std::thread::LocalKey;

thread_local! {
    /// The units that the backward pass of this thread has reached.
    static OPEN: RefCell<Vec<Arc<Unit>>> = const { RefCell::new(Vec::new()) };
    /// The units that have gradients of earlier passes, in the order in which those have left them.
    static KEPT: RefCell<Vec<Arc<Unit>>> = const { RefCell::new(Vec::new()) };
    /// The mark of the passes that have left them there.
    static JOINED: RefCell<Option<GradMark>> = const { RefCell::new(None) };
}

/// What units do in each backward pass of a thread on which one was reached.
static HOOKS: hooks::Hooks = hooks::Hooks {
    nested_begins: Unit::leave,
    nested_ended: || Unit::leave(None),
    ended: finish,
    failed: discard_grads,
    abandoned: abandon,
};

impl InPass for Unit {
    fn before_backward(self: Arc<Self>, at: TensorId, span: NodeSpan, stays: bool) -> Result<()> {
        Self::leave(order::place(at))?;
        self.open()?;
        let mut state = lock(&self.state);
        // A run has an end for each of its results.
        let is_first = state.inside.is_empty();
        // A recomputed segment that captures a result comes into the run before this pass or after it. Then there may be gradients
        // of all parameters before the pass needs them for the last time.
        let comes_again =
            state.depth != nesting::depth() || is_first && state.grads.iter().any(Option::is_some);
        state.inside.push(span.last());
        state.stays |= stays || comes_again;
        drop(state);
        if is_first { self.prefetch(self.number.checked_sub(1)) } else { Ok(()) }
    }

    fn take_grad(self: Arc<Self>, which: usize, grad: &Tensor) -> Result<()> {
        self.note();
        {
            let (held, mut state) = (lock(&self.held), lock(&self.state));
            state.grads.resize(held.len(), None);
            state.grads[which] = Some(add_grad(state.grads[which].as_ref(), grad)?);
        }
        let is_last = {
            let state = lock(&self.state);
            let is_unneeded = !state.is_whole || !state.stays && state.depth == nesting::depth();
            is_unneeded && self.has_all_grads(&state)
        };
        if is_last { self.reduce() } else { Ok(()) }
    }
}

impl Unit {
    /// Drops the parameters of units when the backward pass, which is at this place, has left their last run.
    ///
    /// It is not enough that the pass has reached the previous unit: a run that uses tensors from several places can
    /// have nodes that candle visits later.
    ///
    /// The pass must be at a node that uses activations, as the ends of runs and recomputed segments do. At the node of a
    /// parameter, ranks could disagree: where the last node of the run is before or after it depends on the number of
    /// nodes that an op is, and that on the rank's rows.
    fn leave(at: Option<usize>) -> Result<()> {
        for unit in OPEN.with_borrow(Vec::clone) {
            let mut state = lock(&unit.state);
            let was_inside = !state.inside.is_empty();
            state.inside.retain(|last| last.is_none_or(|last| !last.is_before(at)));
            if !was_inside || !state.inside.is_empty() {
                continue;
            }
            state.stays = false;
            let has_all = unit.has_all_grads(&state);
            drop(state);
            unit.release()?;
            if has_all {
                unit.reduce()?;
            }
        }
        Ok(())
    }

    /// Returns whether every parameter that can have a gradient has one.
    fn has_all_grads(&self, state: &UnitState) -> bool {
        has_all(&lock(&self.held), &state.grads)
    }

    /// Drops the whole parameters and starts to sum their gradients; finishes the sums of the unit before.
    ///
    /// If this rank lacks the gradient of a parameter, others may have it, so all parameters are summed. Then the call
    /// also carries one number for each: how many ranks have its gradient.
    fn reduce(self: &Arc<Self>) -> Result<()> {
        self.release()?;
        let mut state = lock(&self.state);
        let mut grads = std::mem::take(&mut state.grads);
        state.is_reduced = true;
        drop(state);
        let group = self.group();
        let held = lock(&self.held);
        grads.resize(held.len(), None);
        for (grad, kept) in grads.iter_mut().zip(std::mem::take(&mut *lock(&self.kept))) {
            if let Some(kept) = kept {
                *grad = Some(match grad.take() {
                    Some(grad) => add_grad(Some(&kept), &grad)?,
                    None => kept,
                });
            }
        }
        if no_sync::is_on() {
            *lock(&self.kept) = grads;
            add_once(&KEPT, self);
            return Ok(());
        }
        let has_all = has_all(&held, &grads);
        let (mut pieces, mut wholes, mut cuts, mut present) =
            (Vec::new(), Vec::new(), Cuts::new(), Vec::new());
        for (held, grad) in held.iter().zip(grads).filter(|(held, _)| !held.is_frozen) {
            let Some(cut) = held.cut.clone() else {
                // Its gradient stays partial until `Parameters::reduce`, as those outside of units do.
                let dtype = sum_dtype(held.piece.var.dtype());
                grad.map_or(Ok(()), |grad| held.piece.add(&grad.to_dtype(dtype)?))?;
                continue;
            };
            present.push(f32::from(u8::from(grad.is_some())));
            let whole = &held.whole;
            let zeros = || Tensor::zeros(whole.shape(), sum_dtype(whole.dtype()), whole.device());
            let grad = grad.map_or_else(zeros, Ok)?;
            let dtype = self.shared.options.reduce_dtype.unwrap_or_else(|| grad.dtype());
            wholes.push(grad.to_dtype(dtype)?);
            cuts.push(cut);
            pieces.push(held.piece.clone());
        }
        drop(held);
        let Some(first) = wholes.first() else { return Ok(()) };
        if !has_all {
            let present =
                Tensor::new(&present[..], first.device())?.unsqueeze(0)?.repeat((group.size(), 1))?;
            wholes.push(present);
            cuts.push(Cut::even(0, 1, group.size()));
        }
        // Nobody writes to gradients that have left the pass.
        let sums = group.call(Collective::ReduceScatter(cuts, ReduceOp::Sum)).owned().start_all(&wholes)?;
        let before =
            self.shared.progress().reducing.replace(PendingReduction { pieces, sums, has_all, group });
        before.map_or(Ok(()), PendingReduction::finish)
    }

    /// Makes the unit whole for this backward pass, if it is not.
    pub(super) fn open(self: &Arc<Self>) -> Result<()> {
        self.note();
        if !lock(&self.state).is_whole {
            self.gather()?;
            lock(&self.state).depth = nesting::depth();
        }
        Ok(())
    }

    /// Records that the backward pass of this thread has reached this unit.
    fn note(self: &Arc<Self>) {
        hooks::register(&HOOKS);
        add_once(&OPEN, self);
    }

    /// Clears the state that a backward pass leaves behind.
    fn reset(&self) -> Result<()> {
        self.shared.progress().reducing = None;
        self.shared.units().iter().for_each(|unit| lock(&unit.state).coming = None);
        *lock(&self.state) = UnitState::default();
        self.release()
    }
}

/// Returns whether every parameter that can have a gradient has one.
fn has_all(held: &[UnitParameter], grads: &[Option<Tensor>]) -> bool {
    let is_there = |(held, grad): (&UnitParameter, &Option<Tensor>)| held.is_frozen || grad.is_some();
    held.len() == grads.len() && held.iter().zip(grads).all(is_there)
}

/// Adds a unit to a list that lacks it.
fn add_once(list: &'static LocalKey<RefCell<Vec<Arc<Unit>>>>, unit: &Arc<Unit>) {
    list.with_borrow_mut(|units| {
        if !units.iter().any(|known| Arc::ptr_eq(known, unit)) {
            units.push(unit.clone());
        }
    });
}

/// Returns whether the gradients of units stay on this rank: in [`no_sync`](super::no_sync()), and after it until a backward pass has
/// summed them.
///
/// What runs backward passes of its own and scales their gradients, as a pipeline does, refuses to start then.
pub fn keeps_grads() -> bool {
    no_sync::is_on() || has_kept()
}

/// Returns whether units have gradients of earlier passes.
fn has_kept() -> bool {
    KEPT.with_borrow(|kept| !kept.is_empty())
}

/// Drops the gradients that earlier backward passes in [`no_sync`](super::no_sync()) have left on this rank: those of a batch that
/// the caller skips, such as one whose loss is NaN.
///
/// The next backward pass then returns the gradients of units of its own batch alone. All ranks must call it at the same place. A
/// backward pass that fails drops them by itself.
pub fn discard_grads() {
    KEPT.take().iter().for_each(|unit| lock(&unit.kept).clear());
    JOINED.take();
}

/// Ends a successful backward pass: waits for running sums and drops whole parameters.
fn finish(grads: &mut GradStore) -> Result<()> {
    let open = OPEN.with_borrow(Vec::clone);
    for unit in &open {
        let state = lock(&unit.state);
        let has_some = state.grads.iter().any(Option::is_some);
        let waits = has_some || !state.is_reduced;
        drop(state);
        if waits {
            unit.reduce()?; // some parameters were unused, or parts were recomputed
        }
    }
    let kept = if no_sync::is_on() { Vec::new() } else { KEPT.with_borrow(Vec::clone) };
    // Units that only earlier passes have reached.
    for unit in &kept {
        if !lock(&unit.kept).is_empty() {
            unit.reduce()?;
        }
    }
    for unit in open.iter().chain(&kept) {
        let reducing = unit.shared.progress().reducing.take();
        reducing.map_or(Ok(()), PendingReduction::finish)?;
        unit.reset()?;
    }
    if has_kept() && !(no_sync::is_on() && open.is_empty()) {
        let mark = JOINED.take().map_or_else(GradMark::of_passes, Ok)?;
        mark.set(grads);
        match no_sync::is_on() {
            true => _ = JOINED.replace(Some(mark)),
            false => _ = KEPT.take(),
        }
    }
    OPEN.take();
    Ok(())
}

/// Clears the state of a failed backward pass.
fn abandon() {
    let open = OPEN.take();
    if !open.is_empty() {
        // A pass that has unwound told nobody that it failed.
        discard_grads();
    }
    for unit in open {
        // This fails only if candle refuses to release memory; the pass has already failed for another reason.
        let _ = unit.reset();
    }
}
