//! The storage of a tensor: its type per kind of device, and its address.
use crate::{Error, Result};
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CpuStorage, CudaStorage, Storage, Tensor};

/// The storage of one kind of device.
pub(super) trait DeviceStorage: BackendStorage<Device: BackendDevice<Storage = Self>> {
    /// Returns the storage, if it is of this kind.
    fn of(storage: &Storage) -> Result<&Self>;
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
