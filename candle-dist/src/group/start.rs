//! Started calls.
use super::ProcessGroup;
use super::pending::{Open, Pending, PendingTensors, State, single};
use crate::Result;
use crate::backend::{Call, Dims, Form, Op, ReduceOp, Tensors, bytes};
use candle_core::{DType, Shape, Tensor};

/// Each of these starts the call of its name. Do not write to the tensors' storage until every rank has waited; a `Var`
/// is therefore copied.
impl ProcessGroup {
    /// Starts an [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn all_reduce_start(&self, tensor: &Tensor, op: ReduceOp) -> Result<Pending> {
        self.begin(Call { reduce: Some(op), ..Call::on(Op::AllReduce, tensor, &[]) }, tensor)
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
        Ok(Pending::new(self.open(call, std::slice::from_ref(tensor))?, |mut tensors| Ok(tensors.pop())))
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
        Ok(Pending::new(self.open(call, std::slice::from_ref(tensor))?, |mut tensors| Ok(tensors.pop())))
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
        Ok(Pending::new(self.open(call, mine.map_or(&[], std::slice::from_ref))?, single))
    }

    /// Starts a [`barrier`](Self::barrier): the wait returns when every rank has started it.
    #[track_caller]
    pub fn barrier_start(&self) -> Result<Pending<()>> {
        Ok(Pending::new(self.open(Call::new(Op::Barrier), &[])?, |_| Ok(())))
    }

    fn begin(&self, call: Call, tensor: &Tensor) -> Result<Pending> {
        Ok(Pending::new(self.open(call, std::slice::from_ref(tensor))?, single))
    }

    pub(super) fn begin_all(&self, call: Call, tensors: &[Tensor]) -> Result<PendingTensors> {
        Ok(Pending::new(self.open(call, tensors)?, Ok))
    }

    fn open(&self, call: Call, tensors: &[Tensor]) -> Result<State> {
        if self.is_alone(&call)? {
            return Ok(State::Done(tensors.to_vec()));
        }
        self.enter(call, tensors, |backend, call, dense| backend.start(call, dense))
    }

    /// Starts a call whose tensors do not change until all ranks have waited.
    pub(super) fn enter(
        &self,
        call: Call,
        tensors: &[Tensor],
        start: impl FnOnce(&dyn crate::backend::Backend, Call, Tensors) -> Result<Box<dyn crate::backend::StartedCall>>,
    ) -> Result<State> {
        let call = Call { form: Form::Started, ..call };
        let own = |t: &Tensor| if t.is_variable() { t.force_contiguous() } else { t.contiguous() };
        let dense = tensors.iter().map(|t| Ok(own(t)?.detach())).collect::<candle_core::Result<Tensors>>()?;
        let size = tensors.iter().map(bytes).sum();
        let started = self.engage(call.clone(), size, |backend, call| start(backend, call, dense))?;
        Ok(State::Open(Box::new(Open { started, call, group: self.clone() })))
    }
}
