//! Bitwise comparison and digests of tensors.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use candle_dist_base::bits::{digest, same_bits};
//!
//! let a = Tensor::new(&[1f32, f32::NAN], &Device::Cpu)?;
//! let b = Tensor::new(&[1f32, f32::NAN], &Device::Cpu)?;
//! let c = Tensor::new(&[2f32, f32::NAN], &Device::Cpu)?;
//! assert!(same_bits(&a, &b)? && !same_bits(&a, &c)?);
//! assert_eq!(digest(&a)?, digest(&b)?);
//! assert_ne!(digest(&a)?, digest(&c)?);
//! # Ok::<(), candle_core::Error>(())
//! ```
use candle_core::{CpuStorage, DType, Device, Result, Storage, Tensor};
use half::{bf16, f16};
use twox_hash::XxHash3_64;

/// Returns whether two tensors have the same shape, dtype and bits. A NaN equals itself, and 0 differs from -0.
///
/// Reads both tensors once. Tensors on other devices are copied to the CPU first.
///
/// # Errors
/// If candle cannot read a tensor.
pub fn same_bits(a: &Tensor, b: &Tensor) -> Result<bool> {
    if a.id() == b.id() {
        return Ok(true);
    }
    if a.dtype() != b.dtype() || a.dims() != b.dims() {
        return Ok(false);
    }
    with_bytes(a, |a| with_bytes(b, |b| a == b))?
}

/// Returns whether two tensors on one device have the same shape, dtype and elements. A NaN equals itself.
///
/// On a CPU this compares the [bits](same_bits). On other devices the device compares, where 0 equals -0, and one
/// element is copied to the CPU. Only if the device finds a difference, such as a NaN, are both tensors copied.
///
/// # Errors
/// If candle cannot read or compare the tensors.
pub fn same_elements(a: &Tensor, b: &Tensor) -> Result<bool> {
    if a.dtype() == b.dtype() && a.dims() == b.dims() && !a.device().is_cpu() && agree_there(a, b)? {
        return Ok(true);
    }
    same_bits(a, b)
}

/// Returns whether the tensors' device finds no difference.
fn agree_there(a: &Tensor, b: &Tensor) -> Result<bool> {
    if a.elem_count() == 0 {
        return Ok(true);
    }
    Ok(a.detach().ne(&b.detach())?.flatten_all()?.max(0)?.to_scalar::<u8>()? == 0)
}

/// Returns a digest of the shape, dtype and bits of a tensor, the same on every machine.
///
/// Different tensors have the same digest with a probability of 2⁻⁶⁴. Reads the tensor once. A tensor on another device
/// is copied to the CPU first.
///
/// # Errors
/// If candle cannot read the tensor.
pub fn digest(tensor: &Tensor) -> Result<u64> {
    let elements = with_bytes(tensor, XxHash3_64::oneshot)?;
    Ok(digest_bytes(format!("{}{:?}{elements:x}", tensor.dtype().as_str(), tensor.dims()).as_bytes()))
}

/// Returns a digest of bytes, the same on every machine.
pub fn digest_bytes(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

/// Calls `f` with the bytes of the tensor's elements in order.
#[doc(hidden)]
pub fn with_bytes<R>(tensor: &Tensor, f: impl FnOnce(&[u8]) -> R) -> Result<R> {
    let tensor = match tensor.elem_count() {
        0 => return Ok(f(&[])),
        _ => tensor.detach().to_device(&Device::Cpu)?.contiguous()?,
    };
    let tensor = match tensor.dtype() {
        // Its elements have no plain bytes, and f32 represents each of them exactly.
        DType::F8E4M3 => tensor.to_dtype(DType::F32)?,
        _ => tensor,
    };
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { candle_core::bail!("bits: the tensor is not on the CPU") };
    let (start, end) = (layout.start_offset(), layout.start_offset() + layout.shape().elem_count());
    Ok(match storage {
        CpuStorage::U8(data)
        | CpuStorage::F6E2M3(data)
        | CpuStorage::F6E3M2(data)
        | CpuStorage::F4(data)
        | CpuStorage::F8E8M0(data) => f(data.get(start..end).unwrap_or(data)),
        CpuStorage::U32(data) => f(bytemuck::cast_slice(&data[start..end])),
        CpuStorage::I16(data) => f(bytemuck::cast_slice(&data[start..end])),
        CpuStorage::I32(data) => f(bytemuck::cast_slice(&data[start..end])),
        CpuStorage::I64(data) => f(bytemuck::cast_slice(&data[start..end])),
        CpuStorage::BF16(data) => f(bytemuck::cast_slice::<bf16, u8>(&data[start..end])),
        CpuStorage::F16(data) => f(bytemuck::cast_slice::<f16, u8>(&data[start..end])),
        CpuStorage::F32(data) => f(bytemuck::cast_slice(&data[start..end])),
        CpuStorage::F64(data) => f(bytemuck::cast_slice(&data[start..end])),
        CpuStorage::F8E4M3(_) => candle_core::bail!("bits: f8e4m3 was not widened"),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::{agree_there, digest, same_bits, same_elements};
    use candle_core::{DType, Device, Tensor};

    #[test]
    fn every_dtype_view_and_bit_counts() {
        let x = Tensor::arange(0f32, 12., &Device::Cpu).unwrap().reshape((3, 4)).unwrap();
        for dtype in [DType::U8, DType::U32, DType::I16, DType::I32, DType::I64].into_iter().chain([
            DType::BF16,
            DType::F16,
            DType::F32,
            DType::F64,
            DType::F8E4M3,
        ]) {
            let x = x.to_dtype(dtype).unwrap();
            let turned = x.t().unwrap();
            let back = turned.contiguous().unwrap().t().unwrap();
            let (top, other) = (x.narrow(0, 1, 1).unwrap(), x.narrow(0, 0, 1).unwrap());
            let own = top.force_contiguous().unwrap();
            for (a, b, want) in
                [(&x, &back, true), (&x, &turned, false), (&top, &own, true), (&top, &other, false)]
            {
                assert_eq!(same_bits(a, b).unwrap(), want, "{dtype:?}");
                assert_eq!(same_elements(a, b).unwrap(), want, "{dtype:?}");
                assert_eq!(digest(a).unwrap() == digest(b).unwrap(), want, "{dtype:?}");
            }
            // The same elements in another shape.
            let flat = x.flatten_all().unwrap();
            assert!(!same_bits(&x, &flat).unwrap() && digest(&x).unwrap() != digest(&flat).unwrap());
            let none = x.narrow(0, 0, 0).unwrap();
            assert!(same_bits(&none, &none.copy().unwrap()).unwrap());
        }
        let [zero, minus, nan] = [0f32, -0.0, f32::NAN].map(|x| Tensor::new(&[x], &Device::Cpu).unwrap());
        assert!(!same_bits(&zero, &minus).unwrap() && digest(&zero).unwrap() != digest(&minus).unwrap());
        assert!(same_bits(&nan, &nan.copy().unwrap()).unwrap());
    }

    #[test]
    fn what_a_device_compares() {
        let x = Tensor::new(&[1f32, 2.], &Device::Cpu).unwrap();
        let y = Tensor::new(&[1f32, 3.], &Device::Cpu).unwrap();
        assert!(agree_there(&x, &x.copy().unwrap()).unwrap() && !agree_there(&x, &y).unwrap());
        assert!(agree_there(&x.narrow(0, 0, 0).unwrap(), &y.narrow(0, 0, 0).unwrap()).unwrap());
    }
}
