//! The memory of a tensor, taken from it and given to it while graphs refer to it.
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CpuStorage, CudaStorage, DType, InplaceOp1, Layout, Shape, Tensor};
use std::sync::{Mutex, PoisonError};

/// Gives the memory of `from`, contiguous and of the same shape and dtype, to `to`; `from` is used up.
pub(super) fn give(from: Tensor, to: &Tensor) -> candle_core::Result<()> {
    if to.elem_count() == 0 {
        return Ok(());
    }
    let hand = Exchange::of(to);
    from.inplace_op1(&hand)?;
    to.inplace_op1(&hand)
}

/// Drops the memory of `tensor`, which must not be read until it is given some again.
pub(super) fn release(tensor: &Tensor) -> candle_core::Result<()> {
    if tensor.elem_count() == 0 {
        return Ok(());
    }
    tensor.inplace_op1(&Exchange::of(tensor))
}

/// The memory of a tensor without any: one element.
pub(super) fn nothing<S>(device: &S::Device, dtype: DType) -> candle_core::Result<S>
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
    hand: Mutex<Option<Memory>>,
    /// What the tensor says it is of.
    dtype: DType,
}

enum Memory {
    Cpu(CpuStorage),
    Cuda(CudaStorage),
}

impl Exchange {
    fn of(tensor: &Tensor) -> Self {
        Self { hand: Mutex::default(), dtype: tensor.dtype() }
    }

    fn with(&self, f: impl FnOnce(Option<Memory>) -> candle_core::Result<Memory>) -> candle_core::Result<()> {
        let mut hand = self.hand.lock().unwrap_or_else(PoisonError::into_inner);
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
                Some(Memory::Cpu(new)) => new,
                Some(Memory::Cuda(_)) => candle_core::bail!("the memory of a CUDA tensor for one of the host"),
                None => nothing(storage.device(), unlike(self.dtype))?,
            };
            Ok(Memory::Cpu(std::mem::replace(storage, new)))
        })
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> candle_core::Result<()> {
        self.with(|hand| {
            let new = match hand {
                Some(Memory::Cuda(new)) => new,
                Some(Memory::Cpu(_)) => candle_core::bail!("the memory of a host tensor for one of CUDA"),
                None => nothing(storage.device(), unlike(self.dtype))?,
            };
            Ok(Memory::Cuda(std::mem::replace(storage, new)))
        })
    }
}
