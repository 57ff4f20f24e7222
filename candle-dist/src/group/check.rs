//! Checks of arguments before anything is sent.
use super::ProcessGroup;
use crate::backend::storage::share_memory;
use crate::call::{CARRIED, Call, Dims, Op, carried, total};
use crate::{Error, Result};
use candle_core::{DType, Tensor};

impl ProcessGroup {
    pub(super) fn invalid(&self, op: Op, reason: String) -> Error {
        self.invalid_named(op.name(), reason)
    }

    pub(super) fn invalid_named(&self, op: &'static str, reason: String) -> Error {
        Error::InvalidArgument { rank: self.ranks()[self.rank()], op, reason }
    }

    pub(super) fn check_rank(&self, op: Op, rank: usize) -> Result<()> {
        self.check_rank_named(op.name(), rank)
    }

    pub(super) fn check_rank_named(&self, op: &'static str, rank: usize) -> Result<()> {
        if rank < self.size() {
            return Ok(());
        }
        let last = self.size() - 1;
        Err(self.invalid_named(op, format!("rank {rank} is outside the group; its ranks are 0 to {last}")))
    }

    pub(super) fn check_peer(&self, op: Op, peer: usize) -> Result<()> {
        self.check_rank(op, peer)?;
        if peer == self.rank() {
            return Err(self.invalid(op, format!("rank {peer} is this rank; name another one")));
        }
        Ok(())
    }

    pub(super) fn dim_size(&self, op: Op, tensor: &Tensor, dim: usize) -> Result<usize> {
        tensor.dims().get(dim).copied().ok_or_else(|| {
            let reason = format!("dim {dim} is out of range for a tensor of shape {:?}", tensor.dims());
            self.invalid(op, reason)
        })
    }

    pub(super) fn even_sizes(&self, op: Op, tensor: &Tensor, dim: usize) -> Result<Dims> {
        let (len, n) = (self.dim_size(op, tensor, dim)?, self.size());
        if len % n != 0 {
            let reason = format!("dim {dim} of shape {:?} does not divide by {n} ranks; give sizes", tensor.dims());
            return Err(self.invalid(op, reason));
        }
        Ok(self.repeat(len / n))
    }

    /// Checks that the tensor is this rank's piece of `dim`.
    pub(super) fn check_piece(&self, op: Op, tensor: &Tensor, dim: usize, sizes: &[usize]) -> Result<()> {
        let len = self.dim_size(op, tensor, dim)?;
        if sizes.len() != self.size() || sizes[self.rank()] != len || total(sizes).is_none() {
            let (shape, n) = (tensor.dims(), self.size());
            let reason = format!("sizes {sizes:?} of dim {dim} do not fit {n} ranks and a piece of shape {shape:?}");
            return Err(self.invalid(op, reason));
        }
        Ok(())
    }

    /// Checks that the sizes cut the whole of `dim`.
    pub(super) fn check_cover(&self, op: Op, tensor: &Tensor, dim: usize, sizes: &[usize]) -> Result<()> {
        self.check_sizes(op, tensor.dims(), dim, sizes)
    }

    pub(super) fn check_sizes(&self, op: Op, shape: &[usize], dim: usize, sizes: &[usize]) -> Result<()> {
        if sizes.len() != self.size() || shape.get(dim).copied() != total(sizes) {
            let n = self.size();
            let reason = format!("sizes {sizes:?} do not cut dim {dim} of shape {shape:?} into {n} pieces");
            return Err(self.invalid(op, reason));
        }
        Ok(())
    }

    /// Refuses memory that cannot hold the result of `call` on `tensor`.
    pub(super) fn check_output(&self, call: &Call, tensor: &Tensor, output: &Tensor) -> Result<()> {
        let shape = call.result_shape(self.rank(), 0, tensor.dims());
        self.check_memory(call.op, output, &shape, tensor.dtype())?;
        let (here, there) = (tensor.device().location(), output.device().location());
        if here != there {
            let reason = format!("the output is on {there:?} and the input on {here:?}; give one on {here:?}");
            return Err(self.invalid(call.op, reason));
        }
        if share_memory(tensor, output) {
            let reason = "the output lies in the memory of the input; give memory of its own".to_string();
            return Err(self.invalid(call.op, reason));
        }
        Ok(())
    }

    /// Refuses memory that cannot hold `shape` of `dtype`, or that a backward pass may still need.
    pub(super) fn check_memory(&self, op: Op, output: &Tensor, shape: &[usize], dtype: DType) -> Result<()> {
        if output.dims() != shape || output.dtype() != dtype || !output.is_contiguous() {
            let (got, is) = (output.dims(), output.dtype().as_str());
            let strided = if output.is_contiguous() { "" } else { " that is not contiguous" };
            let name = dtype.as_str();
            let reason =
                format!("the output must be a contiguous {name} tensor of {shape:?}, got {is} {got:?}{strided}");
            return Err(self.invalid(op, reason));
        }
        if output.track_op() && !output.is_variable() {
            let reason =
                "the output is part of a graph, whose backward pass may need its values; give a Var or detach it";
            return Err(self.invalid(op, reason.to_string()));
        }
        Ok(())
    }

    /// Refuses dtypes that no backend carries, averages of integers, and bitwise reductions of floats.
    pub(super) fn check_dtypes(&self, call: &Call) -> Result<()> {
        for dtype in call.dtype.iter().chain(call.rest.iter().map(|(dtype, _)| dtype)) {
            let name = dtype.as_str();
            if !CARRIED.contains(dtype) {
                let carried = carried();
                return Err(self.invalid(call.op, format!("{name} tensors are not carried; cast to one of {carried}")));
            }
            let Some(reduce) = call.reduce else { continue };
            if dtype.is_int() && reduce.is_fractional() {
                let reason = format!("{reduce} of {name} tensors is no {name}; use sum, or cast to a float dtype");
                return Err(self.invalid(call.op, reason));
            }
            if !dtype.is_int() && reduce.is_bitwise() {
                let reason = format!("{reduce} of {name} tensors; floats have no bits to combine, use whole numbers");
                return Err(self.invalid(call.op, reason));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use crate::backend::{Call, Op, ReduceOp};
    use crate::{Result, World};
    use candle_core::{DType, Device, DeviceLocation, Tensor};
    use smallvec::smallvec;

    /// Makes a call for tensors on these devices, one per rank; the devices need not exist.
    fn error_on(devices: [DeviceLocation; 2]) -> [String; 2] {
        let texts = World::local(2).run(|ctx| -> Result<String> {
            let x = Tensor::zeros(3, DType::F32, &Device::Cpu)?;
            let call = Call { reduce: Some(ReduceOp::Sum), ..Call::on(Op::AllReduce, &x, &[]) };
            let call = Call { device: devices[ctx.rank()], ..call };
            let made = ctx.group().engage(call, 12, |backend, call| backend.run(call, smallvec![x]));
            Ok(made.unwrap_err().to_string())
        });
        texts.unwrap().try_into().unwrap()
    }

    #[test]
    fn tensors_on_other_devices_are_refused_by_all_ranks() {
        let gpu = DeviceLocation::Metal { gpu_id: 1 };
        for text in error_on([gpu, gpu]) {
            assert!(text.contains("all_reduce of tensors on Metal") && text.contains("Device::Cpu"), "{text}");
        }
        for text in error_on([DeviceLocation::Cpu, gpu]) {
            assert!(text.contains("(device differs)"), "{text}");
        }
    }
}
