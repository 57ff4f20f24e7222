//! Calls that are started now and finished later.
use super::ProcessGroup;
use crate::backend::{Call, Dims, Form, Fresh, Op, ReduceOp, Tensors, Unfinished, bytes};
use crate::{Error, Result, comm};
use candle_core::Tensor;
use smallvec::smallvec;
use std::fmt;

/// A collective under way, which this rank has entered and not waited for.
///
/// Other ranks can read this rank's tensor from now on; the result is made when it is waited for. Every rank starts its
/// calls in the same order; it may wait for them in any. Dropping it gives the result up and lets the others go on.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_dist::{ReduceOp, World};
///
/// World::local(2).run(|ctx| -> candle_dist::Result<()> {
///     let x = Tensor::new(&[1f32], &Device::Cpu)?;
///     let first = ctx.group().all_reduce_start(&x, ReduceOp::Sum)?;
///     let second = ctx.group().all_gather_start(&x, 0)?;
///     assert_eq!(second.wait()?.to_vec1::<f32>()?, [1.0, 1.0]);
///     assert_eq!(first.wait()?.to_vec1::<f32>()?, [2.0]);
///     Ok(())
/// })?;
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
#[must_use = "the other ranks' results need this rank's tensor only, but this rank's result comes with `wait`"]
pub struct Pending(PendingTensors);

/// A [`Pending`] of several tensors.
#[must_use = "the other ranks' results need this rank's tensors only, but this rank's results come with `wait`"]
pub struct PendingTensors(State);

enum State {
    Done(Vec<Tensor>),
    Open(Box<Open>),
}

/// A call that was started, for its wait.
struct Open {
    started: Box<dyn Unfinished>,
    call: Call,
    group: ProcessGroup,
}

impl fmt::Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pending({})", self.0.0.name())
    }
}

impl fmt::Debug for PendingTensors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PendingTensors({})", self.0.name())
    }
}

impl State {
    const fn name(&self) -> &'static str {
        match self {
            Self::Done(_) => "done",
            Self::Open(_) => "open",
        }
    }
}

impl Pending {
    /// Whether [`wait`](Self::wait) would return without waiting for another rank.
    pub fn is_ready(&self) -> Result<bool> {
        self.0.is_ready()
    }

    /// The result, as soon as every rank has started the call.
    pub fn wait(self) -> Result<Tensor> {
        let made = self.0.wait()?.pop();
        made.ok_or_else(|| Error::Unsupported("waiting for a call without a result".to_string()))
    }
}

impl PendingTensors {
    /// Of no tensors, for which there is nothing to wait.
    pub(super) const fn none() -> Self {
        Self(State::Done(Vec::new()))
    }

    /// Whether [`wait`](Self::wait) would return without waiting for another rank.
    pub fn is_ready(&self) -> Result<bool> {
        match &self.0 {
            State::Done(_) => Ok(true),
            State::Open(open) => open.started.is_ready(),
        }
    }

    /// The results in the order of the tensors, as soon as every rank has started the call.
    pub fn wait(self) -> Result<Vec<Tensor>> {
        match self.0 {
            State::Done(tensors) => Ok(tensors),
            State::Open(open) => {
                let Open { started, call, group } = *open;
                let _watched = comm::watch_wait(&call, group.ranks());
                Ok(started.finish()?.into_iter().map(Fresh::into_tensor).collect())
            }
        }
    }
}

impl ProcessGroup {
    /// Starts an [`all_reduce`](Self::all_reduce).
    ///
    /// Nobody may write to the tensor's storage until every rank has waited; a `Var` is copied for that reason.
    #[track_caller]
    pub fn all_reduce_start(&self, tensor: &Tensor, op: ReduceOp) -> Result<Pending> {
        self.begin(Call { reduce: Some(op), ..Call::on(Op::AllReduce, tensor, &[]) }, tensor)
    }

    /// Starts an [`all_gather`](Self::all_gather), with the same care for the tensor as
    /// [`all_reduce_start`](Self::all_reduce_start).
    #[track_caller]
    pub fn all_gather_start(&self, tensor: &Tensor, dim: usize) -> Result<Pending> {
        let len = self.dim_size(Op::AllGather, tensor, dim)?;
        self.begin(Self::joined(Op::AllGather, tensor, dim, &self.repeat(len)), tensor)
    }

    /// Starts a [`reduce_scatter`](Self::reduce_scatter), with the same care for the tensor as
    /// [`all_reduce_start`](Self::all_reduce_start).
    #[track_caller]
    pub fn reduce_scatter_start(&self, tensor: &Tensor, dim: usize, op: ReduceOp) -> Result<Pending> {
        let sizes: Dims = self.even_sizes(Op::ReduceScatter, tensor, dim)?;
        let call = Call {
            reduce: Some(op),
            dims: smallvec![dim],
            sizes: smallvec![sizes],
            ..Call::on(Op::ReduceScatter, tensor, &[])
        };
        self.begin(call, tensor)
    }

    /// Starts an [`all_to_all`](Self::all_to_all), with the same care for the tensor as
    /// [`all_reduce_start`](Self::all_reduce_start).
    #[track_caller]
    pub fn all_to_all_start(&self, tensor: &Tensor, split_dim: usize, concat_dim: usize) -> Result<Pending> {
        self.begin(self.even_exchange(tensor, split_dim, concat_dim)?, tensor)
    }

    /// Starts a [`broadcast`](Self::broadcast), with the same care for the tensor as
    /// [`all_reduce_start`](Self::all_reduce_start).
    #[track_caller]
    pub fn broadcast_start(&self, tensor: &Tensor, root: usize) -> Result<Pending> {
        self.check_rank(Op::Broadcast, root)?;
        self.begin(Call { peer: Some(root), ..Call::on(Op::Broadcast, tensor, &[]) }, tensor)
    }

    fn begin(&self, call: Call, tensor: &Tensor) -> Result<Pending> {
        self.begin_all(call, std::slice::from_ref(tensor)).map(Pending)
    }

    pub(super) fn begin_all(&self, call: Call, tensors: &[Tensor]) -> Result<PendingTensors> {
        if self.is_alone(&call)? {
            return Ok(PendingTensors(State::Done(tensors.to_vec())));
        }
        let call = Call { form: Form::Started, ..call };
        let own = |t: &Tensor| if t.is_variable() { t.force_contiguous() } else { t.contiguous() };
        let dense = tensors.iter().map(|t| Ok(own(t)?.detach())).collect::<candle_core::Result<Tensors>>()?;
        let size = tensors.iter().map(bytes).sum();
        let started = self.engage(call.clone(), size, |engine, call| engine.start(call, dense))?;
        Ok(PendingTensors(State::Open(Box::new(Open { started, call, group: self.clone() }))))
    }
}
