//! Parameters that are gathered and freed together.
use super::nodes::{End, Whole};
use super::order::{self, Last, Span};
use super::sharder::{Sharder, lock};
use crate::layout::{Replicate, chunk_sizes};
use crate::nn::found;
use crate::{DTensor, Result};
use candle_core::{Shape, Tensor, TensorId, Var};
use candle_dist::backend::{Fresh, Ready};
use candle_dist::functional::Cut;
use candle_dist::{FreeableTensor, PendingTensors, ReduceOp, add_grad, sum_dtype};
use std::cell::RefCell;
use std::sync::{Arc, Mutex};

/// A unit, used only by the thread of one rank.
pub(crate) struct Unit {
    sharder: Arc<Sharder>,
    number: usize,
    held: Mutex<Vec<Held>>,
    state: Mutex<State>,
}

/// One parameter.
struct Held {
    /// This rank's piece.
    piece: Var,
    /// The whole parameter, as the layers use it; without memory most of the time.
    whole: FreeableTensor,
    cut: Cut,
    is_frozen: bool,
}

#[derive(Default)]
struct State {
    is_whole: bool,
    /// Running calls, one nested in the other.
    running: usize,
    /// The prefetched parameters.
    coming: Option<Coming>,
    /// The gradients of this backward pass so far.
    grads: Vec<Option<Tensor>>,
    /// The number of nested backward passes when the unit was gathered.
    depth: usize,
    /// The last nodes of the runs that backward passes have entered and not left; `None` where unknown.
    inside: Vec<Option<Last>>,
    /// Whether the parameters may still be needed when all their gradients exist: frozen ones have none, and each
    /// recomputed part adds to the gradients of all parameters that it uses.
    stays: bool,
}

/// Prefetched parameters.
struct Coming {
    pending: PendingTensors,
    /// The values that this rank has sent, to detect changes of its parameters since then.
    sent: Vec<Tensor>,
    /// The counter of parameter changes known to this crate, at the start of the prefetch.
    changes: u64,
}

/// Gradients on their way to the ranks that hold the pieces.
pub(super) struct Reducing {
    pieces: Vec<Var>,
    sums: PendingTensors,
}

/// A running call, which ends when this is dropped, even on a panic.
struct Running<'a>(&'a Unit);

impl<'a> Running<'a> {
    fn new(unit: &'a Unit) -> Self {
        lock(&unit.state).running += 1;
        Self(unit)
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.running = state.running.saturating_sub(1); // a failed backward pass resets it
    }
}

thread_local! {
    /// The units that the backward pass of this thread has reached.
    static OPEN: RefCell<Vec<Arc<Unit>>> = const { RefCell::new(Vec::new()) };
}

impl Unit {
    pub(super) fn new(sharder: Arc<Sharder>, number: usize) -> Self {
        Self { sharder, number, held: Mutex::default(), state: Mutex::default() }
    }

    /// Adds a parameter of which this rank holds `piece`; returns the tensor that layers use.
    pub(crate) fn add(self: &Arc<Self>, piece: &DTensor, var: &Var, is_frozen: bool) -> Result<DTensor> {
        let Sharder { axis, group, options, .. } = &*self.sharder;
        let dtype = options.param_dtype.filter(|_| piece.dtype().is_float()).unwrap_or_else(|| piece.dtype());
        let mut spec = piece.spec().clone().with_dtype(dtype);
        let dim = spec.placements()[*axis].shard_dim().unwrap_or(0);
        spec.place(*axis, Replicate, None);
        let shape = spec.local_shape();
        let cut = Cut::new(dim, &chunk_sizes(shape[dim], group.size()));
        let mut held = lock(&self.held);
        let (unit, which, shape) = (Arc::downgrade(self), held.len(), Shape::from(shape.as_slice()));
        let whole = var.as_tensor().apply_op1(Whole { unit, which, shape, dtype })?;
        let whole = if is_frozen { whole.detach() } else { whole };
        let whole = FreeableTensor::without_memory(whole)?;
        let parameter = whole.graph_node().clone();
        held.push(Held { piece: var.clone(), whole, cut, is_frozen });
        DTensor::parameter(parameter, spec).varying_on(*axis)
    }

    /// Returns whether this weight is one of the unit's parameters.
    pub(crate) fn has(&self, weight: &DTensor) -> bool {
        lock(&self.held).iter().any(|held| held.whole.graph_node().id() == weight.to_local().id())
    }

    /// Runs `f` while the parameters are whole.
    pub(super) fn run(self: &Arc<Self>, f: impl FnOnce() -> Result<DTensor>) -> Result<DTensor> {
        if found::is_recomputing() {
            // The backward pass continues into this run.
            self.open()?;
            return self.marked(f);
        }
        if lock(&self.state).running == 0 {
            let last = self.sharder.progress().last.replace(self.number);
            // A prefetch that was started before another unit ran, or before a step, may be older than the parameters.
            let is_next = last.map(|last| last + 1) == Some(self.number);
            lock(&self.state).coming.take_if(|coming| !is_next || coming.changes != found::changes());
            if self.is_stale()? {
                lock(&self.state).coming = None;
            }
            self.gather()?;
            self.prefetch(Some(self.number + 1))?;
        }
        let running = Running::new(self);
        let made = self.marked(f);
        drop(running);
        let is_kept = matches!(&made, Ok(made) if made.tracked()) && !self.sharder.options.reshard_after_forward;
        if lock(&self.state).running == 0 && !is_kept {
            self.release()?;
        }
        made
    }

    /// Runs `f`; the backward pass of its result makes the unit whole before entering it.
    fn marked(self: &Arc<Self>, f: impl FnOnce() -> Result<DTensor>) -> Result<DTensor> {
        let segments = found::segments();
        let (made, span) = Span::of(f)?;
        let made = made?;
        if !made.tracked() {
            return Ok(made);
        }
        let stays = found::segments() != segments || lock(&self.held).iter().any(|held| held.is_frozen);
        let end = End { unit: self.clone(), span, stays, made: Ready::new(Fresh::copy_of(made.to_local())?) };
        Ok(DTensor::assemble(made.to_local().apply_op1(end)?, made.shared_spec().clone(), made.varying()))
    }

    /// Makes the unit whole for the backward pass, which is at the node `at`: the end of a run.
    pub(super) fn before_backward(unit: &Arc<Self>, at: TensorId, span: Span, stays: bool) -> Result<()> {
        Self::leave(at)?;
        unit.open()?;
        let mut state = lock(&unit.state);
        state.inside.push(span.last());
        state.stays |= stays;
        drop(state);
        unit.prefetch(unit.number.checked_sub(1))
    }

    /// Takes the gradient of a whole parameter, complete at this point; the pass is at the parameter's node `at`.
    pub(super) fn take_grad(unit: &Arc<Self>, which: usize, at: TensorId, grad: &Tensor) -> Result<()> {
        unit.note();
        {
            let (held, mut state) = (lock(&unit.held), lock(&unit.state));
            state.grads.resize(held.len(), None);
            state.grads[which] = Some(add_grad(state.grads[which].as_ref(), grad)?);
        }
        Self::leave(at)?;
        let is_last = {
            let state = lock(&unit.state);
            let is_unneeded = !state.is_whole || !state.stays && state.depth == found::depth();
            is_unneeded && unit.has_all_grads(&state)
        };
        if is_last { unit.reduce() } else { Ok(()) }
    }

    /// Drops the parameters of units when the backward pass, which is at the node `at`, has left their last run.
    ///
    /// It is not enough that the pass has reached the previous unit: a run that uses tensors from several places can
    /// have nodes that candle visits later.
    fn leave(at: TensorId) -> Result<()> {
        for unit in OPEN.with_borrow(Vec::clone) {
            let mut state = lock(&unit.state);
            let was_inside = !state.inside.is_empty();
            state.inside.retain(|last| last.is_none_or(|last| !last.is_behind(at)));
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
    fn has_all_grads(&self, state: &State) -> bool {
        let held = lock(&self.held);
        let is_there = |(held, grad): (&Held, &Option<Tensor>)| held.is_frozen || grad.is_some();
        held.len() == state.grads.len() && held.iter().zip(&state.grads).all(is_there)
    }

    /// Drops the whole parameters and starts to sum the existing gradients; finishes the sums of the unit before.
    fn reduce(&self) -> Result<()> {
        self.release()?;
        let grads = std::mem::take(&mut lock(&self.state).grads);
        let held = lock(&self.held);
        let (mut pieces, mut wholes) = (Vec::new(), Vec::new());
        for (held, grad) in held.iter().zip(grads) {
            if let Some(grad) = grad {
                let dtype = self.sharder.options.reduce_dtype.unwrap_or_else(|| grad.dtype());
                wholes.push((grad.to_dtype(dtype)?, held.cut.clone()));
                pieces.push(held.piece.clone());
            }
        }
        drop(held);
        if wholes.is_empty() {
            return Ok(());
        }
        let sums = self.sharder.group.reduce_scatter_coalesced_start(&wholes, ReduceOp::Sum)?;
        drop(wholes);
        let before = self.sharder.progress().reducing.replace(Reducing { pieces, sums });
        before.map_or(Ok(()), Reducing::finish)
    }

    /// Gathers the parameters, using a prefetch if there is one.
    fn gather(&self) -> Result<()> {
        let coming = lock(&self.state).coming.take();
        let coming = coming.map_or_else(|| self.start(), Ok)?;
        let made = coming.pending.wait()?;
        for (held, made) in lock(&self.held).iter().zip(made) {
            held.whole.fill(made)?;
        }
        lock(&self.state).is_whole = true;
        Ok(())
    }

    fn start(&self) -> Result<Coming> {
        let held = lock(&self.held);
        // Copied, as a variable may change before all ranks have read it.
        let sent = held.iter().map(|held| match held.piece.dtype() == held.whole.dtype() {
            true => Ok(held.piece.force_contiguous()?.detach()),
            false => held.piece.as_detached_tensor().to_dtype(held.whole.dtype()),
        });
        let sent = sent.collect::<candle_core::Result<Vec<_>>>()?;
        let pieces: Vec<(Tensor, Cut)> = sent.iter().cloned().zip(held.iter().map(|held| held.cut.clone())).collect();
        let pending = self.sharder.group.all_gather_coalesced_start(&pieces)?;
        Ok(Coming { pending, sent, changes: found::changes() })
    }

    /// Returns whether any rank's parameters have changed since the prefetch.
    ///
    /// Writes to a variable, by an optimizer of candle or by `Var::set`, cannot be observed, so values are compared. A
    /// rank may find no change where another one does, for example in an empty piece, so the ranks agree.
    fn is_stale(&self) -> Result<bool> {
        let state = lock(&self.state);
        let held = lock(&self.held);
        let (Some(coming), Some(first)) = (&state.coming, held.first()) else { return Ok(false) };
        let mut changed = 0u32;
        for (held, sent) in held.iter().zip(&coming.sent).filter(|(_, sent)| sent.elem_count() > 0) {
            let now = held.piece.as_detached_tensor().to_dtype(sent.dtype())?;
            changed += u32::from(now.ne(sent)?.flatten_all()?.max(0)?.to_scalar::<u8>()?);
        }
        let group = &self.sharder.group;
        if group.size() == 1 {
            return Ok(changed > 0);
        }
        let changed = group.all_reduce(&Tensor::new(&[changed], first.whole.device())?, ReduceOp::Max)?;
        Ok(changed.to_vec1::<u32>()?[0] > 0)
    }

    /// Prefetches the next unit.
    fn prefetch(&self, number: Option<usize>) -> Result<()> {
        let Some(next) = number.filter(|_| self.sharder.options.prefetch).and_then(|n| self.sharder.find(n)) else {
            return Ok(());
        };
        if !lock(&next.state).is_whole {
            let coming = next.start()?;
            lock(&next.state).coming = Some(coming);
        }
        Ok(())
    }

    fn release(&self) -> Result<()> {
        lock(&self.state).is_whole = false;
        lock(&self.held).iter().try_for_each(|held| {
            held.whole.free()?;
            Ok(())
        })
    }

    /// Makes the unit whole for this backward pass, if it is not.
    fn open(self: &Arc<Self>) -> Result<()> {
        self.note();
        if !lock(&self.state).is_whole {
            self.gather()?;
            lock(&self.state).depth = found::depth();
        }
        Ok(())
    }

    /// Records that the backward pass of this thread has reached this unit.
    fn note(self: &Arc<Self>) {
        OPEN.with_borrow_mut(|open| {
            if !open.iter().any(|unit| Arc::ptr_eq(unit, self)) {
                open.push(self.clone());
            }
        });
    }

    /// Clears the state that a backward pass leaves behind.
    fn reset(&self) -> Result<()> {
        self.sharder.progress().reducing = None;
        self.sharder.units().iter().for_each(|unit| lock(&unit.state).coming = None);
        *lock(&self.state) = State::default();
        self.release()
    }
}

impl Reducing {
    /// Adds the sums to the gradients that the backward pass collects.
    fn finish(self) -> Result<()> {
        for (piece, sum) in self.pieces.iter().zip(self.sums.wait()?) {
            found::add(piece.id(), &sum.to_dtype(sum_dtype(piece.dtype()))?)?;
        }
        Ok(())
    }
}

/// Ends a nested backward pass of `loss`: units that only this pass was in are dropped.
pub(crate) fn leave(loss: &Tensor) -> Result<()> {
    Unit::leave(loss.id())
}

/// Ends a successful backward pass: waits for running sums and drops whole parameters.
pub(crate) fn finish() -> Result<()> {
    let open = OPEN.with_borrow(Vec::clone);
    for unit in &open {
        if lock(&unit.state).grads.iter().any(Option::is_some) {
            unit.reduce()?; // some parameters were unused, or parts were recomputed
        }
    }
    for unit in &open {
        let reducing = unit.sharder.progress().reducing.take();
        reducing.map_or(Ok(()), Reducing::finish)?;
        unit.reset()?;
    }
    OPEN.take();
    Ok(())
}

/// Clears the state of a failed backward pass.
pub(crate) fn abandon() {
    order::forget();
    for unit in OPEN.take() {
        // This fails only if candle refuses to release memory; the pass has already failed for another reason.
        let _ = unit.reset();
    }
}
