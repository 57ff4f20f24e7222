//! The tensors that enter a collective, and the memory of its results.
use super::storage::dense;
use crate::Result;
use candle_core::{CpuStorage, CudaStorage, MetalStorage, Shape, Storage, Tensor};
use smallvec::SmallVec;

/// New data that a backend returns: owned, contiguous and unaliased.
#[derive(Debug)]
pub struct Fresh {
    /// The elements, on the CPU or a device.
    pub storage: Storage,
    /// The shape.
    pub shape: Shape,
}

impl Fresh {
    /// Creates data on the CPU.
    pub fn host(storage: CpuStorage, shape: impl Into<Shape>) -> Self {
        Self { storage: Storage::Cpu(storage), shape: shape.into() }
    }

    /// Copies any view of a tensor to contiguous memory on its device.
    pub fn copy_of(tensor: &Tensor) -> Result<Self> {
        let (storage, layout) = tensor.storage_and_layout();
        let storage = match &*storage {
            Storage::Cpu(source) => Storage::Cpu(dense(source, layout)?),
            Storage::Cuda(source) => Storage::Cuda(dense(source, layout)?),
            Storage::Metal(source) => Storage::Metal(dense(source, layout)?),
        };
        Ok(Self { storage, shape: layout.shape().clone() })
    }

    /// Returns the data in the form that an op on CPU tensors returns.
    pub(crate) fn into_cpu(self) -> candle_core::Result<(CpuStorage, Shape)> {
        match self.storage {
            Storage::Cpu(storage) => Ok((storage, self.shape)),
            other => candle_core::bail!("an op on host tensors made one on {:?}", other.device().location()),
        }
    }

    /// Returns the data in the form that an op on CUDA tensors returns.
    pub(crate) fn into_cuda(self) -> candle_core::Result<(CudaStorage, Shape)> {
        match self.storage {
            Storage::Cuda(storage) => Ok((storage, self.shape)),
            other => candle_core::bail!("an op on CUDA tensors made one on {:?}", other.device().location()),
        }
    }

    /// Returns the data in the form that an op on Metal tensors returns.
    pub(crate) fn into_metal(self) -> candle_core::Result<(MetalStorage, Shape)> {
        match self.storage {
            Storage::Metal(storage) => Ok((storage, self.shape)),
            other => candle_core::bail!("an op on Metal tensors made one on {:?}", other.device().location()),
        }
    }

    /// Returns the data as an untracked tensor, without a copy.
    pub fn into_tensor(self) -> Tensor {
        Tensor::from_storage(self.storage, self.shape, candle_core::op::BackpropOp::none(), false)
    }
}

/// The tensors of one rank in a collective: one, unless the call is coalesced.
pub type Tensors = SmallVec<[Tensor; 1]>;

/// The results of one rank in a collective.
pub type Results = SmallVec<[Fresh; 1]>;

/// Returns the size of a tensor's elements in bytes.
pub(crate) fn bytes(tensor: &Tensor) -> usize {
    tensor.elem_count() * tensor.dtype().size_in_bytes()
}
