//! Writes results into existing tensors.
use super::element::ReduceElement;
use super::runs::TensorRuns;
use super::storage::DeviceStorage;
use crate::{Error, Result};
use candle_core::{CpuStorage, CudaStorage, InplaceOp1, Layout, Tensor};

/// Fills a contiguous tensor with the elements of `parts`, one after the other.
///
/// No other thread may read the tensor's storage, because candle's lock on it is held for the whole write.
pub(crate) fn overwrite(tensor: &Tensor, parts: &[&Tensor]) -> Result<()> {
    if tensor.elem_count() == 0 {
        return Ok(()); // candle refuses some empty tensors
    }
    Ok(tensor.inplace_op1(&Overwrite(parts))?)
}

struct Overwrite<'a>(&'a [&'a Tensor]);

impl InplaceOp1 for Overwrite<'_> {
    fn name(&self) -> &'static str {
        "overwrite"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        Ok(on_host(storage, layout, self)?)
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> candle_core::Result<()> {
        self.copy_on_device(storage, layout)
    }
}

impl HostWrite for Overwrite<'_> {
    fn write<T: ReduceElement>(&self, to: &mut [T]) -> Result<()> {
        let mut at = 0;
        for part in self.0.iter().filter(|part| part.elem_count() > 0) {
            let (storage, _) = part.storage_and_layout();
            let from = TensorRuns::<T>::new(part, &storage, None)?;
            let (len, room) = (from.total, to.len());
            let Some(to) = to.get_mut(at..at + len) else {
                return Err(Error::Unsupported(format!(
                    "parts of {} elements and more for {room}",
                    at + len
                )));
            };
            to.copy_from_slice(from.slice(0, len));
            at += len;
        }
        Ok(())
    }
}

/// Something that fills CPU memory of any dtype.
pub(super) trait HostWrite {
    fn write<T: ReduceElement>(&self, to: &mut [T]) -> Result<()>;
}

/// Fills a contiguous CPU tensor with `write`.
///
/// No other thread may read the tensor's storage, because candle's lock on it is held for the whole write.
pub(super) fn write_host(tensor: &Tensor, write: &impl HostWrite) -> Result<()> {
    if tensor.elem_count() == 0 {
        return Ok(()); // candle refuses some empty tensors
    }
    Ok(tensor.inplace_op1(&Write(write))?)
}

struct Write<'a, W>(&'a W);

impl<W: HostWrite> InplaceOp1 for Write<'_, W> {
    fn name(&self) -> &'static str {
        "write"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        Ok(on_host(storage, layout, self.0)?)
    }
}

fn on_host(storage: &mut CpuStorage, layout: &Layout, write: &impl HostWrite) -> Result<()> {
    let Some((start, end)) = layout.contiguous_offsets() else {
        return Err(Error::Unsupported("a result in memory that is not contiguous".to_string()));
    };
    macro_rules! write_to {
        ($($kind:ident)*) => {
            match storage {
                $(CpuStorage::$kind(to) => write.write(&mut to[start..end]),)*
                _ => Err(Error::Unsupported("a result in memory of a dtype that groups do not support".to_string())),
            }
        };
    }
    write_to!(U8 U32 I16 I32 I64 BF16 F16 F32 F64 F8E4M3)
}

impl Overwrite<'_> {
    fn copy_on_device<S: DeviceStorage>(&self, to: &mut S, layout: &Layout) -> candle_core::Result<()> {
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
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn on_a_device_too_the_parts_come_one_after_the_other() {
        let parts =
            [Tensor::new(&[1f32, 2.0], &Device::Cpu).unwrap(), Tensor::new(&[3f32], &Device::Cpu).unwrap()];
        let (mut storage, layout) = (CpuStorage::F32(vec![0.0; 5]), Layout::contiguous_with_offset(3, 1));
        Overwrite(&[&parts[0], &parts[1]]).copy_on_device(&mut storage, &layout).unwrap();
        assert_eq!(storage.as_slice::<f32>().unwrap(), [0.0, 1.0, 2.0, 3.0, 0.0]);
        let text =
            Overwrite(&[&parts[0], &parts[0]]).copy_on_device(&mut storage, &layout).unwrap_err().to_string();
        assert!(text.contains("1 elements too many"), "{text}");
    }
}
