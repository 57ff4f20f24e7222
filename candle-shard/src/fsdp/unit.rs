//! Parameters that are gathered and freed together.
//!
//! # The states of a unit
//!
//! A unit is *apart* (only the pieces have memory), *coming* (a prefetch runs, [`UnitState::coming`]) or *whole*
//! ([`UnitState::is_whole`]). Layers and graphs hold the same tensors in all states.
//!
//! `run.rs` has the first two events, `pass.rs` those of the backward pass.
//!
//! | in | event | then |
//! |---|---|---|
//! | apart, coming | a run, outermost | whole; a prefetch is used only if this unit is the next one and no parameter has changed |
//! | whole | that call ends | apart, unless its result has a gradient and the options say to keep the parameters |
//! | apart | the unit before runs, or the backward pass is in the unit behind | coming |
//! | apart, coming | the backward pass reaches the [`UnitEnd`](super::nodes::UnitEnd) of a run, or recomputes a run | whole |
//! | whole | all gradients are there, and the unit does not [stay](UnitState::stays) or serve an outer pass | apart, gradients reduced |
//! | whole | the pass has [left](Unit::leave) all runs that it entered | apart; gradients reduced if all are there |
//! | any | the outermost pass ends | apart, all gradients reduced |
//! | any | the pass fails | apart, gradients dropped |
//!
//! In [`no_sync`](super::no_sync()) gradients are kept where they would be reduced. The next reduction adds them to its own.
//! [`discard_grads`](super::discard_grads) and failed passes drop them.
//!
//! What holds in each state:
//!
//! - The unit is whole whenever candle visits one of its nodes. candle visits the `End` of a run first, and the unit
//!   stays whole until it has all gradients or the pass has left the run (`autograd/order.rs` says when).
//! - A frozen parameter has no gradient that shows when it is done, and each recomputed part adds to the gradients again.
//!   A unit with either ([`UnitState::stays`]) is dropped only when the pass has left its runs.
//! - A model keeps one reduce_scatter running (`Progress::reducing`). The next unit starts its own and then waits for
//!   that one; the end of the pass waits for the last.
//! - All ranks of the axis change states in the same order, because their graphs have the same nodes: the collectives
//!   match.
use super::nodes::{InPass, UnshardNode};
use super::shared::{ParameterPiece, UnitList, lock};
use crate::autograd::counts;
use crate::autograd::order::LastNode;
use crate::autograd::shared::listed;
use crate::layout::{Replicate, axes_of, chunk_sizes};
use crate::tensor::Variable;
use crate::{DTensor, Result};
use candle_core::{DType, Shape, Tensor, Var};
use candle_dist::backend::{Cuts, Dims};
use candle_dist::{Collective, Cut, FreeableTensor, PendingTensors, ProcessGroup, empty};
use std::sync::{Arc, Mutex, Weak};

/// A unit, used only by the thread of one rank.
pub(crate) struct Unit {
    pub(super) shared: Arc<UnitList<Self>>,
    pub(super) number: usize,
    /// The path of the builder.
    path: String,
    pub(super) held: Mutex<Vec<UnitParameter>>,
    pub(super) state: Mutex<UnitState>,
    /// The whole gradients of earlier backward passes that have not been summed over the ranks.
    pub(super) kept: Mutex<Vec<Option<Tensor>>>,
}

/// One parameter.
pub(super) struct UnitParameter {
    pub(super) name: String,
    pub(super) piece: ParameterPiece,
    /// The whole parameter, as the layers use it; without memory most of the time.
    pub(super) whole: FreeableTensor,
    /// How the axes cut it; `None` if they do not, and the whole is only a cast of the piece.
    pub(super) cut: Option<Cut>,
    pub(super) is_frozen: bool,
}

#[derive(Default)]
pub(super) struct UnitState {
    pub(super) is_whole: bool,
    /// Running calls, one nested in the other.
    pub(super) running: usize,
    /// The prefetched parameters.
    pub(super) coming: Option<PendingUnit>,
    /// The gradients of this backward pass so far.
    pub(super) grads: Vec<Option<Tensor>>,
    /// Whether gradients of this backward pass have been reduced.
    pub(super) is_reduced: bool,
    /// The number of nested backward passes when the unit was gathered.
    pub(super) depth: usize,
    /// The last nodes of the runs that backward passes have entered and not left; `None` where unknown.
    pub(super) inside: Vec<Option<LastNode>>,
    /// Whether the parameters may still be needed when all their gradients exist: frozen ones have none, and each
    /// recomputed part adds to the gradients of all parameters that it uses.
    pub(super) stays: bool,
}

/// Prefetched parameters.
pub(super) struct PendingUnit {
    pending: PendingTensors,
    /// The values that this rank has sent, to detect changes of its parameters since then.
    pub(super) sent: Vec<Tensor>,
    /// The counter of parameter changes known to this crate, at the start of the prefetch.
    pub(super) changes: u64,
}

impl UnitParameter {
    /// Returns a copy of the piece in the dtype in which it is computed.
    fn cast(&self) -> candle_core::Result<Tensor> {
        let dtype = self.whole.dtype();
        let piece = &self.piece.var;
        match piece.dtype() == dtype {
            true => Ok(piece.force_contiguous()?.detach()),
            false => empty::compute(&piece.as_detached_tensor(), |piece| piece.to_dtype(dtype)),
        }
    }
}

impl Unit {
    pub(super) fn new(shared: Arc<UnitList<Self>>, number: usize, path: &str) -> Self {
        Self {
            shared,
            number,
            path: path.to_string(),
            held: Mutex::default(),
            state: Mutex::default(),
            kept: Mutex::default(),
        }
    }

    /// Returns the group of the axis, whose calls name the unit: ranks that run different ones must not mix them.
    pub(super) fn group(&self) -> ProcessGroup {
        let held = lock(&self.held);
        let names = listed(held.iter().map(|held| held.name.as_str()));
        self.shared.group.with_description(format!("the unit of {names}"))
    }

    /// Returns the dtype in which a parameter that is stored in `dtype` is computed.
    pub(crate) fn dtype_of(&self, dtype: DType) -> DType {
        self.shared.options.param_dtype.filter(|_| dtype.is_float()).unwrap_or(dtype)
    }

    /// Adds a parameter whose piece on this rank is `piece`, the variable `var`; returns the tensor that layers use.
    pub(crate) fn add(
        self: &Arc<Self>,
        name: &str,
        piece: &DTensor,
        var: &Var,
        plan_axis: Option<usize>,
        is_frozen: bool,
    ) -> Result<DTensor> {
        let axes = &self.shared.axes;
        let dtype = self.dtype_of(piece.dtype());
        let mut spec = piece.spec().clone().with_dtype(dtype);
        let dim = spec.placements()[axes[0]].shard_dim();
        axes.iter().for_each(|&axis| spec.place(axis, Replicate, None));
        let shape = spec.local_shape();
        let cut = dim.map(|dim| {
            let cut_again = |sizes: Dims, &axis: &usize| -> Dims {
                sizes.iter().flat_map(|&size| chunk_sizes(size, spec.mesh().shape()[axis])).collect()
            };
            Cut::new(dim, &axes.iter().fold(Dims::from_slice(&[shape[dim]]), cut_again))
        });
        let mut held = lock(&self.held);
        let unit: Weak<dyn InPass> = Arc::<Self>::downgrade(self);
        let (which, shape) = (held.len(), Shape::from(shape.as_slice()));
        let whole = var.as_tensor().apply_op1(UnshardNode { unit, which, shape, dtype })?;
        let whole = if is_frozen { whole.detach() } else { whole };
        let whole = FreeableTensor::without_memory(whole)?;
        // Replicas of the unit on other axes than the plan's have batches of their own. Their gradients are summed once
        // a pass, after they are cut.
        let mesh = spec.mesh().clone();
        let is_replica = |&axis: &usize| mesh.shape()[axis] > 1 && spec.placements()[axis] == Replicate;
        let others = (0..mesh.ndim())
            .filter(|axis| Some(*axis) != plan_axis && !axes.contains(axis))
            .filter(is_replica);
        let others: Vec<usize> = others.filter(|_| !is_frozen).collect();
        let variable = piece.variable();
        let itself = || Arc::new(Variable { tensor: var.as_tensor().clone(), name: None, ordinal: None });
        let variable = variable.unwrap_or_else(itself);
        let piece =
            ParameterPiece { var: var.clone(), variable, mesh: mesh.clone(), partial: axes_of(&others) };
        let shown = format!("{name} (of the unit {:?})", self.path);
        let parameter = DTensor::parameter(whole.graph_node().clone(), spec).named(&shown);
        held.push(UnitParameter { name: name.to_string(), piece, whole, cut, is_frozen });
        axes.iter().chain(&others).try_fold(parameter, |whole, &axis| whole.varying_on(axis))
    }

    /// Returns whether this weight is one of the unit's parameters.
    pub(crate) fn has(&self, weight: &DTensor) -> bool {
        lock(&self.held).iter().any(|held| held.whole.graph_node().id() == weight.to_local().id())
    }

    /// Gathers the parameters, using a prefetch if there is one.
    pub(super) fn gather(&self) -> Result<()> {
        let coming = lock(&self.state).coming.take();
        let coming = coming.map_or_else(|| self.start(), Ok)?;
        let mut made = coming.pending.wait()?.into_iter();
        for held in lock(&self.held).iter() {
            match &held.cut {
                Some(_) => made.next().map_or(Ok(()), |made| held.whole.fill(made))?,
                None => held.whole.fill(held.cast()?)?,
            }
        }
        lock(&self.state).is_whole = true;
        Ok(())
    }

    fn start(&self) -> Result<PendingUnit> {
        let held = lock(&self.held);
        // Copied, as a variable may change before all ranks have read it, and to see later whether it has.
        let pieces = held.iter().filter_map(|held| Some((held.cast(), held.cut.clone()?)));
        let (sent, cuts): (Vec<_>, Cuts) = pieces.unzip();
        let sent = sent.into_iter().collect::<candle_core::Result<Vec<_>>>()?;
        drop(held);
        let pending = self.group().call(Collective::AllGather(cuts)).owned().start_all(&sent)?;
        Ok(PendingUnit { pending, sent, changes: counts::changes() })
    }

    /// Prefetches the next unit.
    pub(super) fn prefetch(&self, number: Option<usize>) -> Result<()> {
        let Some(next) = number.filter(|_| self.shared.options.prefetch).and_then(|n| self.shared.find(n))
        else {
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
