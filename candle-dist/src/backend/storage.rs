//! The storage of a tensor: its type per kind of device, and its address.
use super::strips::copy_rows;
use crate::{Error, Result};
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CpuStorage, CudaStorage, Layout, Shape, Storage, Tensor};
use candle_dist_base::StripBuffer;

/// The storage of one kind of device.
pub(super) trait DeviceStorage: BackendStorage<Device: BackendDevice<Storage = Self>> {
    /// Returns the storage, if it is of this kind.
    fn of(storage: &Storage) -> Result<&Self>;

    /// Fills new memory on a device, whose stream orders it.
    fn copy_strips(device: &Self::Device, buffers: &[StripBuffer<'_, Self>]) -> Result<Vec<Self>> {
        buffers.iter().map(|buffer| copied(device, buffer)).collect()
    }
}

/// Fills new memory by a copy for each strip.
fn copied<S: DeviceStorage>(device: &S::Device, buffer: &StripBuffer<'_, S>) -> Result<S> {
    // SAFETY: the strips write each element, and nothing reads it before.
    let mut made = unsafe { device.alloc_uninit(&Shape::from(buffer.total), buffer.dtype)? };
    for strip in buffer.strips.iter().filter(|strip| strip.rows * strip.len > 0) {
        let (rows, len) = (strip.rows, strip.len);
        if strip.source.dtype() == buffer.dtype {
            copy_rows(strip.source, &mut made, (rows, len), strip.from, strip.to)?;
            continue;
        }
        let (start, step) = strip.from;
        let layout = Layout::new(Shape::from((rows, len)), vec![step, 1], start);
        let widened = strip.source.to_dtype(&layout, buffer.dtype)?;
        copy_rows(&widened, &mut made, (rows, len), (0, len), strip.to)?;
    }
    Ok(made)
}

impl DeviceStorage for CpuStorage {
    fn of(storage: &Storage) -> Result<&Self> {
        match storage {
            Storage::Cpu(storage) => Ok(storage),
            _ => Err(mixed()),
        }
    }
}

impl DeviceStorage for CudaStorage {
    fn of(storage: &Storage) -> Result<&Self> {
        match storage {
            Storage::Cuda(storage) => Ok(storage),
            _ => Err(mixed()),
        }
    }

    #[cfg(feature = "cuda")]
    fn copy_strips(device: &Self::Device, buffers: &[StripBuffer<'_, Self>]) -> Result<Vec<Self>> {
        use candle_dist_kernels::parts::{StripStorage, is_fused};
        if !is_fused(&candle_core::Device::Cuda(device.clone())) {
            return buffers.iter().map(|buffer| copied(device, buffer)).collect();
        }
        Ok(<Self as StripStorage>::copy_strips(device, buffers)?)
    }
}

pub(super) fn mixed() -> Error {
    Error::Unsupported("a collective of tensors on different kinds of devices; move them to one".to_string())
}

/// Returns whether two tensors share memory.
pub(crate) fn share_memory(a: &Tensor, b: &Tensor) -> bool {
    address(a) == address(b)
}

/// Returns the address of a tensor's storage, equal for views of one storage. Holds no lock afterwards.
pub(super) fn address(tensor: &Tensor) -> usize {
    std::ptr::from_ref(&*tensor.storage_and_layout().0).addr()
}

/// A tensor that a collective reads, with the [address] of its storage.
///
/// To find an address takes a lock, which is slow if other threads take it too. So its owner finds it once.
#[derive(Clone, Copy)]
pub(super) struct StorageOperand<'a> {
    pub(super) tensor: &'a Tensor,
    pub(super) address: usize,
}

impl<'a> StorageOperand<'a> {
    pub(super) fn of(tensor: &'a Tensor) -> Self {
        Self { tensor, address: address(tensor) }
    }
}

impl std::ops::Deref for StorageOperand<'_> {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        self.tensor
    }
}
