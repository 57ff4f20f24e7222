//! The parameters that come and go together.
use super::nodes::{End, Whole};
use super::sharder::{Sharder, lock};
use super::storage;
use crate::nn::found;
use crate::placement::Replicate;
use crate::spec::chunk_sizes;
use crate::{DTensor, Result};
use candle_core::{DType, Shape, Tensor, Var};
use candle_dist::backend::{Fresh, Ready};
use candle_dist::functional::Cut;
use candle_dist::{PendingTensors, ReduceOp};
use std::cell::RefCell;
use std::sync::{Arc, Mutex};

/// A unit; one rank's thread uses it.
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
    /// All pieces, as the layers use them; without memory most of the time.
    whole: Tensor,
    cut: Cut,
    is_frozen: bool,
}

#[derive(Default)]
struct State {
    is_whole: bool,
    /// Runs under way, one within the other.
    running: usize,
    /// The parameters under way, and how often any had changed when they were asked for.
    coming: Option<(PendingTensors, u64)>,
    /// The gradients of this backward pass, so far.
    grads: Vec<Option<Tensor>>,
    /// Within how many backward passes the unit was made whole.
    depth: usize,
    /// Whether parts of it are recomputed. Each gives gradients of all that it uses, while other parts may still need the
    /// parameters: they are dropped when the backward pass comes to a unit before this one.
    has_segments: bool,
}

/// Gradients on the way to the ranks whose pieces they are of.
pub(super) struct Reducing {
    pieces: Vec<Var>,
    sums: PendingTensors,
}

thread_local! {
    /// The units that the backward pass of this thread has come to.
    static OPEN: RefCell<Vec<Arc<Unit>>> = const { RefCell::new(Vec::new()) };
}

impl Unit {
    pub(super) fn new(sharder: Arc<Sharder>, number: usize) -> Self {
        Self { sharder, number, held: Mutex::default(), state: Mutex::default() }
    }

    /// Takes up a parameter of which this rank holds `piece`, and gives what layers use.
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
        storage::release(&whole)?;
        held.push(Held { piece: var.clone(), whole: whole.clone(), cut, is_frozen });
        DTensor::parameter(whole, spec).varying_on(*axis)
    }

    /// Whether this is the memory of one of the unit's parameters.
    pub(crate) fn has(&self, weight: &DTensor) -> bool {
        lock(&self.held).iter().any(|held| held.whole.id() == weight.to_local().id())
    }

    /// What `f` makes while the parameters are there.
    pub(super) fn run(self: &Arc<Self>, f: impl FnOnce() -> Result<DTensor>) -> Result<DTensor> {
        if found::is_recomputing() {
            // The backward pass goes on with it.
            self.open()?;
            return self.marked(f);
        }
        if lock(&self.state).running == 0 {
            let last = self.sharder.progress().last.replace(self.number);
            // What was started before something else ran, or before a step, may be older than the parameters.
            let is_next = last.map(|last| last + 1) == Some(self.number);
            lock(&self.state).coming.take_if(|(_, changes)| !is_next || *changes != found::changes());
            self.gather()?;
            self.prefetch(Some(self.number + 1))?;
        }
        lock(&self.state).running += 1;
        let made = self.marked(f);
        lock(&self.state).running -= 1;
        let is_kept = matches!(&made, Ok(made) if made.tracked()) && !self.sharder.options.reshard_after_forward;
        if lock(&self.state).running == 0 && !is_kept {
            self.release()?;
        }
        made
    }

    /// What `f` makes, with a gradient that makes the unit whole before the backward pass enters it.
    fn marked(self: &Arc<Self>, f: impl FnOnce() -> Result<DTensor>) -> Result<DTensor> {
        let segments = found::segments();
        let made = f()?;
        if !made.tracked() {
            return Ok(made);
        }
        let has_segments = found::segments() != segments;
        let end = End { unit: self.clone(), has_segments, made: Ready::new(Fresh::copy_of(made.to_local())?) };
        Ok(DTensor::assemble(made.to_local().apply_op1(end)?, made.shared_spec().clone(), made.varying()))
    }

    /// Makes the unit whole for the backward pass.
    pub(super) fn before_backward(unit: &Arc<Self>, has_segments: bool) -> Result<()> {
        let is_done = |other: &Arc<Self>| {
            let state = lock(&other.state);
            let is_after = Arc::ptr_eq(&other.sharder, &unit.sharder) && other.number > unit.number;
            is_after && state.has_segments && state.depth == found::depth()
        };
        let done: Vec<Arc<Self>> =
            OPEN.with_borrow(|open| open.iter().filter(|&other| is_done(other)).cloned().collect());
        done.iter().try_for_each(|done| done.reduce())?;
        unit.open()?;
        lock(&unit.state).has_segments |= has_segments;
        unit.prefetch(unit.number.checked_sub(1))
    }

    /// Takes the gradient of a whole parameter, which this backward pass does not need any more.
    pub(super) fn take_grad(unit: &Arc<Self>, which: usize, grad: &Tensor) -> Result<()> {
        unit.note();
        let is_last = {
            let (held, mut state) = (lock(&unit.held), lock(&unit.state));
            state.grads.resize(held.len(), None);
            let sum = match state.grads[which].take() {
                Some(before) => (before + grad)?,
                None => grad.clone(),
            };
            state.grads[which] = Some(sum.detach());
            let is_all = || held.iter().zip(&state.grads).all(|(held, grad)| held.is_frozen || grad.is_some());
            state.depth == found::depth() && !state.has_segments && is_all()
        };
        if is_last { unit.reduce() } else { Ok(()) }
    }

    /// Drops the whole parameters and starts to sum the gradients that there are; those of the unit before are done then.
    fn reduce(&self) -> Result<()> {
        self.release()?;
        let grads = {
            let mut state = lock(&self.state);
            state.has_segments = false;
            std::mem::take(&mut state.grads)
        };
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

    /// The parameters that are not there yet are asked for, those that are come from all ranks anew.
    fn gather(&self) -> Result<()> {
        let coming = lock(&self.state).coming.take();
        let pending = coming.map_or_else(|| self.start(), |(coming, _)| Ok(coming))?;
        let made = pending.wait()?;
        for (held, made) in lock(&self.held).iter().zip(made) {
            storage::give(made, &held.whole)?;
        }
        lock(&self.state).is_whole = true;
        Ok(())
    }

    fn start(&self) -> Result<PendingTensors> {
        let piece = |held: &Held| -> Result<(Tensor, Cut)> {
            let dtype: DType = held.whole.dtype();
            let piece = match held.piece.dtype() == dtype {
                // Copied, as it is a variable: by the group, or here if that gives back what it gets.
                true if self.sharder.group.size() > 1 => held.piece.as_tensor().clone(),
                true => held.piece.force_contiguous()?.detach(),
                false => held.piece.as_detached_tensor().to_dtype(dtype)?,
            };
            Ok((piece, held.cut.clone()))
        };
        let pieces = lock(&self.held).iter().map(piece).collect::<Result<Vec<_>>>()?;
        Ok(self.sharder.group.all_gather_coalesced_start(&pieces)?)
    }

    /// Starts to gather what comes next.
    fn prefetch(&self, number: Option<usize>) -> Result<()> {
        let Some(next) = number.filter(|_| self.sharder.options.prefetch).and_then(|n| self.sharder.find(n)) else {
            return Ok(());
        };
        if !lock(&next.state).is_whole {
            let coming = next.start()?;
            lock(&next.state).coming = Some((coming, found::changes()));
        }
        Ok(())
    }

    fn release(&self) -> Result<()> {
        lock(&self.state).is_whole = false;
        lock(&self.held).iter().try_for_each(|held| Ok(storage::release(&held.whole)?))
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

    /// Notes that the backward pass of this thread has come here.
    fn note(self: &Arc<Self>) {
        OPEN.with_borrow_mut(|open| {
            if !open.iter().any(|unit| Arc::ptr_eq(unit, self)) {
                open.push(self.clone());
            }
        });
    }

    /// Forgets what a backward pass has left.
    fn reset(&self) -> Result<()> {
        self.sharder.progress().reducing = None;
        self.sharder.units().iter().for_each(|unit| lock(&unit.state).coming = None);
        *lock(&self.state) = State::default();
        self.release()
    }
}

impl Reducing {
    /// Puts the sums where the backward pass collects them.
    fn finish(self) -> Result<()> {
        for (piece, sum) in self.pieces.iter().zip(self.sums.wait()?) {
            found::add(piece.id(), &sum.to_dtype(piece.dtype())?)?;
        }
        Ok(())
    }
}

/// Ends a backward pass that went through: what is under way arrives, and what is whole is dropped.
pub(crate) fn finish() -> Result<()> {
    let open = OPEN.with_borrow(Vec::clone);
    for unit in &open {
        if lock(&unit.state).grads.iter().any(Option::is_some) {
            unit.reduce()?; // some parameters took no part, or parts were recomputed
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

/// Forgets a backward pass that did not go through.
pub(crate) fn abandon() {
    for unit in OPEN.take() {
        // Only memory that candle refuses to let go of could fail here; the pass has failed for its own reason.
        let _ = unit.reset();
    }
}
