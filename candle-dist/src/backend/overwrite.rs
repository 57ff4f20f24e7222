//! Writing results into tensors that exist.
use super::device::Held;
use super::regions::Runs;
use crate::Result;
use candle_core::{CpuStorage, CudaStorage, InplaceOp1, Layout, Tensor, WithDType};

/// Fills a contiguous tensor with the elements of `parts`, one after the other.
///
/// Nobody else may be reading the tensor's storage: candle's lock on it is held for the whole write.
pub(super) fn overwrite(tensor: &Tensor, parts: &[&Tensor]) -> Result<()> {
    if tensor.elem_count() == 0 {
        return Ok(()); // candle refuses some of these
    }
    Ok(tensor.inplace_op1(&Overwrite(parts))?)
}

/// Whether two tensors lie in the same memory.
pub(super) fn share_memory(a: &Tensor, b: &Tensor) -> bool {
    address(a) == address(b)
}

/// Where a tensor's storage is: alike for views of one storage. Nothing stays locked.
pub(super) fn address(tensor: &Tensor) -> usize {
    std::ptr::from_ref(&*tensor.storage_and_layout().0).addr()
}

struct Overwrite<'a>(&'a [&'a Tensor]);

impl InplaceOp1 for Overwrite<'_> {
    fn name(&self) -> &'static str {
        "overwrite"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            candle_core::bail!("an in-place collective needs a contiguous tensor")
        };
        match storage {
            CpuStorage::U8(to) => self.copy(&mut to[start..end]),
            CpuStorage::U32(to) => self.copy(&mut to[start..end]),
            CpuStorage::I64(to) => self.copy(&mut to[start..end]),
            CpuStorage::BF16(to) => self.copy(&mut to[start..end]),
            CpuStorage::F16(to) => self.copy(&mut to[start..end]),
            CpuStorage::F32(to) => self.copy(&mut to[start..end]),
            CpuStorage::F64(to) => self.copy(&mut to[start..end]),
            _ => candle_core::bail!("an in-place collective of a dtype that groups do not carry"),
        }
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> candle_core::Result<()> {
        self.copy_on_device(storage, layout)
    }
}

impl Overwrite<'_> {
    fn copy_on_device<S: Held>(&self, to: &mut S, layout: &Layout) -> candle_core::Result<()> {
        let Some((mut at, end)) = layout.contiguous_offsets() else {
            candle_core::bail!("an in-place collective needs a contiguous tensor")
        };
        for part in self.0 {
            let (storage, layout) = part.storage_and_layout();
            let len = part.elem_count();
            if at + len > end {
                candle_core::bail!("parts of {} elements too many for an in-place collective", at + len - end)
            }
            S::of(&storage)?.copy_strided_src(to, at, layout)?;
            at += len;
        }
        Ok(())
    }

    fn copy<T: WithDType>(&self, to: &mut [T]) -> candle_core::Result<()> {
        let mut at = 0;
        for part in self.0.iter().filter(|part| part.elem_count() > 0) {
            let (storage, _) = part.storage_and_layout();
            let from = Runs::<T>::new(part, &storage, None)?;
            let len = from.total;
            let Some(to) = to.get_mut(at..at + len) else {
                candle_core::bail!("parts of {} elements and more for {}", at + len, to.len())
            };
            to.copy_from_slice(from.slice(0, len));
            at += len;
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn on_a_device_too_the_parts_come_one_after_the_other() {
        let parts = [Tensor::new(&[1f32, 2.0], &Device::Cpu).unwrap(), Tensor::new(&[3f32], &Device::Cpu).unwrap()];
        let (mut storage, layout) = (CpuStorage::F32(vec![0.0; 5]), Layout::contiguous_with_offset(3, 1));
        Overwrite(&[&parts[0], &parts[1]]).copy_on_device(&mut storage, &layout).unwrap();
        assert_eq!(storage.as_slice::<f32>().unwrap(), [0.0, 1.0, 2.0, 3.0, 0.0]);
        let text = Overwrite(&[&parts[0], &parts[0]]).copy_on_device(&mut storage, &layout).unwrap_err().to_string();
        assert!(text.contains("1 elements too many"), "{text}");
    }
}
