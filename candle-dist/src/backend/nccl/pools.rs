//! Access between the memory pools of several GPUs of one process.
//!
//! candle allocates from the default pool of a GPU, which only that GPU may access. NCCL moves data between GPUs of one
//! process directly from buffer to buffer if they are linked, so every pool must be open to all linked GPUs.
use crate::backend::cuda::{driver, keep_freed_memory, pool};
use crate::{Error, Result};
use candle_core::Device;
use cudarc::driver::sys;
use std::collections::BTreeSet;
use std::ffi::c_int;

/// The start of `CUmemAccessDesc`. cudarc's binding of it has other fields for other versions of CUDA.
#[repr(C)]
struct Access {
    location_type: c_int,
    location_id: c_int,
    flags: c_int,
}

const _: () = assert!(size_of::<Access>() == size_of::<sys::CUmemAccessDesc>());

/// `CU_MEM_LOCATION_TYPE_DEVICE` and `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const DEVICE: c_int = 1;
const READ_AND_WRITE: c_int = 3;

/// Opens the memory pool of each GPU to all others that are linked with it, and lets it keep what is freed. This holds until the
/// process ends.
pub(crate) fn open(devices: &[Device]) -> Result<()> {
    keep_freed_memory(devices)?;
    let gpu = |device: &Device| Ok::<_, Error>(device.as_cuda_device()?.cuda_stream().context().cu_device());
    let gpus = devices.iter().map(gpu).collect::<Result<BTreeSet<_>>>()?;
    for &owner in &gpus {
        let Some(pool) = pool(owner)? else { continue };
        let linked =
            gpus.iter().filter(|&&other| other != owner).map(|&other| Ok((other, is_linked(other, owner)?)));
        let linked = linked.collect::<Result<Vec<_>>>()?;
        let access = |&(other, is_linked): &(c_int, bool)| {
            is_linked.then_some(Access { location_type: DEVICE, location_id: other, flags: READ_AND_WRITE })
        };
        let access: Vec<Access> = linked.iter().filter_map(access).collect();
        if access.is_empty() {
            continue;
        }
        // SAFETY: the pool of a device always exists, and the array has as many elements as its length says, in the
        // layout of `CUmemAccessDesc`.
        unsafe { sys::cuMemPoolSetAccess(pool, access.as_ptr().cast(), access.len()) }
            .result()
            .map_err(driver)?;
    }
    Ok(())
}

/// Returns whether the GPU `from` can access memory of the GPU `to`.
fn is_linked(from: c_int, to: c_int) -> Result<bool> {
    let mut can = 0;
    // SAFETY: the driver writes an integer to valid memory.
    unsafe { sys::cuDeviceCanAccessPeer(&mut can, from, to) }.result().map_err(driver)?;
    Ok(can != 0)
}
