//! Writing results into tensors that exist.
use super::regions::Runs;
use crate::Result;
use candle_core::{CpuStorage, InplaceOp1, Layout, Tensor, WithDType};

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
    let address = |tensor: &Tensor| std::ptr::from_ref(&*tensor.storage_and_layout().0).addr();
    address(a) == address(b)
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
}

impl Overwrite<'_> {
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
