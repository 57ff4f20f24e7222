//! The engine for NVIDIA GPUs, over NCCL: one GPU a rank, which is a thread or a process.
//!
//! Calls are enqueued on the stream on which candle computes with the tensor, and return while they run: what candle
//! does with the result next waits for it, the host does not. Differences from the other engines:
//!
//! | | |
//! |---|---|
//! | order of sums | NCCL's own, with 16-bit floats rounded at each step; alike on all ranks |
//! | NaN under `Min` and `Max` | may get lost |
//! | host tensors | go through the GPU and come back; for small things |
//! | what [`recv`](Backend::recv) and a scatter give | a tensor on this rank's GPU |
//! | tags | each pair of ranks has a channel for each tag, made when it is first used: use few |
//! | a send | waits for nobody; a thread of the engine hands it over when the receiver comes |
//! | ranks that make different calls | end by the timeout, unless calls are compared (`InitOptions::debug`) |
//!
//! A rank's watchdog looks at its communicators several times a second. When NCCL reports an error, a call has taken
//! longer than the timeout, or the world has failed, it aborts them, so that no stream waits forever. What was computed
//! from an aborted call is rubbish, and every later call says why.
mod plan;

#[cfg(feature = "nccl")]
mod comm;
mod devices;
#[cfg(feature = "nccl")]
mod engine;
#[cfg(feature = "nccl")]
mod lane;
#[cfg(feature = "nccl")]
mod rank;
mod text;
#[cfg(feature = "nccl")]
mod transfer;
mod values;
#[cfg(feature = "nccl")]
mod watch;

#[cfg(feature = "nccl")]
use crate::{Result, backend::Backend, control::Control, launch::LaunchInfo};
#[cfg(feature = "nccl")]
use candle_core::Device;
#[cfg(feature = "nccl")]
use std::sync::Arc;

#[cfg(feature = "nccl")]
pub use comm::library_version;
#[cfg(feature = "nccl")]
pub(crate) use devices::check as check_devices;
#[cfg(feature = "nccl")]
pub(crate) use engine::NcclBackend;
#[cfg(feature = "nccl")]
pub(crate) use values::Values;
#[cfg(feature = "nccl")]
pub(crate) use watch::Watch;

/// The engine of this process, which has met the others: on the GPU of its local rank.
///
/// # Errors
/// If the host has fewer GPUs than ranks (see [`LaunchInfo::device_ordinal`]), and for an NCCL library that is too old.
#[cfg(feature = "nccl")]
pub fn start(info: &LaunchInfo, control: &Arc<Control>) -> Result<Arc<dyn Backend>> {
    let device = Device::new_cuda_with_stream(ordinal(info)?)?;
    Ok(Arc::new(NcclBackend::world(Watch::Process(control.clone()), &device, control.size())?))
}

/// An error if this process has no GPU of its own, or no NCCL library that is new enough; starts nothing.
#[cfg(feature = "nccl")]
pub(crate) fn check(info: &LaunchInfo) -> Result<()> {
    ordinal(info)?;
    text::check_version(library_version()?).map_err(crate::Error::Unsupported)
}

/// The number of this process' GPU.
#[cfg(feature = "nccl")]
fn ordinal(info: &LaunchInfo) -> Result<usize> {
    let gpus = cudarc::driver::CudaContext::device_count().map_err(rank::cuda)?;
    info.device_ordinal(usize::try_from(gpus).unwrap_or(0))
}
