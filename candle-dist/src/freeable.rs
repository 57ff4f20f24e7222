//! Tensors whose data can be freed and allocated again.
use crate::{Error, Result};
use candle_core::{DType, Device, Shape, Tensor};
use parking_lot::RwLock;
use std::fmt;
use std::sync::Arc;

/// A tensor's shape, dtype and device, with data that can be freed and allocated again.
///
/// It is made for parameters that are gathered before use and freed afterwards: layers keep a clone of the handle while
/// its data changes. Clones share the data. Using freed data is an error, and never returns stale data. The device gets
/// its memory back when all tensors that were taken out, and their views, are dropped.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_dist::FreeableTensor;
///
/// let weight = FreeableTensor::new(Tensor::ones((2, 3), DType::F32, &Device::Cpu)?);
/// let in_a_layer = weight.clone();
/// assert!(weight.free());
/// assert!(!in_a_layer.is_allocated());
/// let error = in_a_layer.tensor().unwrap_err().to_string();
/// assert_eq!(error, "FreeableTensor: the data of f32[2, 3] is free; alloc or fill it before use");
///
/// assert!(weight.alloc()?); // zeros, until it is filled
/// weight.fill(Tensor::full(2f32, (2, 3), &Device::Cpu)?)?;
/// assert_eq!(in_a_layer.tensor()?.sum_all()?.to_scalar::<f32>()?, 12.0);
/// # Ok::<(), candle_dist::Error>(())
/// ```
#[derive(Clone)]
pub struct FreeableTensor(Arc<Inner>);

struct Inner {
    shape: Shape,
    dtype: DType,
    device: Device,
    data: RwLock<Option<Tensor>>,
}

impl FreeableTensor {
    /// Creates an allocated handle for `tensor`.
    pub fn new(tensor: Tensor) -> Self {
        let (shape, dtype, device) = (tensor.shape().clone(), tensor.dtype(), tensor.device().clone());
        Self(Arc::new(Inner { shape, dtype, device, data: RwLock::new(Some(tensor)) }))
    }

    /// Creates a handle without data.
    pub fn freed(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Self {
        let (shape, device) = (shape.into(), device.clone());
        Self(Arc::new(Inner { shape, dtype, device, data: RwLock::new(None) }))
    }

    /// Returns the shape, allocated or not.
    pub fn shape(&self) -> &Shape {
        &self.0.shape
    }

    /// Returns the dtype, allocated or not.
    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    /// Returns the device, allocated or not.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Returns whether there is data.
    pub fn is_allocated(&self) -> bool {
        self.0.data.read().is_some()
    }

    /// Returns the data as a tensor, without a copy, or an [`Error::Invalid`] if it is freed.
    pub fn tensor(&self) -> Result<Tensor> {
        self.0
            .data
            .read()
            .clone()
            .ok_or_else(|| invalid(format!("the data of {self} is free; alloc or fill it before use")))
    }

    /// Allocates zeros if the data is freed. Returns whether it was.
    pub fn alloc(&self) -> Result<bool> {
        let mut data = self.0.data.write();
        let was_free = data.is_none();
        if was_free {
            *data = Some(Tensor::zeros(self.shape(), self.dtype(), self.device())?);
        }
        Ok(was_free)
    }

    /// Replaces the data by `tensor`, which must have the handle's shape, dtype and device. Works on freed handles too.
    pub fn fill(&self, tensor: Tensor) -> Result<()> {
        let fits = tensor.shape() == self.shape()
            && tensor.dtype() == self.dtype()
            && tensor.device().same_device(self.device());
        if !fits {
            let (dtype, dims, device) = (tensor.dtype().as_str(), tensor.dims(), tensor.device().location());
            let own = self.device().location();
            return Err(invalid(format!("{dtype}{dims:?} on {device:?} does not fit {self} on {own:?}")));
        }
        *self.0.data.write() = Some(tensor);
        Ok(())
    }

    /// Frees the data. Returns whether there was any.
    pub fn free(&self) -> bool {
        self.0.data.write().take().is_some()
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
    use candle_core::{CpuStorage, CustomOp1, Layout, Var};

    fn zeros(shape: impl Into<Shape>, dtype: DType) -> Tensor {
        Tensor::zeros(shape, dtype, &Device::Cpu).unwrap()
    }

    #[test]
    fn alloc_and_free_tell_whether_they_did_something() {
        let handle = FreeableTensor::freed((2, 2), DType::I64, &Device::Cpu);
        assert!(!handle.is_allocated() && !handle.free());
        assert!(handle.alloc().unwrap());
        let first = handle.tensor().unwrap();
        assert_eq!((first.dims(), first.dtype()), (&[2, 2][..], DType::I64));
        assert!(!handle.alloc().unwrap());
        assert_eq!(handle.tensor().unwrap().id(), first.id(), "allocated data stays");
        assert!(handle.free() && !handle.free());
        assert!(matches!(handle.tensor(), Err(Error::Invalid { .. })));
    }

    #[test]
    fn only_data_that_fits_is_taken() {
        let handle = FreeableTensor::freed((2, 3), DType::F32, &Device::Cpu);
        for wrong in [zeros((3, 2), DType::F32), zeros((2, 3), DType::F64)] {
            let error = handle.fill(wrong).unwrap_err().to_string();
            assert!(error.contains("does not fit f32[2, 3]"), "{error}");
            assert!(!handle.is_allocated());
        }
        handle.fill(zeros((2, 3), DType::F32)).unwrap();
        assert_eq!(format!("{handle:?}"), "FreeableTensor(f32[2, 3], allocated)");
    }

    /// An identity op that is alive as long as the tensor it made.
    struct Alive(#[expect(dead_code, reason = "held for its count")] Arc<()>);

    impl CustomOp1 for Alive {
        fn name(&self) -> &'static str {
            "alive"
        }

        fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
            Ok((storage.clone(), layout.shape().clone()))
        }
    }

    #[test]
    fn freeing_drops_the_data_for_all_clones() {
        let (count, source) = (Arc::new(()), Var::zeros(4, DType::F32, &Device::Cpu).unwrap());
        let handle = FreeableTensor::new(source.apply_op1(Alive(count.clone())).unwrap());
        let clone = handle.clone();
        let taken = handle.tensor().unwrap();
        assert!(clone.free() && !handle.is_allocated());
        assert_eq!(Arc::strong_count(&count), 2, "a tensor that was taken out keeps the data");
        drop(taken);
        assert_eq!(Arc::strong_count(&count), 1, "nothing else does");
    }
}
