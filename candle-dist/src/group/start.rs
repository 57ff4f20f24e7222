//! Started calls.
use super::ProcessGroup;
use super::pending::{Open, Pending, PendingTensors, State, single};
use crate::Result;
use crate::backend::{Call, Dims, Form, Op, ReduceOp, Tensors, bytes};
use candle_core::{DType, Shape, Tensor};

/// What a started call reads.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Memory {
    /// Copies of its tensors.
    Copied,
    /// The tensors themselves, which the caller has promised not to write to.
    Owned,
}

impl Memory {
    /// Returns a tensor whose memory does not change.
    pub(super) fn own(self, tensor: &Tensor) -> candle_core::Result<Tensor> {
        match self {
            // Memory without elements cannot change, and candle cannot copy it on each device.
            Self::Copied if tensor.elem_count() > 0 => tensor.force_contiguous(),
            Self::Copied | Self::Owned => Ok(tensor.clone()),
        }
    }
}

/// Each of these starts the call of its name, on a copy of its tensors: their memory may change at once.
///
/// A start does not wait for other ranks, with one exception: over MPI, that of a collective waits while 4096 collectives of this
/// rank are incomplete.
///
/// The `owned` forms copy nothing. They are for tensors that nobody writes to until every rank has waited. A write before may
/// change the results, and over MPI it waits until the call no longer reads the memory.
impl ProcessGroup {
    /// Starts an [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn all_reduce_start(&self, tensor: &Tensor, op: ReduceOp) -> Result<Pending> {
        self.begin(Call { reduce: Some(op), ..Call::on(Op::AllReduce, tensor, &[]) }, tensor)
    }

    /// Starts an [`all_reduce`](Self::all_reduce) of a tensor that nobody writes to until every rank has waited.
    #[track_caller]
    pub fn all_reduce_owned_start(&self, tensor: Tensor, op: ReduceOp) -> Result<Pending> {
        let call = Call { reduce: Some(op), ..Call::on(Op::AllReduce, &tensor, &[]) };
        Ok(Pending::new(self.open(call, &[tensor], Memory::Owned)?, single))
    }

    /// Starts an [`all_gather`](Self::all_gather).
    #[track_caller]
    pub fn all_gather_start(&self, tensor: &Tensor, dim: usize) -> Result<Pending> {
        self.begin(self.even_joined(tensor, dim)?, tensor)
    }

    /// Starts an [`all_gather_uneven`](Self::all_gather_uneven).
    #[track_caller]
    pub fn all_gather_uneven_start(&self, tensor: &Tensor, dim: usize, sizes: &[usize]) -> Result<Pending> {
        self.begin(self.joined(Op::AllGather, tensor, dim, sizes)?, tensor)
    }

    /// Starts a [`reduce_scatter`](Self::reduce_scatter).
    #[track_caller]
    pub fn reduce_scatter_start(&self, tensor: &Tensor, dim: usize, op: ReduceOp) -> Result<Pending> {
        let sizes: Dims = self.even_sizes(Op::ReduceScatter, tensor, dim)?;
        self.reduce_scatter_uneven_start(tensor, dim, &sizes, op)
    }

    /// Starts a [`reduce_scatter_uneven`](Self::reduce_scatter_uneven).
    #[track_caller]
    pub fn reduce_scatter_uneven_start(
        &self,
        tensor: &Tensor,
        dim: usize,
        sizes: &[usize],
        op: ReduceOp,
    ) -> Result<Pending> {
        self.begin(self.scattered(tensor, dim, sizes, op)?, tensor)
    }

    /// Starts an [`all_to_all`](Self::all_to_all).
    #[track_caller]
    pub fn all_to_all_start(&self, tensor: &Tensor, split_dim: usize, concat_dim: usize) -> Result<Pending> {
        self.begin(self.even_exchange(tensor, split_dim, concat_dim)?, tensor)
    }

    /// Starts an [`all_to_all_uneven`](Self::all_to_all_uneven).
    #[track_caller]
    pub fn all_to_all_uneven_start(
        &self,
        tensor: &Tensor,
        split: (usize, &[usize]),
        concat: (usize, &[usize]),
    ) -> Result<Pending> {
        self.begin(self.exchanged(tensor, split, concat)?, tensor)
    }

    /// Starts an [`all_to_all_single`](Self::all_to_all_single).
    #[track_caller]
    pub fn all_to_all_single_start<C: AsRef<[usize]>>(&self, tensor: &Tensor, counts: &[C]) -> Result<Pending> {
        self.begin(self.route(tensor, counts)?, tensor)
    }

    /// Starts a [`broadcast`](Self::broadcast).
    #[track_caller]
    pub fn broadcast_start(&self, tensor: &Tensor, root: usize) -> Result<Pending> {
        self.begin(self.handed_on(tensor, root)?, tensor)
    }

    /// Starts a [`reduce`](Self::reduce), whose result only the root gets.
    #[track_caller]
    pub fn reduce_start(&self, tensor: &Tensor, root: usize, op: ReduceOp) -> Result<Pending<Option<Tensor>>> {
        let call = self.reduced(tensor, root, op)?;
        Ok(Pending::new(
            self.open(call, std::slice::from_ref(tensor), Memory::Copied)?,
            |mut tensors| Ok(tensors.pop()),
        ))
    }

    /// Starts a [`gather`](Self::gather), whose result only the root gets.
    #[track_caller]
    pub fn gather_start(
        &self,
        tensor: &Tensor,
        dim: usize,
        sizes: &[usize],
        root: usize,
    ) -> Result<Pending<Option<Tensor>>> {
        let call = self.gathered(tensor, dim, sizes, root)?;
        Ok(Pending::new(
            self.open(call, std::slice::from_ref(tensor), Memory::Copied)?,
            |mut tensors| Ok(tensors.pop()),
        ))
    }

    /// Starts a [`scatter`](Self::scatter).
    #[track_caller]
    pub fn scatter_start(
        &self,
        tensor: Option<&Tensor>,
        (shape, dtype): (impl Into<Shape>, DType),
        dim: usize,
        sizes: &[usize],
        root: usize,
    ) -> Result<Pending> {
        let (call, mine) = self.handed_out(tensor, (shape.into(), dtype), dim, sizes, root)?;
        Ok(Pending::new(self.open(call, mine.map_or(&[], std::slice::from_ref), Memory::Copied)?, single))
    }

    /// Starts a [`barrier`](Self::barrier): the wait returns when every rank has started it.
    #[track_caller]
    pub fn barrier_start(&self) -> Result<Pending<()>> {
        Ok(Pending::new(self.open(Call::new(Op::Barrier), &[], Memory::Copied)?, |_| Ok(())))
    }

    fn begin(&self, call: Call, tensor: &Tensor) -> Result<Pending> {
        Ok(Pending::new(self.open(call, std::slice::from_ref(tensor), Memory::Copied)?, single))
    }

    pub(super) fn begin_all(&self, call: Call, tensors: &[Tensor], memory: Memory) -> Result<PendingTensors> {
        Ok(Pending::new(self.open(call, tensors, memory)?, Ok))
    }

    fn open(&self, call: Call, tensors: &[Tensor], memory: Memory) -> Result<State> {
        if self.is_alone(&call)? {
            let mine = tensors.iter().map(|tensor| memory.own(tensor)).collect::<candle_core::Result<_>>()?;
            return Ok(State::Done(mine));
        }
        self.enter(call, tensors, memory, |backend, call, dense| backend.start(call, dense))
    }

    /// Starts a call.
    pub(super) fn enter(
        &self,
        call: Call,
        tensors: &[Tensor],
        memory: Memory,
        start: impl FnOnce(&dyn crate::backend::Backend, Call, Tensors) -> Result<Box<dyn crate::backend::StartedCall>>,
    ) -> Result<State> {
        let call = Call { form: Form::Started, ..call };
        let dense = |tensor: &Tensor| memory.own(&tensor.detach())?.contiguous();
        let size = tensors.iter().map(bytes).sum();
        let started = self.engage(call.clone(), size, |backend, call| {
            let dense = tensors.iter().map(dense).collect::<candle_core::Result<Tensors>>()?;
            start(backend, call, dense)
        })?;
        Ok(State::Open(Box::new(Open { started, call, group: self.clone(), thread: std::thread::current().id() })))
    }
}
