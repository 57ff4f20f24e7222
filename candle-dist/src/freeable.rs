//! Tensors whose memory can be freed and allocated again while graphs refer to them.
use crate::{Error, Result};
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CpuStorage, CudaStorage, DType, Device, InplaceOp1, Layout, Shape, Storage, Tensor};
use parking_lot::Mutex;
use std::fmt;
use std::sync::Arc;

/// A tensor whose memory can be freed and allocated again for all that refer to it: views, clones, layers and graphs.
///
/// It is made for parameters that are gathered before use and freed afterwards. Using the tensor while it is freed, or a
/// view of it, is an error: of this handle, and of all of candle's operations, which report the dtype `F4`. Tensors
/// computed from it have their own memory.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_dist::FreeableTensor;
///
/// let weight = FreeableTensor::new(Tensor::ones((2, 3), DType::F32, &Device::Cpu)?)?;
/// let in_a_layer = weight.tensor()?;
/// assert!(weight.free()?);
/// assert!(in_a_layer.to_vec2::<f32>().is_err());
/// let error = weight.tensor().unwrap_err().to_string();
/// assert_eq!(error, "FreeableTensor: the memory of f32[2, 3] is free; alloc or fill it before use");
///
/// assert!(weight.alloc()?); // zeros, until it is filled
/// weight.fill(Tensor::full(2f32, (2, 3), &Device::Cpu)?)?;
/// assert_eq!(in_a_layer.sum_all()?.to_scalar::<f32>()?, 12.0);
/// # Ok::<(), candle_dist::Error>(())
/// ```
#[derive(Clone)]
pub struct FreeableTensor(Arc<FreeableInner>);

struct FreeableInner {
    tensor: Tensor,
    is_allocated: Mutex<bool>,
}

impl FreeableTensor {
    /// Creates a handle for a tensor that owns its memory.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the tensor has no memory, or is not all of its memory: others may use the rest. On a GPU, a
    /// contiguous view of the start of the memory is not detected.
    pub fn new(tensor: Tensor) -> Result<Self> {
        check_owner(&tensor)?;
        Ok(Self(Arc::new(FreeableInner { tensor, is_allocated: Mutex::new(true) })))
    }

    /// Creates a handle without memory.
    ///
    /// # Errors
    /// If candle fails.
    pub fn freed(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Self> {
        Self::without_memory(Tensor::zeros(shape, dtype, device)?)
    }

    /// Creates a handle for a tensor without memory, such as the result of an op whose storage is
    /// [`no_memory`](crate::backend::no_memory). If the tensor has memory, this frees it.
    ///
    /// # Errors
    /// If candle fails.
    pub fn without_memory(tensor: Tensor) -> Result<Self> {
        let handle = Self(Arc::new(FreeableInner { tensor, is_allocated: Mutex::new(true) }));
        handle.free()?;
        Ok(handle)
    }

    /// Returns the shape, allocated or not.
    pub fn shape(&self) -> &Shape {
        self.0.tensor.shape()
    }

    /// Returns the dtype, allocated or not.
    pub fn dtype(&self) -> DType {
        self.0.tensor.dtype()
    }

    /// Returns the device, allocated or not.
    pub fn device(&self) -> &Device {
        self.0.tensor.device()
    }

    /// Returns whether the tensor has memory.
    pub fn is_allocated(&self) -> bool {
        *self.0.is_allocated.lock()
    }

    /// Returns the tensor, without a copy, or an [`Error::Invalid`] while it is freed.
    pub fn tensor(&self) -> Result<Tensor> {
        match self.is_allocated() {
            true => Ok(self.0.tensor.clone()),
            false => Err(invalid(format!("the memory of {self} is free; alloc or fill it before use"))),
        }
    }

    /// Returns whether a tensor has memory: `false` for one that is freed or has been given away, and for its views.
    pub fn has_memory(tensor: &Tensor) -> bool {
        tensor.storage_and_layout().0.dtype() == tensor.dtype()
    }

    /// Returns the tensor, with or without memory, to build graphs from.
    pub fn graph_node(&self) -> &Tensor {
        &self.0.tensor
    }

    /// Allocates zeros if the memory is freed. Returns whether it was.
    ///
    /// # Errors
    /// If candle fails.
    pub fn alloc(&self) -> Result<bool> {
        // Held until the end, so that zeros do not replace what another thread fills in.
        let mut is_allocated = self.0.is_allocated.lock();
        if *is_allocated {
            return Ok(false);
        }
        self.take(&Tensor::zeros(self.shape(), self.dtype(), self.device())?)?;
        *is_allocated = true;
        Ok(true)
    }

    /// Replaces the memory of this tensor, freed or not, by that of `tensor`. This consumes `tensor` and all tensors
    /// that share its memory: reading them is an error afterwards.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless it has the handle's shape, dtype and device, and owns its memory.
    pub fn fill(&self, tensor: Tensor) -> Result<()> {
        let fits = tensor.shape() == self.shape()
            && tensor.dtype() == self.dtype()
            && tensor.device().same_device(self.device());
        if !fits {
            let (dtype, dims, device) = (tensor.dtype().as_str(), tensor.dims(), tensor.device().location());
            let own = self.device().location();
            return Err(invalid(format!("{dtype}{dims:?} on {device:?} does not fit {self} on {own:?}")));
        }
        let mut is_allocated = self.0.is_allocated.lock();
        check_owner(&tensor)?;
        self.take(&tensor)?;
        *is_allocated = true;
        Ok(())
    }

    fn take(&self, tensor: &Tensor) -> Result<()> {
        if is_swapped(tensor) {
            let hand = StorageSwap::new();
            tensor.inplace_op1(&hand)?;
            self.0.tensor.inplace_op1(&hand)?;
        }
        Ok(())
    }

    /// Frees the memory. Returns whether there was any.
    ///
    /// # Errors
    /// If candle fails.
    pub fn free(&self) -> Result<bool> {
        let mut is_allocated = self.0.is_allocated.lock();
        if *is_allocated && is_swapped(&self.0.tensor) {
            self.0.tensor.inplace_op1(&StorageSwap::new())?;
        }
        Ok(std::mem::replace(&mut *is_allocated, false))
    }
}

/// Refuses a tensor without memory, and a view of a part of its memory. Only host memory tells its size.
fn check_owner(tensor: &Tensor) -> Result<()> {
    let (dtype, dims) = (tensor.dtype().as_str(), tensor.dims());
    let (storage, layout) = tensor.storage_and_layout();
    if storage.dtype() != tensor.dtype() {
        let reason = "has no memory: it is free, or has been given away";
        return Err(invalid(format!("{dtype}{dims:?} {reason}; give a tensor that can be read")));
    }
    let is_whole = match &*storage {
        Storage::Cpu(memory) => [0, elements(memory)].contains(&layout.shape().elem_count()),
        _ => true,
    };
    if layout.is_contiguous() && layout.start_offset() == 0 && is_whole {
        return Ok(());
    }
    Err(invalid(format!(
        "{dtype}{dims:?} is a view of memory that others may use; copy it first with force_contiguous"
    )))
}

/// Returns the number of elements in host memory.
const fn elements(memory: &CpuStorage) -> usize {
    match memory {
        CpuStorage::U8(x) => x.len(),
        CpuStorage::U32(x) => x.len(),
        CpuStorage::I16(x) => x.len(),
        CpuStorage::I32(x) => x.len(),
        CpuStorage::I64(x) => x.len(),
        CpuStorage::BF16(x) => x.len(),
        CpuStorage::F16(x) => x.len(),
        CpuStorage::F32(x) => x.len(),
        CpuStorage::F64(x) => x.len(),
        CpuStorage::F8E4M3(x) => x.len(),
        CpuStorage::F6E2M3(x) | CpuStorage::F6E3M2(x) | CpuStorage::F4(x) | CpuStorage::F8E8M0(x) => x.len(),
    }
}

/// Returns the storage of a tensor without memory: one element.
///
/// # Errors
/// If the device fails.
pub fn no_memory<S>(device: &S::Device, dtype: DType) -> candle_core::Result<S>
where
    S: BackendStorage<Device: BackendDevice<Storage = S>>,
{
    device.zeros_impl(&Shape::from(1), dtype)
}

/// Returns whether memory of this tensor comes and goes. A GPU has no memory without elements, and candle writes to none
/// whose stride is 0, as that of a dim before an empty one.
fn is_swapped(tensor: &Tensor) -> bool {
    let is_spread = tensor.stride().iter().zip(tensor.dims()).all(|(&stride, &size)| stride > 0 || size < 2);
    tensor.elem_count() > 0 || (tensor.device().is_cpu() && is_spread)
}

/// The storage of a freed tensor: one byte of a dtype that candle refuses in each operation, whatever its operands.
fn freed_on_host() -> CpuStorage {
    CpuStorage::F4(vec![0])
}

#[cfg(feature = "cuda")]
fn freed_on_cuda(storage: &CudaStorage) -> candle_core::Result<CudaStorage> {
    let device = storage.device().clone();
    let slice = candle_core::cuda_backend::CudaStorageSlice::F4(device.alloc_zeros::<u8>(1)?);
    Ok(CudaStorage { slice, device })
}

#[cfg(not(feature = "cuda"))]
fn freed_on_cuda(_: &CudaStorage) -> candle_core::Result<CudaStorage> {
    Err(candle_core::Error::NotCompiledWithCudaSupport)
}

/// Swaps the storage in `hand` with that of a tensor. An empty hand gives the tensor a minimal storage.
struct StorageSwap {
    hand: Mutex<Option<Storage>>,
}

impl StorageSwap {
    fn new() -> Self {
        Self { hand: Mutex::default() }
    }

    fn with(
        &self,
        f: impl FnOnce(Option<Storage>) -> candle_core::Result<Storage>,
    ) -> candle_core::Result<()> {
        let mut hand = self.hand.lock();
        *hand = Some(f(hand.take())?);
        Ok(())
    }
}

impl InplaceOp1 for StorageSwap {
    fn name(&self) -> &'static str {
        "exchange-memory"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        self.with(|hand| {
            let new = match hand {
                Some(Storage::Cpu(new)) => new,
                Some(other) => {
                    candle_core::bail!("memory on {:?} for a tensor of the host", other.device().location())
                }
                None => freed_on_host(),
            };
            Ok(Storage::Cpu(std::mem::replace(storage, new)))
        })
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> candle_core::Result<()> {
        self.with(|hand| {
            let new = match hand {
                Some(Storage::Cuda(new)) => new,
                Some(other) => {
                    candle_core::bail!("memory on {:?} for a tensor of CUDA", other.device().location())
                }
                None => freed_on_cuda(storage)?,
            };
            Ok(Storage::Cuda(std::mem::replace(storage, new)))
        })
    }
}

impl fmt::Display for FreeableTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?}", self.dtype().as_str(), self.shape().dims())
    }
}

impl fmt::Debug for FreeableTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FreeableTensor({self}, {})", if self.is_allocated() { "allocated" } else { "free" })
    }
}

fn invalid(reason: String) -> Error {
    Error::Invalid { op: "FreeableTensor", reason }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Var;

    fn zeros(shape: impl Into<Shape>, dtype: DType) -> Tensor {
        Tensor::zeros(shape, dtype, &Device::Cpu).unwrap()
    }

    #[test]
    fn alloc_and_free_tell_whether_they_did_something() {
        for shape in [(2, 2), (0, 2), (2, 0)] {
            let handle = FreeableTensor::freed(shape, DType::I64, &Device::Cpu).unwrap();
            assert!(!handle.is_allocated() && !handle.free().unwrap());
            assert!(handle.alloc().unwrap());
            let first = handle.tensor().unwrap();
            assert_eq!((first.dims2().unwrap(), first.dtype()), (shape, DType::I64));
            assert!(!handle.alloc().unwrap());
            assert_eq!(handle.tensor().unwrap().id(), first.id(), "allocated memory stays");
            assert!(handle.free().unwrap() && !handle.free().unwrap());
            assert!(matches!(handle.tensor(), Err(Error::Invalid { .. })));
        }
    }

    #[test]
    fn every_operation_on_freed_memory_is_an_error() {
        type Operation = fn(&Tensor, &Tensor) -> candle_core::Result<Tensor>;
        let operations: [(&str, Operation); 22] = [
            ("neg", |x, _| x.neg()),
            ("sqr", |x, _| x.sqr()),
            ("affine", |x, _| x.affine(2.0, 1.0)),
            ("powf", |x, _| x.powf(2.0)),
            ("elu", |x, _| x.elu(1.0)),
            ("to_dtype", |x, _| x.to_dtype(DType::F64)),
            ("to_u8", |x, _| x.to_dtype(DType::U8)),
            ("sum", |x, _| x.sum_all()),
            ("max", |x, _| x.max(0)),
            ("argmax", |x, _| x.argmax(0)),
            ("add", |x, y| x + y),
            ("added", |x, y| y + x),
            ("mul itself", |x, _| x * x),
            ("eq", |x, y| x.eq(y)),
            ("cat", |x, y| Tensor::cat(&[x, y], 0)),
            ("cat itself", |x, _| Tensor::cat(&[x, x], 0)),
            ("contiguous", |x, _| x.force_contiguous()),
            ("matmul", |x, y| x.matmul(&y.t()?)),
            ("index_select", |x, _| x.index_select(&Tensor::zeros(1, DType::U32, &Device::Cpu)?, 0)),
            ("where_cond", |x, y| y.ge(y)?.where_cond(x, y)),
            ("softmax", |x, _| candle_nn::ops::softmax_last_dim(x)),
            ("read", |x, _| x.flatten_all()?.to_vec1::<f32>().map(|_| x.clone())),
        ];
        for shape in [(1, 1), (2, 3), (40, 50)] {
            let other = zeros(shape, DType::F32);
            let handle = FreeableTensor::new(zeros(shape, DType::F32)).unwrap();
            let whole = handle.tensor().unwrap();
            let one = whole.narrow(0, 0, 1).unwrap().narrow(1, 0, 1).unwrap();
            assert!(FreeableTensor::has_memory(&one));
            handle.free().unwrap();
            assert!(!FreeableTensor::has_memory(&whole) && !FreeableTensor::has_memory(&one));
            for (name, operation) in operations {
                for (x, y) in [(&whole, &other), (&one, &zeros((1, 1), DType::F32))] {
                    let error = operation(x, y)
                        .err()
                        .unwrap_or_else(|| panic!("{name} of {:?}", x.dims()))
                        .to_string();
                    assert!(error.contains("F4"), "{name}: {error}");
                }
            }
        }
    }

    #[test]
    fn only_memory_that_fits_and_is_nobody_elses_is_taken() {
        let handle = FreeableTensor::freed((2, 3), DType::F32, &Device::Cpu).unwrap();
        for wrong in [zeros((3, 2), DType::F32), zeros((2, 3), DType::F64)] {
            let error = handle.fill(wrong).unwrap_err().to_string();
            assert!(error.contains("does not fit f32[2, 3]"), "{error}");
            assert!(!handle.is_allocated());
        }
        let whole = zeros((4, 3), DType::F32);
        for view in [whole.narrow(0, 2, 2).unwrap(), zeros((3, 2), DType::F32).t().unwrap()] {
            for error in [handle.fill(view.clone()).unwrap_err(), FreeableTensor::new(view).unwrap_err()] {
                assert!(error.to_string().contains("is a view of memory that others may use"), "{error}");
            }
        }
        whole.sum_all().unwrap();
        let given = zeros((2, 3), DType::F32);
        handle.fill(given.clone()).unwrap();
        assert!(given.to_vec2::<f32>().is_err(), "it is used up");
        assert_eq!(format!("{handle:?}"), "FreeableTensor(f32[2, 3], allocated)");
    }

    #[test]
    fn memory_that_was_given_away_or_is_free_is_not_taken_again() {
        let handles = [(); 2].map(|()| FreeableTensor::freed((2, 3), DType::F32, &Device::Cpu).unwrap());
        let given = zeros((2, 3), DType::F32);
        handles[0].fill(given.clone()).unwrap();
        let free = FreeableTensor::freed((2, 3), DType::F32, &Device::Cpu).unwrap().graph_node().clone();
        for without in [given, free] {
            for error in
                [handles[1].fill(without.clone()).unwrap_err(), FreeableTensor::new(without).unwrap_err()]
            {
                assert!(error.to_string().contains("f32[2, 3] has no memory"), "{error}");
            }
            assert!(!handles[1].is_allocated());
        }
        // A tensor of one element, or of a handle's own.
        let one = FreeableTensor::freed(1, DType::U8, &Device::Cpu).unwrap();
        assert!(one.alloc().unwrap() && one.tensor().unwrap().to_vec1::<u8>().unwrap() == [0]);
        assert!(
            FreeableTensor::new(
                FreeableTensor::freed(1, DType::U8, &Device::Cpu).unwrap().graph_node().clone()
            )
            .is_err()
        );
        handles[0].fill(handles[0].tensor().unwrap()).unwrap();
        assert_eq!(handles[0].tensor().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap(), 0.0);
    }

    #[test]
    fn a_view_of_the_beginning_of_larger_memory_is_refused() {
        let whole = zeros((4, 3), DType::F32);
        let handle = FreeableTensor::freed((2, 3), DType::F32, &Device::Cpu).unwrap();
        let first = whole.narrow(0, 0, 2).unwrap();
        for error in [handle.fill(first.clone()).unwrap_err(), FreeableTensor::new(first).unwrap_err()] {
            assert!(error.to_string().contains("is a view of memory that others may use"), "{error}");
        }
        assert_eq!(whole.sum_all().unwrap().to_scalar::<f32>().unwrap(), 0.0);
    }

    #[test]
    fn memory_comes_and_goes_for_clones_views_and_graphs() {
        let x = Var::new(&[[1f32, 2.], [3., 4.]], &Device::Cpu).unwrap();
        let handle = FreeableTensor::new((x.as_tensor() * 1.0).unwrap()).unwrap();
        let (clone, taken) = (handle.clone(), handle.tensor().unwrap());
        let row = taken.narrow(0, 1, 1).unwrap();
        let loss = taken.sqr().unwrap().sum_all().unwrap();
        assert!(clone.free().unwrap() && !handle.is_allocated());
        assert!(taken.to_vec2::<f32>().is_err() && row.to_vec2::<f32>().is_err(), "nobody reads stale data");
        assert!(loss.backward().is_err());
        handle.fill(Tensor::new(&[[5f32, 6.], [7., 8.]], &Device::Cpu).unwrap()).unwrap();
        assert_eq!(row.to_vec2::<f32>().unwrap(), [[7., 8.]]);
        let grads = loss.backward().unwrap();
        assert_eq!(grads.get(&x).unwrap().to_vec2::<f32>().unwrap(), [[10., 12.], [14., 16.]]);
    }
}
