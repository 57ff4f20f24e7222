//! Checks the devices of ranks in one process.
use crate::backend::device::is_per_thread;
use crate::{Error, Result};
use candle_core::Device;

/// Refuses devices that are not GPUs, and ranks that share a `Device`.
pub(crate) fn check(devices: &[Device]) -> Result<()> {
    for (rank, device) in devices.iter().enumerate() {
        if !device.is_cuda() {
            let found = device.location();
            return Err(Error::Unsupported(format!(
                "NCCL with rank {rank} on {found:?}; give it a CUDA device"
            )));
        }
        if is_per_thread(device) {
            let why = "whose stream differs between threads, and NCCL enqueues on a thread of its own";
            let fix = "make it with `Device::new_cuda_with_stream`";
            return Err(Error::Unsupported(format!("NCCL with rank {rank} on a Device {why}; {fix}")));
        }
        if let Some(other) = devices[..rank].iter().position(|other| other.same_device(device)) {
            let why = "their calls would wait for each other on its one stream";
            let fix = "make a `Device::new_cuda_with_stream` for each";
            return Err(Error::Unsupported(format!(
                "NCCL with ranks {other} and {rank} on one Device: {why}; {fix}"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_on_the_host_is_named() {
        let error = check(&[Device::Cpu]).expect_err("no GPU");
        assert!(error.to_string().contains("rank 0 on Cpu; give it a CUDA device"), "{error}");
        assert!(check(&[]).is_ok());
    }
}
