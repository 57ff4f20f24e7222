//! Parameters that are gathered and freed together.
//!
//! # The states of a unit
//!
//! A unit is *apart* (only the pieces have memory), *coming* (a prefetch runs, [`State::coming`]) or *whole*
//! ([`State::is_whole`]). Layers and graphs hold the same tensors in all states.
//!
//! | in | event | then |
//! |---|---|---|
//! | apart, coming | [`run`](Unit::run), outermost | whole; a prefetch is used only if this unit is the next one and no parameter has changed |
//! | whole | that call ends | apart, unless its result has a gradient and the options say to keep the parameters |
//! | apart | the unit before runs, or the backward pass is in the unit behind | coming |
//! | apart, coming | the backward pass reaches the [`End`] of a run, or recomputes a run | whole |
//! | whole | all gradients are there, and the unit does not [stay](State::stays) or serve an outer pass | apart, gradients reduced |
//! | whole | the pass has [left](Unit::leave) all runs that it entered | apart; gradients reduced if all are there |
//! | any | the outermost pass ends | apart, all gradients reduced |
//! | any | the pass fails | apart, gradients dropped |
//!
//! What holds in each state:
//!
//! - The unit is whole whenever candle visits one of its nodes. candle visits the `End` of a run first, and the unit
//!   stays whole until it has all gradients or the pass has left the run (`autograd/order.rs` says when).
//! - A frozen parameter has no gradient that shows when it is done, and each recomputed part adds to the gradients again.
//!   A unit with either ([`State::stays`]) is dropped only when the pass has left its runs.
//! - A model keeps one reduce_scatter running (`Progress::reducing`). The next unit starts its own and then waits for
//!   that one; the end of the pass waits for the last.
//! - All ranks of the axis change states in the same order, because their graphs have the same nodes: the collectives
//!   match.
use super::nodes::{End, Whole};
use super::sharder::{Sharder, lock};
use crate::autograd::order::{Last, Span};
use crate::autograd::{counts, recompute};
use crate::layout::{Replicate, chunk_sizes};
use crate::{DTensor, Result};
use candle_core::{Shape, Tensor, Var};
use candle_dist::backend::{Fresh, Ready};
use candle_dist::functional::Cut;
use candle_dist::{FreeableTensor, PendingTensors, ReduceOp};
use std::sync::{Arc, Mutex};

/// A unit, used only by the thread of one rank.
pub(crate) struct Unit {
    pub(super) sharder: Arc<Sharder>,
    pub(super) number: usize,
    pub(super) held: Mutex<Vec<Held>>,
    pub(super) state: Mutex<State>,
}

/// One parameter.
pub(super) struct Held {
    /// This rank's piece.
    pub(super) piece: Var,
    /// The whole parameter, as the layers use it; without memory most of the time.
    pub(super) whole: FreeableTensor,
    pub(super) cut: Cut,
    pub(super) is_frozen: bool,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) is_whole: bool,
    /// Running calls, one nested in the other.
    pub(super) running: usize,
    /// The prefetched parameters.
    pub(super) coming: Option<Coming>,
    /// The gradients of this backward pass so far.
    pub(super) grads: Vec<Option<Tensor>>,
    /// The number of nested backward passes when the unit was gathered.
    pub(super) depth: usize,
    /// The last nodes of the runs that backward passes have entered and not left; `None` where unknown.
    pub(super) inside: Vec<Option<Last>>,
    /// Whether the parameters may still be needed when all their gradients exist: frozen ones have none, and each
    /// recomputed part adds to the gradients of all parameters that it uses.
    pub(super) stays: bool,
}

/// Prefetched parameters.
pub(super) struct Coming {
    pending: PendingTensors,
    /// The values that this rank has sent, to detect changes of its parameters since then.
    sent: Vec<Tensor>,
    /// The counter of parameter changes known to this crate, at the start of the prefetch.
    changes: u64,
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
        if recompute::is_recomputing() {
            // The backward pass continues into this run.
            self.open()?;
            return self.marked(f);
        }
        if lock(&self.state).running == 0 {
            let last = self.sharder.progress().last.replace(self.number);
            // A prefetch that was started before another unit ran, or before a step, may be older than the parameters.
            let is_next = last.map(|last| last + 1) == Some(self.number);
            lock(&self.state).coming.take_if(|coming| !is_next || coming.changes != counts::changes());
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
        let segments = counts::segments();
        let (made, span) = Span::of(f)?;
        let made = made?;
        if !made.tracked() {
            return Ok(made);
        }
        let stays = counts::segments() != segments || lock(&self.held).iter().any(|held| held.is_frozen);
        let end = End { unit: self.clone(), span, stays, made: Ready::new(Fresh::copy_of(made.to_local())?) };
        Ok(DTensor::assemble(made.to_local().apply_op1(end)?, made.shared_spec().clone(), made.varying()))
    }

    /// Gathers the parameters, using a prefetch if there is one.
    pub(super) fn gather(&self) -> Result<()> {
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
        Ok(Coming { pending, sent, changes: counts::changes() })
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
    pub(super) fn prefetch(&self, number: Option<usize>) -> Result<()> {
        let Some(next) = number.filter(|_| self.sharder.options.prefetch).and_then(|n| self.sharder.find(n)) else {
            return Ok(());
        };
        if !lock(&next.state).is_whole {
            let coming = next.start()?;
            lock(&next.state).coming = Some(coming);
        }
        Ok(())
    }

    pub(super) fn release(&self) -> Result<()> {
        lock(&self.state).is_whole = false;
        lock(&self.held).iter().try_for_each(|held| {
            held.whole.free()?;
            Ok(())
        })
    }
}
