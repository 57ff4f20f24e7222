//! Memory of GPUs that work beside candle's reads and writes: NCCL's calls, and copies on other streams.
use crate::{Error, Result};
use candle_core::backend::BackendDevice;
use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut, DriverError};
use candle_core::{CudaDevice, CudaStorage, DType, Shape};

/// Converts an error of the CUDA driver.
pub(crate) fn driver(error: DriverError) -> Error {
    candle_core::Error::wrap(error).into()
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
        CudaStorageSlice::I64(slice) => first(slice),
        CudaStorageSlice::BF16(slice) => first(slice),
        CudaStorageSlice::F16(slice) => first(slice),
        CudaStorageSlice::F32(slice) => first(slice),
        CudaStorageSlice::F64(slice) => first(slice),
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
        CudaStorageSlice::I64(slice) => record(slice),
        CudaStorageSlice::BF16(slice) => record(slice),
        CudaStorageSlice::F16(slice) => record(slice),
        CudaStorageSlice::F32(slice) => record(slice),
        CudaStorageSlice::F64(slice) => record(slice),
        _ => {}
    }
}
