//! Marks of NaN beside the numbers whose largest or smallest is taken.
//!
//! NCCL's documents do not say what `ncclMax` and `ncclMin` do with NaN, and C's `fmax` drops it. So ranks also reduce one
//! byte per float in the same group of calls, which says whether the float is NaN somewhere, and put NaN there.
use crate::Result;
use crate::backend::storage::DeviceStorage;
use crate::backend::{Call, ReduceOp};
use candle_core::backend::BackendDevice;
use candle_core::op::CmpOp;
use candle_core::scalar::Scalar;
use candle_core::{DType, Layout, Shape, bail};
use half::{bf16, f16};

/// Returns whether a call needs marks for its tensors of this dtype. It depends on what all ranks share.
pub(super) fn needed(call: &Call, dtype: DType) -> bool {
    matches!(call.collective.reduction(), Some(ReduceOp::Max | ReduceOp::Min)) && nan(dtype).is_ok()
}

/// Returns 1 for each NaN of the numbers that `layout` describes, and 0 for all others.
pub(super) fn of<S: DeviceStorage>(numbers: &S, layout: &Layout) -> Result<S> {
    if layout.shape().elem_count() == 0 {
        return Ok(numbers.device().zeros_impl(layout.shape(), DType::U8)?);
    }
    Ok(numbers.cmp(CmpOp::Ne, numbers, layout, layout)?)
}

/// Returns `count` numbers with NaN where it is marked.
pub(super) fn apply<S: DeviceStorage>(marks: &S, numbers: S, count: usize) -> Result<S> {
    if count == 0 {
        return Ok(numbers);
    }
    let one = Layout::contiguous(1);
    let mut nothing = numbers.device().zeros_impl(&Shape::from(1), numbers.dtype())?;
    nothing.const_set(nan(numbers.dtype())?, &one)?;
    let (all, everywhere) = (Layout::contiguous(count), one.broadcast_as(count)?);
    Ok(marks.where_cond(&all, &nothing, &everywhere, &numbers, &all)?)
}

fn nan(dtype: DType) -> candle_core::Result<Scalar> {
    Ok(match dtype {
        DType::BF16 => Scalar::BF16(bf16::NAN),
        DType::F16 => Scalar::F16(f16::NAN),
        DType::F32 => Scalar::F32(f32::NAN),
        DType::F64 => Scalar::F64(f64::NAN),
        _ => bail!("{} has no NaN", dtype.as_str()),
    })
}
