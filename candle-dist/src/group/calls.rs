//! The calls of collectives, made from what a program gives them.
use super::ProcessGroup;
use crate::Result;
use crate::backend::{Call, Dims, Op, ReduceOp};
use candle_core::{DType, Shape, Tensor};
use smallvec::smallvec;

impl ProcessGroup {
    /// Makes the call of an all_to_all with equal pieces.
    #[track_caller]
    pub(super) fn even_exchange(&self, tensor: &Tensor, split_dim: usize, concat_dim: usize) -> Result<Call> {
        let split = self.even_sizes(Op::AllToAll, tensor, split_dim)?;
        let concat = self.dim_size(Op::AllToAll, tensor, concat_dim)?;
        self.exchanged(tensor, (split_dim, &split), (concat_dim, &self.repeat(concat)))
    }

    /// Makes the call of an all_to_all.
    #[track_caller]
    pub(super) fn exchanged(
        &self,
        tensor: &Tensor,
        split: (usize, &[usize]),
        concat: (usize, &[usize]),
    ) -> Result<Call> {
        self.check_cover(Op::AllToAll, tensor, split.0, split.1)?;
        self.check_piece(Op::AllToAll, tensor, concat.0, concat.1)?;
        if split.0 == concat.0 {
            return Err(self.invalid(Op::AllToAll, "split and concat dims are equal; name two different dims".into()));
        }
        Ok(Call {
            dims: smallvec![split.0, concat.0],
            sizes: smallvec![Dims::from_slice(split.1), Dims::from_slice(concat.1)],
            ..Call::on(Op::AllToAll, tensor, &[concat.0])
        })
    }

    /// Makes the call of a gather of equal pieces.
    #[track_caller]
    pub(super) fn even_joined(&self, tensor: &Tensor, dim: usize) -> Result<Call> {
        let len = self.dim_size(Op::AllGather, tensor, dim)?;
        self.joined(Op::AllGather, tensor, dim, &self.repeat(len))
    }

    /// Makes the call of a gather.
    #[track_caller]
    pub(super) fn joined(&self, op: Op, tensor: &Tensor, dim: usize, sizes: &[usize]) -> Result<Call> {
        self.check_piece(op, tensor, dim, sizes)?;
        let sizes = smallvec![Dims::from_slice(sizes)];
        Ok(Call { dims: smallvec![dim], sizes, ..Call::on(op, tensor, &[dim]) })
    }

    /// Makes the call of a gather to the root.
    #[track_caller]
    pub(super) fn gathered(&self, tensor: &Tensor, dim: usize, sizes: &[usize], root: usize) -> Result<Call> {
        self.check_rank(Op::Gather, root)?;
        Ok(Call { peer: Some(root), ..self.joined(Op::Gather, tensor, dim, sizes)? })
    }

    /// Makes the call of a broadcast.
    #[track_caller]
    pub(super) fn handed_on(&self, tensor: &Tensor, root: usize) -> Result<Call> {
        self.check_rank(Op::Broadcast, root)?;
        Ok(Call { peer: Some(root), ..Call::on(Op::Broadcast, tensor, &[]) })
    }

    /// Makes the call of a reduction to the root.
    #[track_caller]
    pub(super) fn reduced(&self, tensor: &Tensor, root: usize, op: ReduceOp) -> Result<Call> {
        self.check_rank(Op::Reduce, root)?;
        Ok(Call { peer: Some(root), reduce: Some(op), ..Call::on(Op::Reduce, tensor, &[]) })
    }

    /// Makes the call of a reduce_scatter.
    #[track_caller]
    pub(super) fn scattered(&self, tensor: &Tensor, dim: usize, sizes: &[usize], op: ReduceOp) -> Result<Call> {
        self.check_cover(Op::ReduceScatter, tensor, dim, sizes)?;
        let sizes = smallvec![Dims::from_slice(sizes)];
        Ok(Call { reduce: Some(op), dims: smallvec![dim], sizes, ..Call::on(Op::ReduceScatter, tensor, &[]) })
    }

    /// Makes the call of a scatter, with the tensor if this rank is the root.
    #[track_caller]
    pub(super) fn handed_out<'a>(
        &self,
        tensor: Option<&'a Tensor>,
        (shape, dtype): (Shape, DType),
        dim: usize,
        sizes: &[usize],
        root: usize,
    ) -> Result<(Call, Option<&'a Tensor>)> {
        self.check_rank(Op::Scatter, root)?;
        self.check_sizes(Op::Scatter, shape.dims(), dim, sizes)?;
        let mine = if self.rank() == root { tensor } else { None };
        if self.rank() == root && !tensor.is_some_and(|t| t.shape() == &shape && t.dtype() == dtype) {
            let got = tensor.map_or("none".to_string(), |t| format!("{:?} {}", t.dims(), t.dtype().as_str()));
            let reason = format!("the root must give a tensor of {:?} {}, got {got}", shape.dims(), dtype.as_str());
            return Err(self.invalid(Op::Scatter, reason));
        }
        let call = Call {
            dtype: Some(dtype),
            shape: Dims::from_slice(shape.dims()),
            peer: Some(root),
            dims: smallvec![dim],
            sizes: smallvec![Dims::from_slice(sizes)],
            ..Call::new(Op::Scatter)
        };
        Ok((call, mine))
    }

    pub(super) fn repeat(&self, len: usize) -> Dims {
        smallvec![len; self.size()]
    }
}
