//! Collectives of several tensors in one call.
use super::pending::State;
use super::start::Memory;
use super::{PendingTensors, ProcessGroup};
use crate::Result;
use crate::backend::{Call, Fresh, Op, RAGGED, ReduceOp, Tensors, bytes};
use crate::call::Cut;
use candle_core::Tensor;

impl ProcessGroup {
    /// Reduces several tensors in one call and returns them in order. Each keeps its shape and dtype.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_dist::{Op, ReduceOp, World, comm};
    ///
    /// World::local(2).run(|ctx| -> candle_dist::Result<()> {
    ///     let tensors = [Tensor::new(&[1f32, 2.0], &Device::Cpu)?, Tensor::new(&[3u32], &Device::Cpu)?];
    ///     let (sums, counts) = comm::record(|| ctx.group().all_reduce_coalesced(&tensors, ReduceOp::Sum));
    ///     assert_eq!(sums?[1].to_vec1::<u32>()?, [6]);
    ///     assert_eq!(counts.get(Op::AllReduce).count, 1);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    #[track_caller]
    pub fn all_reduce_coalesced(&self, tensors: &[Tensor], op: ReduceOp) -> Result<Vec<Tensor>> {
        let Some((first, rest)) = tensors.split_first() else { return Ok(Vec::new()) };
        self.coalesce(Call { reduce: Some(op), ..Call::on(Op::AllReduce, first, &[]) }.with_rest(rest), tensors)
    }

    /// Starts an [`all_reduce_coalesced`](Self::all_reduce_coalesced) of copies of the tensors.
    #[track_caller]
    pub fn all_reduce_coalesced_start(&self, tensors: &[Tensor], op: ReduceOp) -> Result<PendingTensors> {
        let Some((first, rest)) = tensors.split_first() else { return Ok(Self::nothing()) };
        self.begin_all(
            Call { reduce: Some(op), ..Call::on(Op::AllReduce, first, &[]) }.with_rest(rest),
            tensors,
            Memory::Copied,
        )
    }

    /// Starts a [`broadcast_coalesced`](Self::broadcast_coalesced) of copies of the tensors.
    #[track_caller]
    pub fn broadcast_coalesced_start(&self, tensors: &[Tensor], root: usize) -> Result<PendingTensors> {
        self.check_rank(Op::Broadcast, root)?;
        let Some((first, rest)) = tensors.split_first() else { return Ok(Self::nothing()) };
        self.begin_all(self.handed_on(first, root)?.with_rest(rest), tensors, Memory::Copied)
    }

    /// Returns a call of no tensors, which is complete at once.
    fn nothing() -> PendingTensors {
        PendingTensors::new(State::Done(Vec::new()), Ok)
    }

    /// Copies the root's tensors to every rank in one call. All ranks give tensors of the same shapes and dtypes.
    #[track_caller]
    pub fn broadcast_coalesced(&self, tensors: &[Tensor], root: usize) -> Result<Vec<Tensor>> {
        self.check_rank(Op::Broadcast, root)?;
        let Some((first, rest)) = tensors.split_first() else { return Ok(Vec::new()) };
        self.coalesce(self.handed_on(first, root)?.with_rest(rest), tensors)
    }

    /// Joins each tensor with its counterparts of all ranks along `dim`, in one call. Shapes must be equal.
    #[track_caller]
    pub fn all_gather_coalesced(&self, tensors: &[Tensor], dim: usize) -> Result<Vec<Tensor>> {
        let Some((first, rest)) = tensors.split_first() else { return Ok(Vec::new()) };
        let mut call = Call::on(Op::AllGather, first, &[]).with_rest(rest);
        for tensor in tensors {
            call.dims.push(dim);
            call.sizes.push(self.repeat(self.dim_size(Op::AllGather, tensor, dim)?));
        }
        self.coalesce(call, tensors)
    }

    /// Reduces several tensors and returns this rank's pieces, each cut along `dim` into equal pieces, in one call.
    #[track_caller]
    pub fn reduce_scatter_coalesced(&self, tensors: &[Tensor], dim: usize, op: ReduceOp) -> Result<Vec<Tensor>> {
        let Some((first, rest)) = tensors.split_first() else { return Ok(Vec::new()) };
        let mut call = Call { reduce: Some(op), ..Call::on(Op::ReduceScatter, first, &[]) }.with_rest(rest);
        for tensor in tensors {
            call.dims.push(dim);
            call.sizes.push(self.even_sizes(Op::ReduceScatter, tensor, dim)?);
        }
        self.coalesce(call, tensors)
    }

    /// Starts an [`all_gather_coalesced`](Self::all_gather_coalesced) of copies of pieces with explicit sizes, each with its
    /// cut.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_dist::World;
    /// use candle_dist::functional::Cut;
    ///
    /// World::local(2).run(|ctx| -> candle_dist::Result<()> {
    ///     let mine = Tensor::ones((2 - ctx.rank(), 4), DType::F32, &Device::Cpu)?; // 2 rows and 1 row
    ///     let pending = ctx.group().all_gather_coalesced_start(&[(mine, Cut::new(0, &[2, 1]))])?;
    ///     assert_eq!(pending.wait()?[0].dims(), [3, 4]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    #[track_caller]
    pub fn all_gather_coalesced_start(&self, pieces: &[(Tensor, Cut)]) -> Result<PendingTensors> {
        self.start_cut(Op::AllGather, pieces, None, Memory::Copied)
    }

    /// Like [`all_gather_coalesced_start`](Self::all_gather_coalesced_start), without copies: nobody writes to the pieces
    /// until every rank has waited.
    #[track_caller]
    pub fn all_gather_coalesced_owned_start(&self, pieces: Vec<(Tensor, Cut)>) -> Result<PendingTensors> {
        self.start_cut(Op::AllGather, &pieces, None, Memory::Owned)
    }

    /// Starts a [`reduce_scatter_coalesced`](Self::reduce_scatter_coalesced) of copies of the tensors to pieces with explicit
    /// sizes.
    #[track_caller]
    pub fn reduce_scatter_coalesced_start(&self, wholes: &[(Tensor, Cut)], op: ReduceOp) -> Result<PendingTensors> {
        self.start_cut(Op::ReduceScatter, wholes, Some(op), Memory::Copied)
    }

    /// Like [`reduce_scatter_coalesced_start`](Self::reduce_scatter_coalesced_start), without copies: nobody writes to the
    /// tensors until every rank has waited.
    #[track_caller]
    pub fn reduce_scatter_coalesced_owned_start(
        &self,
        wholes: Vec<(Tensor, Cut)>,
        op: ReduceOp,
    ) -> Result<PendingTensors> {
        self.start_cut(Op::ReduceScatter, &wholes, Some(op), Memory::Owned)
    }

    #[track_caller]
    fn start_cut(
        &self,
        op: Op,
        cuts: &[(Tensor, Cut)],
        reduce: Option<ReduceOp>,
        memory: Memory,
    ) -> Result<PendingTensors> {
        for (tensor, cut) in cuts {
            match op {
                Op::AllGather => self.check_piece(op, tensor, cut.dim, &cut.sizes)?,
                _ => self.check_cover(op, tensor, cut.dim, &cut.sizes)?,
            }
        }
        let tensors: Vec<Tensor> = cuts.iter().map(|(tensor, _)| tensor.clone()).collect();
        let Some((first, rest)) = tensors.split_first() else { return Ok(Self::nothing()) };
        let mut call = Call { reduce, ..Call::on(op, first, &[]) }.with_rest(rest);
        for (i, (_, cut)) in cuts.iter().enumerate() {
            if op == Op::AllGather {
                let shape = if i == 0 { &mut call.shape } else { &mut call.rest[i - 1].1 };
                shape[cut.dim] = RAGGED;
            }
            call.dims.push(cut.dim);
            call.sizes.push(cut.sizes.clone());
        }
        self.begin_all(call, &tensors, memory)
    }

    fn coalesce(&self, call: Call, tensors: &[Tensor]) -> Result<Vec<Tensor>> {
        if self.is_alone(&call)? {
            return Ok(tensors.to_vec());
        }
        let dense = tensors.iter().map(|t| t.detach().contiguous()).collect::<candle_core::Result<Tensors>>()?;
        let size = dense.iter().map(bytes).sum();
        let made = self.engage(call, size, |backend, call| backend.run(call, dense))?;
        Ok(made.into_iter().map(Fresh::into_tensor).collect())
    }
}
