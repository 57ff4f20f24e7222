//! Results that exist before their graph nodes.
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CpuStorage, CudaStorage, Layout, MetalStorage, Result, Shape, Storage, Tensor};
use parking_lot::Mutex;

/// New data that a backend or a kernel returns: owned, contiguous and unaliased.
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
    ///
    /// # Errors
    /// If the device has no memory for it.
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
    fn into_cpu(self) -> Result<(CpuStorage, Shape)> {
        match self.storage {
            Storage::Cpu(storage) => Ok((storage, self.shape)),
            other => candle_core::bail!("an op on host tensors made one on {:?}", other.device().location()),
        }
    }

    /// Returns the data in the form that an op on CUDA tensors returns.
    fn into_cuda(self) -> Result<(CudaStorage, Shape)> {
        match self.storage {
            Storage::Cuda(storage) => Ok((storage, self.shape)),
            other => candle_core::bail!("an op on CUDA tensors made one on {:?}", other.device().location()),
        }
    }

    /// Returns the data in the form that an op on Metal tensors returns.
    fn into_metal(self) -> Result<(MetalStorage, Shape)> {
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

/// Copies the elements of `source` that `layout` describes to contiguous memory.
///
/// # Errors
/// If the device has no memory for it.
pub fn dense<S>(source: &S, layout: &Layout) -> Result<S>
where
    S: BackendStorage<Device: BackendDevice<Storage = S>>,
{
    let mut made = source.device().zeros_impl(layout.shape(), source.dtype())?;
    source.copy_strided_src(&mut made, 0, layout)?;
    Ok(made)
}

/// The forward result of a custom op, made before candle locks the input and handed over once, without a copy.
pub struct Ready(Mutex<Option<Fresh>>);

impl Ready {
    /// Stores the data until it is taken.
    pub const fn new(fresh: Fresh) -> Self {
        Self(Mutex::new(Some(fresh)))
    }

    /// Returns the data, for an op's `cpu_fwd`.
    pub fn cpu(&self) -> Result<(CpuStorage, Shape)> {
        self.take()?.into_cpu()
    }

    /// Returns the data, for an op's `cuda_fwd`.
    pub fn cuda(&self) -> Result<(CudaStorage, Shape)> {
        self.take()?.into_cuda()
    }

    /// Returns the data, for an op's `metal_fwd`.
    pub fn metal(&self) -> Result<(MetalStorage, Shape)> {
        self.take()?.into_metal()
    }

    fn take(&self) -> Result<Fresh> {
        self.0.lock().take().ok_or_else(|| candle_core::Error::msg("the result of an op was taken twice"))
    }
}
