//! Checks of arguments before anything is sent.
use super::ProcessGroup;
use crate::call::{CARRIED, Call, Collective, Cut, Op, carried};
use crate::{Error, Result};
use candle_core::Tensor;

impl ProcessGroup {
    pub(super) fn invalid(&self, op: Op, reason: String) -> Error {
        self.invalid_named(op.name(), reason)
    }

    pub(super) fn invalid_named(&self, op: &'static str, reason: String) -> Error {
        Error::InvalidArgument { rank: self.ranks()[self.rank()], op, reason }
    }

    pub(super) fn check_rank_named(&self, op: &'static str, rank: usize) -> Result<()> {
        if rank < self.size() {
            return Ok(());
        }
        let last = self.size() - 1;
        Err(self.invalid_named(op, format!("rank {rank} is outside the group; its ranks are 0 to {last}")))
    }

    pub(super) fn check_ranks(&self, collective: &Collective) -> Result<()> {
        let checked = collective.check_ranks(self.rank(), self.size());
        checked.map_err(|reason| self.invalid(collective.op(), reason))
    }

    pub(super) fn dim_size(&self, op: Op, tensor: &Tensor, dim: usize) -> Result<usize> {
        tensor.dims().get(dim).copied().ok_or_else(|| {
            let reason = format!("dim {dim} is out of range for a tensor of shape {:?}", tensor.dims());
            self.invalid(op, reason)
        })
    }

    pub(super) fn even_cut(&self, op: Op, tensor: &Tensor, dim: usize) -> Result<Cut> {
        let (len, n) = (self.dim_size(op, tensor, dim)?, self.size());
        if len % n != 0 {
            let reason =
                format!("dim {dim} of shape {:?} does not divide by {n} ranks; give sizes", tensor.dims());
            return Err(self.invalid(op, reason));
        }
        Ok(Cut::even(dim, len / n, n))
    }

    /// Checks that the cuts of a collective fit its `nth` tensor.
    pub(super) fn check_fit(&self, collective: &Collective, nth: usize, tensor: &Tensor) -> Result<()> {
        let checked = collective.check(nth, tensor.dims(), self.rank(), self.size());
        checked.map_err(|reason| self.invalid(collective.op(), reason))
    }

    /// Refuses dtypes that no backend carries, averages of integers, and bitwise reductions of floats.
    pub(super) fn check_dtypes(&self, call: &Call) -> Result<()> {
        for dtype in call.dtype.iter().chain(call.rest.iter().map(|(dtype, _)| dtype)) {
            let name = dtype.as_str();
            if !CARRIED.contains(dtype) {
                let carried = carried();
                return Err(self.invalid(
                    call.op(),
                    format!("{name} tensors are not carried; cast to one of {carried}"),
                ));
            }
            let Some(reduce) = call.collective.reduction() else { continue };
            if dtype.is_int() && reduce.is_fractional() {
                let reason =
                    format!("{reduce} of {name} tensors is no {name}; use sum, or cast to a float dtype");
                return Err(self.invalid(call.op(), reason));
            }
            if !dtype.is_int() && reduce.is_bitwise() {
                let reason =
                    format!("{reduce} of {name} tensors; floats have no bits to combine, use whole numbers");
                return Err(self.invalid(call.op(), reason));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use crate::backend::{Call, Collective, ReduceOp};
    use crate::{Result, World};
    use candle_core::{DType, Device, DeviceLocation, Tensor};
    use smallvec::smallvec;

    /// Makes a call for tensors on these devices, one per rank; the devices need not exist.
    fn error_on(devices: [DeviceLocation; 2]) -> [String; 2] {
        let texts = World::threads(2).run(|ctx| -> Result<String> {
            let x = Tensor::zeros(3, DType::F32, &Device::Cpu)?;
            let call = Call::on(Collective::AllReduce(ReduceOp::Sum), &x);
            let call = Call { device: devices[ctx.rank()], ..call };
            let made =
                ctx.group().engage(call, 12, |backend, call| backend.run(call, smallvec![x], smallvec![]));
            Ok(made.unwrap_err().to_string())
        });
        texts.unwrap().try_into().unwrap()
    }

    #[test]
    fn tensors_on_other_devices_are_refused_by_all_ranks() {
        let gpu = DeviceLocation::Metal { gpu_id: 1 };
        for text in error_on([gpu, gpu]) {
            assert!(
                text.contains("all_reduce of tensors on Metal") && text.contains("Device::Cpu"),
                "{text}"
            );
        }
        for text in error_on([DeviceLocation::Cpu, gpu]) {
            assert!(text.contains("(device differs)"), "{text}");
        }
    }
}
