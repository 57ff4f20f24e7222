//! One rank of a simulated world. Results have the right shapes, and nothing is communicated.
use super::outputs::{completed, deliver, fill, unsupported};
use super::{Backend, Call, Form, Fresh, Op, Results, StartedCall, Tensors};
use crate::{Cause, Error, GroupFailure, Result};
use candle_core::{DType, Device, Tensor};
use std::sync::Arc;

/// One rank of a simulated group.
#[derive(Debug)]
pub(crate) struct SimulatedBackend {
    rank: usize,
    ranks: Vec<usize>,
}

impl SimulatedBackend {
    pub(crate) fn new(rank: usize, ranks: Vec<usize>) -> Self {
        Self { rank, ranks }
    }

    /// Returns the `i`-th result of a call as if all ranks had this rank's tensor: copies of it joined, or the tensor
    /// itself if the shape is the same, and zeros otherwise.
    fn result(&self, call: &Call, i: usize, mine: Option<&Tensor>) -> Result<Fresh> {
        let shape = call.collective.output(i, mine.map_or(&call.shape, |tensor| tensor.dims()), self.rank);
        Ok(match (mine, call.collective.cuts().get(i)) {
            (Some(tensor), _) if tensor.dims() == shape.as_slice() => Fresh::copy_of(tensor)?,
            (Some(tensor), Some(cut)) if matches!(call.op(), Op::AllGather | Op::Gather) => {
                let pieces = cut.sizes.iter().map(|&len| match len == tensor.dims()[cut.dim] {
                    true => Ok(tensor.clone()),
                    false => {
                        let mut dims = tensor.dims().to_vec();
                        dims[cut.dim] = len;
                        Tensor::zeros(dims, tensor.dtype(), tensor.device())
                    }
                });
                Fresh::copy_of(&Tensor::cat(&pieces.collect::<candle_core::Result<Vec<_>>>()?, cut.dim)?)?
            }
            _ => {
                let dtype = mine.map(Tensor::dtype).or(call.dtype).unwrap_or(DType::F32);
                let device = mine.map_or(&Device::Cpu, Tensor::device);
                Fresh::copy_of(&Tensor::zeros(shape.as_slice(), dtype, device)?)?
            }
        })
    }
}

impl Backend for SimulatedBackend {
    fn name(&self) -> &'static str {
        "simulated"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    fn run(&self, call: Call, tensors: Tensors, outputs: Tensors) -> Result<Results> {
        if !call.collective.has_result(self.rank) || call.form == Form::InPlace {
            return Ok(Results::new());
        }
        fill(
            &outputs,
            (0..call.count()).map(|i| self.result(&call, i, tensors.get(i))).collect::<Result<_>>()?,
        )
    }

    fn start(&self, call: Call, tensors: Tensors, outputs: Tensors) -> Result<Box<dyn StartedCall>> {
        Ok(completed(self.run(call, tensors, outputs)?))
    }

    fn recv(&self, call: Call, output: Option<&Tensor>) -> Result<(usize, Tensor)> {
        let Some(from) = call.collective.peer() else {
            return Err(unsupported(self.name(), "receive from any rank"));
        };
        deliver(from, self.result(&call, 0, None)?.into_tensor(), output)
    }

    fn subgroup(&self, members: &[usize]) -> Result<Arc<dyn Backend>> {
        let rank =
            members.iter().position(|&member| member == self.rank).ok_or_else(|| Error::InvalidArgument {
                rank: self.ranks[self.rank],
                op: "subgroup",
                reason: format!("only members create a group, and this rank is not in {members:?}"),
            })?;
        Ok(Arc::new(Self::new(rank, members.iter().map(|&member| self.ranks[member]).collect())))
    }

    fn stop(&self, _: Cause) {}

    fn failure(&self) -> Option<Arc<GroupFailure>> {
        None
    }
}
