//! Removes and restores the memory of a tensor while graphs refer to it.
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CpuStorage, CudaStorage, DType, InplaceOp1, Layout, Shape, Storage, Tensor};
use std::sync::{Mutex, PoisonError};

/// Moves the memory of `from`, contiguous and of the same shape and dtype, to `to`; consumes `from`.
pub(super) fn give(from: Tensor, to: &Tensor) -> candle_core::Result<()> {
    if to.elem_count() == 0 {
        return Ok(());
    }
    let hand = Exchange::of(to);
    from.inplace_op1(&hand)?;
    to.inplace_op1(&hand)
}

/// Drops the memory of `tensor`, which must not be read until it gets memory again.
pub(super) fn release(tensor: &Tensor) -> candle_core::Result<()> {
    if tensor.elem_count() == 0 {
        return Ok(());
    }
    tensor.inplace_op1(&Exchange::of(tensor))
}

/// Returns the memory of a released tensor: one element.
pub(super) fn nothing<S>(device: &S::Device, dtype: DType) -> candle_core::Result<S>
where
    S: BackendStorage<Device: BackendDevice<Storage = S>>,
{
    device.zeros_impl(&Shape::from(1), dtype)
}

/// Returns a dtype that operations refuse where they expect `dtype`, so that reading a released tensor is an error.
const fn unlike(dtype: DType) -> DType {
    match dtype {
        DType::U8 => DType::U32,
        _ => DType::U8,
    }
}

/// Swaps the memory in `hand`, or one element if it is empty, with the memory of a tensor.
struct Exchange {
    hand: Mutex<Option<Storage>>,
    /// The dtype that the tensor declares.
    dtype: DType,
}

impl Exchange {
    fn of(tensor: &Tensor) -> Self {
        Self { hand: Mutex::default(), dtype: tensor.dtype() }
    }

    fn with(&self, f: impl FnOnce(Option<Storage>) -> candle_core::Result<Storage>) -> candle_core::Result<()> {
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
                Some(Storage::Cpu(new)) => new,
                Some(other) => candle_core::bail!("memory on {:?} for a tensor of the host", other.device().location()),
                None => nothing(storage.device(), unlike(self.dtype))?,
            };
            Ok(Storage::Cpu(std::mem::replace(storage, new)))
        })
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> candle_core::Result<()> {
        self.with(|hand| {
            let new = match hand {
                Some(Storage::Cuda(new)) => new,
                Some(other) => candle_core::bail!("memory on {:?} for a tensor of CUDA", other.device().location()),
                None => nothing(storage.device(), unlike(self.dtype))?,
            };
            Ok(Storage::Cuda(std::mem::replace(storage, new)))
        })
    }
}
