//! Memory of GPUs that work beside candle's reads and writes: NCCL's calls, and copies on other streams.
use crate::{Error, Result};
use candle_core::backend::BackendDevice;
use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::cuda_backend::cudarc::driver::{
    CudaSlice, DevicePtr, DevicePtrMut, DriverError, result, sys,
};
#[cfg(feature = "nccl")]
use candle_core::{CpuStorage, InplaceOp1, Layout, Tensor};
use candle_core::{CudaDevice, CudaStorage, DType, Device, Shape};
use std::ffi::c_int;

/// Converts an error of the CUDA driver.
pub(crate) fn driver(error: DriverError) -> Error {
    candle_core::Error::wrap(error).into()
}

/// Returns the memory pool from which candle allocates on a GPU, if it has pools.
pub(crate) fn pool(gpu: c_int) -> Result<Option<sys::CUmemoryPool>> {
    let attribute = sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
    // SAFETY: the caller's GPU exists, since a context of it is alive.
    if unsafe { result::device::get_attribute(gpu, attribute) }.map_err(driver)? <= 0 {
        return Ok(None); // candle then allocates without a pool
    }
    // SAFETY: as above.
    unsafe { result::device::get_default_mem_pool(gpu) }.map(Some).map_err(driver)
}

/// Lets the memory pools of GPUs keep what is freed. By default they give all of it back to the system whenever the host waits for
/// a stream, and the next step maps it again.
pub(crate) fn keep_freed_memory(devices: &[Device]) -> Result<()> {
    for device in devices.iter().filter(|device| device.is_cuda()) {
        let Some(pool) = pool(device.as_cuda_device()?.cuda_stream().context().cu_device())? else {
            continue;
        };
        let (threshold, mut all) = (sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, u64::MAX);
        // SAFETY: the pool of a device always exists, and this attribute is a number of 64 bits, which the driver reads here.
        unsafe { result::mem_pool::set_attribute(pool, threshold, (&raw mut all).cast()) }.map_err(driver)?;
    }
    Ok(())
}

/// Allocates memory for `len` elements that the caller's work on the GPU will write.
pub(crate) fn memory(device: &CudaDevice, len: usize, dtype: DType) -> Result<CudaStorage> {
    // SAFETY: the caller's work fills this memory before anything reads it, because both are enqueued in that order.
    Ok(unsafe { device.alloc_uninit(&Shape::from(len), dtype)? })
}

/// Returns the address of the `start`-th element.
pub(crate) fn address(storage: &CudaStorage, start: usize) -> u64 {
    fn first<T>(slice: &CudaSlice<T>) -> u64 {
        // Nothing is read or written through this guard; the caller makes streams wait for each other.
        slice.device_ptr(slice.stream()).0
    }
    let base = match &storage.slice {
        CudaStorageSlice::U8(slice) => first(slice),
        CudaStorageSlice::U32(slice) => first(slice),
        CudaStorageSlice::I16(slice) => first(slice),
        CudaStorageSlice::I32(slice) => first(slice),
        CudaStorageSlice::I64(slice) => first(slice),
        CudaStorageSlice::BF16(slice) => first(slice),
        CudaStorageSlice::F16(slice) => first(slice),
        CudaStorageSlice::F32(slice) => first(slice),
        CudaStorageSlice::F64(slice) => first(slice),
        CudaStorageSlice::F8E4M3(slice) => first(slice),
        _ => 0,
    };
    base + (start * candle_core::backend::BackendStorage::dtype(storage).size_in_bytes()) as u64
}

/// Records on the stream of `storage` that the caller's work has written it there, so that other streams wait for it.
pub(crate) fn written(storage: &mut CudaStorage) {
    fn record<T>(slice: &mut CudaSlice<T>) {
        let stream = slice.stream().clone();
        // Dropping the guard records the event.
        drop(slice.device_ptr_mut(&stream).1);
    }
    match &mut storage.slice {
        CudaStorageSlice::U8(slice) => record(slice),
        CudaStorageSlice::U32(slice) => record(slice),
        CudaStorageSlice::I16(slice) => record(slice),
        CudaStorageSlice::I32(slice) => record(slice),
        CudaStorageSlice::I64(slice) => record(slice),
        CudaStorageSlice::BF16(slice) => record(slice),
        CudaStorageSlice::F16(slice) => record(slice),
        CudaStorageSlice::F32(slice) => record(slice),
        CudaStorageSlice::F64(slice) => record(slice),
        CudaStorageSlice::F8E4M3(slice) => record(slice),
        _ => {}
    }
}

/// Records on the stream of a tensor that the caller's work has written it there, so that other streams wait for it.
#[cfg(feature = "nccl")]
pub(crate) fn note_written(tensor: &Tensor) -> Result<()> {
    Ok(tensor.inplace_op1(&WriteNote)?)
}

/// Notes a write that has been enqueued by other means.
#[cfg(feature = "nccl")]
struct WriteNote;

#[cfg(feature = "nccl")]
impl InplaceOp1 for WriteNote {
    fn name(&self) -> &'static str {
        "written"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        Ok(())
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> candle_core::Result<()> {
        written(storage);
        Ok(())
    }
}
