//! Tensors whose memory can be given back and had again, while graphs refer to them.
use crate::{Error, Result};
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CpuStorage, CudaStorage, DType, Device, InplaceOp1, Layout, Shape, Storage, Tensor};
use parking_lot::Mutex;
use std::fmt;
use std::sync::Arc;

/// A tensor whose memory can be freed and had again, for all that refer to it: views, clones, layers and graphs.
///
/// For parameters that are gathered before use and dropped after it. Using the tensor while it is free never gives stale
/// data: this handle returns an error, and so do candle's operations, except for those of one operand, which panic. What was
/// computed from it keeps memory of its own.
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
pub struct FreeableTensor(Arc<Inner>);

struct Inner {
    tensor: Tensor,
    is_allocated: Mutex<bool>,
}

impl FreeableTensor {
    /// A handle on a tensor with memory of its own.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a tensor that does not lie at the beginning of its memory without gaps: others may need the rest.
    pub fn new(tensor: Tensor) -> Result<Self> {
        check_owner(&tensor)?;
        Ok(Self(Arc::new(Inner { tensor, is_allocated: Mutex::new(true) })))
    }

    /// A handle without memory.
    ///
    /// # Errors
    /// Those of candle.
    pub fn freed(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Self> {
        Self::without_memory(Tensor::zeros(shape, dtype, device)?)
    }

    /// A handle on a tensor that has no memory yet, or loses it: the result of an op whose storage is
    /// [`no_memory`](crate::backend::no_memory).
    ///
    /// # Errors
    /// Those of candle.
    pub fn without_memory(tensor: Tensor) -> Result<Self> {
        let handle = Self(Arc::new(Inner { tensor, is_allocated: Mutex::new(true) }));
        handle.free()?;
        Ok(handle)
    }

    /// The shape, allocated or not.
    pub fn shape(&self) -> &Shape {
        self.0.tensor.shape()
    }

    /// The dtype, allocated or not.
    pub fn dtype(&self) -> DType {
        self.0.tensor.dtype()
    }

    /// The device, allocated or not.
    pub fn device(&self) -> &Device {
        self.0.tensor.device()
    }

    /// Whether there is memory.
    pub fn is_allocated(&self) -> bool {
        *self.0.is_allocated.lock()
    }

    /// The tensor, without a copy; an [`Error::Invalid`] while it is free.
    pub fn tensor(&self) -> Result<Tensor> {
        match self.is_allocated() {
            true => Ok(self.0.tensor.clone()),
            false => Err(invalid(format!("the memory of {self} is free; alloc or fill it before use"))),
        }
    }

    /// The tensor, with memory or without: what graphs are made of.
    pub fn graph_node(&self) -> &Tensor {
        &self.0.tensor
    }

    /// Allocates zeros if the memory is free; whether it was.
    ///
    /// # Errors
    /// Those of candle.
    pub fn alloc(&self) -> Result<bool> {
        if self.is_allocated() {
            return Ok(false);
        }
        self.fill(Tensor::zeros(self.shape(), self.dtype(), self.device())?)?;
        Ok(true)
    }

    /// Puts the memory of `tensor` in the place of this one's, free or not. `tensor`, with all that shares its memory, is used
    /// up: reading it is an error from now on.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless it has the handle's shape, dtype and device, and memory of its own.
    pub fn fill(&self, tensor: Tensor) -> Result<()> {
        let fits = tensor.shape() == self.shape()
            && tensor.dtype() == self.dtype()
            && tensor.device().same_device(self.device());
        if !fits {
            let (dtype, dims, device) = (tensor.dtype().as_str(), tensor.dims(), tensor.device().location());
            let own = self.device().location();
            return Err(invalid(format!("{dtype}{dims:?} on {device:?} does not fit {self} on {own:?}")));
        }
        check_owner(&tensor)?;
        let mut is_allocated = self.0.is_allocated.lock();
        if tensor.elem_count() > 0 {
            let hand = Exchange::of(&tensor);
            tensor.inplace_op1(&hand)?;
            self.0.tensor.inplace_op1(&hand)?;
        }
        *is_allocated = true;
        Ok(())
    }

    /// Gives the memory back; whether there was any.
    ///
    /// # Errors
    /// Those of candle.
    pub fn free(&self) -> Result<bool> {
        let mut is_allocated = self.0.is_allocated.lock();
        if *is_allocated && self.0.tensor.elem_count() > 0 {
            self.0.tensor.inplace_op1(&Exchange::of(&self.0.tensor))?;
        }
        Ok(std::mem::replace(&mut *is_allocated, false))
    }
}

fn check_owner(tensor: &Tensor) -> Result<()> {
    if tensor.is_contiguous() && tensor.layout().start_offset() == 0 {
        return Ok(());
    }
    let (dtype, dims) = (tensor.dtype().as_str(), tensor.dims());
    Err(invalid(format!(
        "{dtype}{dims:?} is a view of memory that others may use; copy it first with force_contiguous"
    )))
}

/// The memory of a tensor without any: one element.
///
/// # Errors
/// Those of the device.
pub fn no_memory<S>(device: &S::Device, dtype: DType) -> candle_core::Result<S>
where
    S: BackendStorage<Device: BackendDevice<Storage = S>>,
{
    device.zeros_impl(&Shape::from(1), dtype)
}

/// A dtype that operations refuse where they expect `dtype`: who reads a tensor without memory gets an error.
const fn unlike(dtype: DType) -> DType {
    match dtype {
        DType::U8 => DType::U32,
        _ => DType::U8,
    }
}

/// Puts the memory in hand into a tensor, or almost none, and takes what it had.
struct Exchange {
    hand: Mutex<Option<Storage>>,
    /// What the tensor says it is of.
    dtype: DType,
}

impl Exchange {
    fn of(tensor: &Tensor) -> Self {
        Self { hand: Mutex::default(), dtype: tensor.dtype() }
    }

    fn with(&self, f: impl FnOnce(Option<Storage>) -> candle_core::Result<Storage>) -> candle_core::Result<()> {
        let mut hand = self.hand.lock();
        *hand = Some(f(hand.take())?);
        Ok(())
    }
}

impl InplaceOp1 for Exchange {
    fn name(&self) -> &'static str {
        "exchange-memory"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        self.with(|hand| {
            let new = match hand {
                Some(Storage::Cpu(new)) => new,
                Some(other) => candle_core::bail!("memory on {:?} for a tensor of the host", other.device().location()),
                None => no_memory(storage.device(), unlike(self.dtype))?,
            };
            Ok(Storage::Cpu(std::mem::replace(storage, new)))
        })
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> candle_core::Result<()> {
        self.with(|hand| {
            let new = match hand {
                Some(Storage::Cuda(new)) => new,
                Some(other) => candle_core::bail!("memory on {:?} for a tensor of CUDA", other.device().location()),
                None => no_memory(storage.device(), unlike(self.dtype))?,
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
        for shape in [(2, 2), (0, 2)] {
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
