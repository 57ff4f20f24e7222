//! The backend for NVIDIA GPUs, over NCCL: one GPU per rank, which is a thread or a process.
//!
//! Calls are enqueued on the stream on which candle computes with the tensor, and return while they run. candle's next
//! use of the result waits for it; the host does not. Differences from the other backends:
//!
//! | | |
//! |---|---|
//! | order of sums | NCCL's own, and each step rounds 16-bit floats; the same on all ranks |
//! | NaN under `Min` and `Max` | propagates; floats cost one byte more for each element, in the same group of calls |
//! | host tensors | are copied to the GPU and back; use them for small data |
//! | results of [`recv`](Backend::recv) and scatter | are on this rank's GPU |
//! | tags | each pair of ranks has a channel per tag, created on first use: use few tags |
//! | the first call on a group | waits until all members have made theirs, also if it is started. Later ones that are started do not wait, and those of different groups may come in any order on each rank |
//! | a send | never waits; a thread of the backend delivers it when its receive is enqueued, however late. A rank that ends waits for its messages until their receivers have returned or the timeout has passed |
//! | threads, with `CUDA_DEVICE_MAX_CONNECTIONS` below 32 | a started call is enqueued by a thread of its own, when all members have started it and what comes before it has ended on their GPUs. Another call waits on the host for the other members as long as a started call or a message of its rank is not enqueued |
//! | threads that share a GPU | wait on the host in each call until all members have come to it and until it is enqueued; a started call does so on a thread of its own |
//! | ranks that make different calls | get an error: threads at once; processes within a second or before the rank ends, or at once if calls wait for it (`InitOptions::debug`) |
//! | groups that are dropped | keep their memory, up to 8 for each rank, or until no call is under way |
//!
//! A rank's watchdog checks its communicators several times a second. It aborts them if NCCL reports an error, a call
//! exceeds the timeout, or the world has failed, so that no stream waits forever. Results computed from an aborted call
//! are garbage, and every later call returns the error, as the end of the world does. An abort that hangs ends the process ([`World::abort_timeout`](crate::World::abort_timeout)).
//!
//! | variable | set by [`threads::settle`](crate::threads::settle), unless the user has set it |
//! |---|---|
//! | `CUDA_DEVICE_MAX_CONNECTIONS=32` | the most queues for streams: one that waits holds up those behind it in its queue |
//! | `NCCL_RUNTIME_CONNECT=0` | communicators connect when they are made, not inside of calls that were only started |
//!
#![doc = include_str!("README.md")]

mod plan;

mod abort;
mod assemblies;
#[cfg(feature = "nccl")]
mod backend;
#[cfg(feature = "nccl")]
mod comm;
mod compare;
#[cfg(all(feature = "nccl", feature = "testing"))]
#[doc(hidden)]
pub mod costs;
mod ctas;
mod devices;
mod errors;
#[cfg(feature = "nccl")]
mod handle;
#[cfg(feature = "nccl")]
mod lane;
#[cfg(feature = "nccl")]
mod lanes;
#[cfg(feature = "nccl")]
mod launches;
#[cfg(feature = "nccl")]
mod limit;
#[cfg(feature = "nccl")]
mod marks;
#[cfg(feature = "nccl")]
mod parked;
#[cfg(feature = "nccl")]
mod pools;
mod posts;
#[cfg(feature = "nccl")]
mod rank;
#[cfg(feature = "nccl")]
mod reduction;
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
pub(crate) use assemblies::AssemblyTable;
#[cfg(feature = "nccl")]
pub(crate) use backend::NcclBackend;
#[cfg(feature = "nccl")]
pub(crate) use compare::CallTable;
#[cfg(feature = "nccl")]
use compare::LastCalls;
#[cfg(feature = "nccl")]
pub(crate) use ctas::CtaLimits;
#[cfg(feature = "nccl")]
pub(crate) use devices::check as check_devices;
#[cfg(feature = "nccl")]
pub use handle::library_version;
#[cfg(feature = "nccl")]
pub(crate) use parked::ParkedComms;
#[cfg(feature = "nccl")]
pub(crate) use pools::open as open_pools;
#[cfg(feature = "nccl")]
pub(crate) use posts::ReceivePosts;
#[cfg(feature = "nccl")]
pub(crate) use rank::RankTerms;
#[cfg(feature = "nccl")]
pub(crate) use values::ThreadValues;
#[cfg(feature = "nccl")]
pub(crate) use watch::WorldWatch;

/// Starts the backend of this process, which has met the others, on the GPU of its local rank.
///
/// # Errors
/// If the host has fewer GPUs than ranks (see [`LaunchInfo::device_ordinal`]), or if the NCCL library is too old.
#[cfg(feature = "nccl")]
pub fn start(info: &LaunchInfo, control: &Arc<Control>) -> Result<Arc<dyn Backend>> {
    let device = Device::new_cuda_with_stream(ordinal(info)?)?;
    open_pools(std::slice::from_ref(&device))?;
    crate::threads::note_gpu_variables();
    let crate::launch::GpuOptions { max_ctas, abort_timeout } = control.gpu();
    let ctas = CtaLimits::new(max_ctas, info.local_size.div_ceil(gpus()?.max(1)))?;
    let terms = RankTerms { ctas, abort_timeout, parked: ParkedComms::new(1), assemblies: None };
    let watch = WorldWatch::Process(control.clone(), LastCalls::default());
    Ok(Arc::new(NcclBackend::world(watch, &device, control.size(), terms)?))
}

/// Checks that this process has its own GPU and a recent NCCL library. Starts nothing.
#[cfg(feature = "nccl")]
pub(crate) fn check(info: &LaunchInfo) -> Result<()> {
    ordinal(info)?;
    errors::check_version(library_version()?).map_err(crate::Error::Unsupported)
}

/// Returns the number of this process's GPU.
#[cfg(feature = "nccl")]
fn ordinal(info: &LaunchInfo) -> Result<usize> {
    info.device_ordinal(gpus()?)
}

/// Returns the number of GPUs that this process sees.
#[cfg(feature = "nccl")]
fn gpus() -> Result<usize> {
    let gpus = cudarc::driver::CudaContext::device_count().map_err(crate::backend::cuda::driver)?;
    Ok(usize::try_from(gpus).unwrap_or(0))
}
