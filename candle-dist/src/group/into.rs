//! Collectives that write their results to given memory.
use super::ProcessGroup;
use super::pending::{Pending, State};
use super::start::Memory;
use crate::Result;
use crate::backend::overwrite::overwrite;
use crate::backend::{Call, Dims, Op, ReduceOp, Tensors, bytes};
use candle_core::Tensor;

/// Each of these runs the collective of its name without new memory for the result. `output` is a contiguous tensor of
/// the result's shape and dtype on the input's device, in memory that is neither the input's nor any other rank's. It
/// may be a `Var`, or any tensor that is not part of a graph. Other ranks may make the same call without an output.
impl ProcessGroup {
    /// Joins all ranks' tensors along `dim` in rank order, into `output`; see [`all_gather`](Self::all_gather).
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_dist::World;
    ///
    /// World::local(2).run(|ctx| -> candle_dist::Result<()> {
    ///     let output = Tensor::zeros(4, DType::F32, &Device::Cpu)?;
    ///     for step in 0..3 {
    ///         let mine = Tensor::new(&[ctx.rank() as f32, step as f32], &Device::Cpu)?;
    ///         ctx.group().all_gather_into(&output, &mine, 0)?;
    ///         assert_eq!(output.to_vec1::<f32>()?, [0.0, step as f32, 1.0, step as f32]);
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    #[track_caller]
    pub fn all_gather_into(&self, output: &Tensor, tensor: &Tensor, dim: usize) -> Result<()> {
        self.collect_into(self.even_joined(tensor, dim)?, tensor, output)
    }

    /// Like [`all_gather_into`](Self::all_gather_into), with `sizes[r]` entries of `dim` from rank `r`.
    #[track_caller]
    pub fn all_gather_uneven_into(&self, output: &Tensor, tensor: &Tensor, dim: usize, sizes: &[usize]) -> Result<()> {
        self.collect_into(self.joined(Op::AllGather, tensor, dim, sizes)?, tensor, output)
    }

    /// Writes this rank's piece of the reduction to `output`; see [`reduce_scatter`](Self::reduce_scatter).
    #[track_caller]
    pub fn reduce_scatter_into(&self, output: &Tensor, tensor: &Tensor, dim: usize, op: ReduceOp) -> Result<()> {
        let sizes: Dims = self.even_sizes(Op::ReduceScatter, tensor, dim)?;
        self.reduce_scatter_uneven_into(output, tensor, dim, &sizes, op)
    }

    /// Like [`reduce_scatter_into`](Self::reduce_scatter_into), with `sizes[r]` entries of `dim` for rank `r`.
    #[track_caller]
    pub fn reduce_scatter_uneven_into(
        &self,
        output: &Tensor,
        tensor: &Tensor,
        dim: usize,
        sizes: &[usize],
        op: ReduceOp,
    ) -> Result<()> {
        self.collect_into(self.scattered(tensor, dim, sizes, op)?, tensor, output)
    }

    /// Joins equal pieces of all ranks along `concat_dim`, into `output`; see [`all_to_all`](Self::all_to_all).
    #[track_caller]
    pub fn all_to_all_into(&self, output: &Tensor, tensor: &Tensor, split_dim: usize, concat_dim: usize) -> Result<()> {
        self.collect_into(self.even_exchange(tensor, split_dim, concat_dim)?, tensor, output)
    }

    /// Writes the rows that the ranks send here to `output`; see [`all_to_all_single`](Self::all_to_all_single).
    #[track_caller]
    pub fn all_to_all_single_into<C: AsRef<[usize]>>(
        &self,
        output: &Tensor,
        tensor: &Tensor,
        counts: &[C],
    ) -> Result<()> {
        self.collect_into(self.route(tensor, counts)?, tensor, output)
    }

    /// Starts an [`all_gather_into`](Self::all_gather_into); `output` has the result after the wait.
    #[track_caller]
    pub fn all_gather_into_start(&self, output: &Tensor, tensor: &Tensor, dim: usize) -> Result<Pending<()>> {
        self.begin_into(self.even_joined(tensor, dim)?, tensor, output)
    }

    /// Starts a [`reduce_scatter_into`](Self::reduce_scatter_into); `output` has the result after the wait.
    #[track_caller]
    pub fn reduce_scatter_into_start(
        &self,
        output: &Tensor,
        tensor: &Tensor,
        dim: usize,
        op: ReduceOp,
    ) -> Result<Pending<()>> {
        let sizes: Dims = self.even_sizes(Op::ReduceScatter, tensor, dim)?;
        self.begin_into(self.scattered(tensor, dim, &sizes, op)?, tensor, output)
    }

    /// Starts an [`all_to_all_into`](Self::all_to_all_into); `output` has the result after the wait.
    #[track_caller]
    pub fn all_to_all_into_start(
        &self,
        output: &Tensor,
        tensor: &Tensor,
        split_dim: usize,
        concat_dim: usize,
    ) -> Result<Pending<()>> {
        self.begin_into(self.even_exchange(tensor, split_dim, concat_dim)?, tensor, output)
    }

    fn collect_into(&self, call: Call, tensor: &Tensor, output: &Tensor) -> Result<()> {
        self.check_output(&call, tensor, output)?;
        let (dense, output) = (tensor.detach().contiguous()?, output.detach());
        if self.is_alone(&call)? {
            return overwrite(&output, &[&dense]);
        }
        let size = bytes(&dense);
        let dense = [dense].into_iter().collect();
        self.engage(call, size, |backend, call| backend.run_into(call, dense, &[output]))
    }

    fn begin_into(&self, call: Call, tensor: &Tensor, output: &Tensor) -> Result<Pending<()>> {
        self.check_output(&call, tensor, output)?;
        let output = output.detach();
        if self.is_alone(&call)? {
            overwrite(&output, &[&tensor.detach().contiguous()?])?;
            return Ok(Pending::new(State::Done(Vec::new()), |_| Ok(())));
        }
        let outputs: Tensors = [output].into_iter().collect();
        let start = |backend: &dyn crate::backend::Backend, call, dense| backend.start_into(call, dense, outputs);
        Ok(Pending::new(self.enter(call, std::slice::from_ref(tensor), Memory::Copied, start)?, |_| Ok(())))
    }
}
