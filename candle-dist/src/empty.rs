//! Tensors without elements on a GPU. candle launches most of its kernels for them without blocks, which CUDA refuses.
//!
//! Such tensors are computed on the host: nothing is copied, and the graph goes on.
use candle_core::{Device, Result, Tensor};

/// Returns whether candle cannot compute on this tensor where it is: it has no elements and is not on the host.
pub fn is_empty_off_host(x: &Tensor) -> bool {
    !x.device().is_cpu() && x.elem_count() == 0
}

/// Returns the tensor on the host, with its graph. Only its own elements are copied.
pub fn to_host(x: &Tensor) -> Result<Tensor> {
    if x.device().is_cpu() {
        return Ok(x.clone());
    }
    // candle's `to_device` copies the whole memory that a view is a part of.
    x.force_contiguous()?.to_device(&Device::Cpu)
}

/// Returns `f` of the tensor, computed on the host if candle cannot compute where the tensor is. The result is on the
/// device of the tensor.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_dist::empty;
///
/// let x = Tensor::zeros((0, 3), DType::BF16, &Device::Cpu)?;
/// assert_eq!(empty::compute(&x, |x| x.to_dtype(DType::F32))?.dims(), [0, 3]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// Those of `f`, and of copies.
pub fn compute(x: &Tensor, f: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    if is_empty_off_host(x) { f(&to_host(x)?)?.to_device(x.device()) } else { f(x) }
}
