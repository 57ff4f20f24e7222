//! One rank of a simulated world. Results have the right shapes, and nothing is communicated.
use super::{Backend, Call, Fresh, Op, Results, StartedCall, Tensors};
use crate::{Error, GroupFailure, Result};
use candle_core::{DType, Device, Tensor};
use std::sync::Arc;
use std::time::Duration;

/// One rank of a simulated group.
#[derive(Debug)]
pub(crate) struct Simulated {
    rank: usize,
    ranks: Vec<usize>,
}

impl Simulated {
    pub(crate) fn new(rank: usize, ranks: Vec<usize>) -> Self {
        Self { rank, ranks }
    }

    /// Returns the `i`-th result of a call as if all ranks had this rank's tensor: copies of it joined, or the tensor
    /// itself if the shape is the same, and zeros otherwise.
    fn result(&self, call: &Call, i: usize, mine: Option<&Tensor>) -> Result<Fresh> {
        let shape = call.result_shape(self.rank, i, mine.map_or(&call.shape, |tensor| tensor.dims()));
        match mine {
            Some(tensor) if tensor.dims() == shape.as_slice() => Fresh::copy_of(tensor),
            Some(tensor) if matches!(call.op, Op::AllGather | Op::Gather) => {
                let dim = call.dims[i];
                let pieces = call.sizes[i].iter().map(|&len| match len == tensor.dims()[dim] {
                    true => Ok(tensor.clone()),
                    false => {
                        let mut dims = tensor.dims().to_vec();
                        dims[dim] = len;
                        Tensor::zeros(dims, tensor.dtype(), tensor.device())
                    }
                });
                Fresh::copy_of(&Tensor::cat(&pieces.collect::<candle_core::Result<Vec<_>>>()?, dim)?)
            }
            _ => {
                let dtype = mine.map(Tensor::dtype).or(call.dtype).unwrap_or(DType::F32);
                let device = mine.map_or(&Device::Cpu, Tensor::device);
                Fresh::copy_of(&Tensor::zeros(shape.as_slice(), dtype, device)?)
            }
        }
    }
}

impl Backend for Simulated {
    fn name(&self) -> &'static str {
        "simulated"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    fn run(&self, call: Call, tensors: Tensors) -> Result<Results> {
        if call.gives_nothing(self.rank) {
            return Ok(Results::new());
        }
        (0..1 + call.rest.len()).map(|i| self.result(&call, i, tensors.get(i))).collect()
    }

    fn run_in_place(&self, _: Call, _: &Tensor) -> Result<()> {
        Ok(())
    }

    fn start(&self, call: Call, tensors: Tensors) -> Result<Box<dyn StartedCall>> {
        Ok(Box::new(Done(self.run(call, tensors)?)))
    }

    fn send(&self, _: Call, _: Tensor) -> Result<()> {
        Ok(())
    }

    fn recv(&self, call: Call) -> Result<Tensor> {
        Ok(self.result(&Call { op: Op::Broadcast, ..call }, 0, None)?.into_tensor())
    }

    fn monitored_barrier(&self, _: Call, _: Duration) -> Result<()> {
        Ok(())
    }

    fn subgroup(&self, members: &[usize]) -> Result<Arc<dyn Backend>> {
        let rank = members.iter().position(|&member| member == self.rank).ok_or_else(|| Error::InvalidArgument {
            rank: self.ranks[self.rank],
            op: "subgroup",
            reason: format!("only members create a group, and this rank is not in {members:?}"),
        })?;
        Ok(Arc::new(Self::new(rank, members.iter().map(|&member| self.ranks[member]).collect())))
    }

    fn fail(&self, _: &str) {}

    fn failure(&self) -> Option<Arc<GroupFailure>> {
        None
    }
}

struct Done(Results);

impl StartedCall for Done {
    fn is_ready(&self) -> Result<bool> {
        Ok(true)
    }

    fn finish(self: Box<Self>) -> Result<Results> {
        Ok(self.0)
    }
}
