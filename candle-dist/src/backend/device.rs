//! Computes results from the ranks' tensors: on the CPU with code of this crate, on a device with candle's kernels.
//!
//! Both results have the same bits: sums run in rank order, 16-bit floats accumulate in f32, and NaN propagates.
use super::guards::Guards;
use super::runs::DimPiece;
use super::storage::{DeviceStorage, StorageOperand, mixed};
use super::{reduce, regions};
use crate::call::{Op, ReduceOp};
use crate::{Error, Result};
use candle_core::backend::BackendDevice;
use candle_core::op::{Add, BinaryOpT, CmpOp, Div, Mul};
use candle_core::{CudaStorage, DType, Device, Layout, Shape, Storage, StorageRef, Tensor};
use candle_dist_base::{Fresh, StripBuffer, StripCopy, dense, empty};

/// Returns the reduction of all tensors, or of the same `piece` of each, as new contiguous memory on their device.
pub(super) fn reduce(
    tensors: &[StorageOperand<'_>],
    op: ReduceOp,
    piece: Option<DimPiece>,
) -> Result<Storage> {
    match tensors[0].device() {
        Device::Cpu => Ok(Storage::Cpu(reduce::reduce(tensors, op, piece)?)),
        Device::Cuda(_) => Ok(Storage::Cuda(reduce_on::<CudaStorage>(tensors, op, piece)?)),
        Device::Metal(_) => Err(mixed()),
    }
}

/// Joins the tensors, or the same `piece` of each, along dim `join` as new contiguous memory on their device.
pub(super) fn concat(
    tensors: &[StorageOperand<'_>],
    piece: Option<DimPiece>,
    join: usize,
) -> Result<Storage> {
    match tensors[0].device() {
        Device::Cpu => Ok(Storage::Cpu(regions::concat(tensors, piece, join)?)),
        _ => concat_pieces(tensors, &vec![piece; tensors.len()], join),
    }
}

/// Joins the tensors, or a piece of each, along dim `join` as new contiguous memory on their device. All other dims
/// must have equal sizes.
pub(super) fn concat_pieces(
    tensors: &[StorageOperand<'_>],
    pieces: &[Option<DimPiece>],
    join: usize,
) -> Result<Storage> {
    match tensors[0].device() {
        Device::Cpu => Ok(Storage::Cpu(regions::concat_pieces(tensors, pieces, join)?)),
        Device::Cuda(_) => Ok(Storage::Cuda(concat_on::<CudaStorage>(tensors, pieces, join)?)),
        Device::Metal(_) => Err(mixed()),
    }
}

/// A tensor's storage with the layout of a piece of it.
type StoragePart<'a, S> = (&'a S, Layout);

fn part<'a, S: DeviceStorage>(
    tensor: &Tensor,
    storage: &'a StorageRef<'_>,
    piece: Option<DimPiece>,
) -> Result<StoragePart<'a, S>> {
    let layout = match piece {
        Some(DimPiece { dim, start, len }) => tensor.layout().narrow(dim, start, len)?,
        None => tensor.layout().clone(),
    };
    Ok((S::of(storage)?, layout))
}

pub(super) fn reduce_on<S: DeviceStorage>(
    tensors: &[StorageOperand<'_>],
    op: ReduceOp,
    piece: Option<DimPiece>,
) -> Result<S> {
    let guards = Guards::new(tensors);
    let parts = tensors.iter().zip(guards.iter()).map(|(tensor, guard)| part::<S>(tensor, guard, piece));
    let parts = parts.collect::<Result<Vec<_>>>()?;
    let (dtype, shape) = (parts[0].0.dtype(), parts[0].1.shape());
    if op.is_bitwise() || matches!(dtype, DType::I16 | DType::I32 | DType::F8E4M3) {
        let fix = "move the tensors to Device::Cpu first";
        return Err(Error::Unsupported(format!("{op} of {} tensors on a device; {fix}", dtype.as_str())));
    }
    if shape.elem_count() == 0 {
        return Ok(parts[0].0.device().zeros_impl(shape, dtype)?);
    }
    let wide = if matches!(dtype, DType::F16 | DType::BF16) { DType::F32 } else { dtype };
    let whole = Layout::contiguous(shape);
    let mut sum: Option<S> = None;
    for (part, layout) in &parts {
        let widened = match op {
            ReduceOp::PreMulSum(factor) => {
                let widened =
                    if wide == dtype { dense(*part, layout)? } else { part.to_dtype(layout, wide)? };
                Some(scale::<S, Mul>(&widened, shape.elem_count(), factor.value())?)
            }
            _ if wide == dtype => None,
            _ => Some(part.to_dtype(layout, wide)?),
        };
        sum = Some(match (sum, widened) {
            (None, Some(part)) => part,
            (None, None) => dense(*part, layout)?,
            (Some(sum), Some(part)) => combine(op, &sum, &whole, &part, &whole)?,
            (Some(sum), None) => combine(op, &sum, &whole, part, layout)?,
        });
    }
    let Some(mut sum) = sum else { return Err(mixed()) };
    if op == ReduceOp::Avg {
        // Multiplying by 1/n would round twice.
        sum = scale::<S, Div>(&sum, shape.elem_count(), tensors.len() as f64)?;
    }
    if wide == dtype { Ok(sum) } else { Ok(sum.to_dtype(&whole, dtype)?) }
}

fn combine<S: DeviceStorage>(op: ReduceOp, a: &S, a_l: &Layout, b: &S, b_l: &Layout) -> Result<S> {
    let replaces = match op {
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_) => {
            return Ok(a.binary_impl::<Add>(b, a_l, b_l)?);
        }
        ReduceOp::Product => return Ok(a.binary_impl::<Mul>(b, a_l, b_l)?),
        ReduceOp::Min => CmpOp::Lt,
        ReduceOp::Max => CmpOp::Gt,
        ReduceOp::And | ReduceOp::Or | ReduceOp::Xor => {
            return Err(Error::Unsupported(format!("{op} on a device")));
        }
    };
    // Comparisons with NaN are false, so a NaN stays; a second comparison finds a new NaN.
    let better = b.cmp(replaces, a, b_l, a_l)?.where_cond(a_l, b, b_l, a, a_l)?;
    Ok(b.cmp(CmpOp::Ne, b, b_l, b_l)?.where_cond(a_l, b, b_l, &better, a_l)?)
}

/// Applies `Op` to each of `count` floats and `number`.
fn scale<S: DeviceStorage, Op: BinaryOpT>(floats: &S, count: usize, number: f64) -> Result<S> {
    let number = match floats.dtype() {
        DType::F64 => floats.device().storage_from_slice(&[number])?,
        _ => floats.device().storage_from_slice(&[number as f32])?,
    };
    let everywhere = Layout::contiguous(1).broadcast_as(count)?;
    Ok(floats.binary_impl::<Op>(&number, &Layout::contiguous(count), &everywhere)?)
}

pub(super) fn concat_on<S: DeviceStorage>(
    tensors: &[StorageOperand<'_>],
    pieces: &[Option<DimPiece>],
    join: usize,
) -> Result<S> {
    let guards = Guards::new(tensors);
    let parts = tensors
        .iter()
        .zip(guards.iter())
        .zip(pieces)
        .map(|((tensor, guard), &piece)| part::<S>(tensor, guard, piece));
    let parts = parts.collect::<Result<Vec<_>>>()?;
    let (first, layout) = &parts[0];
    let rows: usize = layout.dims()[..join].iter().product();
    let total: usize = parts.iter().map(|(_, layout)| layout.shape().elem_count()).sum();
    join_rows(first.device(), &parts, (rows, total), first.dtype())
}

/// Joins the rows of parts, which have so many each and so many elements together, as new memory of a dtype.
fn join_rows<S: DeviceStorage>(
    device: &S::Device,
    parts: &[StoragePart<'_, S>],
    (rows, total): (usize, usize),
    dtype: DType,
) -> Result<S> {
    if total == 0 {
        return Ok(device.zeros_impl(&Shape::from(0), dtype)?);
    }
    let parts = || parts.iter().filter(|(_, layout)| layout.shape().elem_count() > 0);
    let copy = |(part, layout): &StoragePart<'_, S>| {
        layout.contiguous_offsets().is_none().then(|| dense(*part, layout)).transpose()
    };
    let copies = parts().map(copy).collect::<candle_core::Result<Vec<_>>>()?;
    let (row, mut at) = (total / rows, 0);
    let strips = parts().zip(&copies).map(|((part, layout), copy)| {
        let len = layout.shape().elem_count() / rows;
        let to = at;
        at += len;
        let (source, start) = copy.as_ref().map_or((*part, layout.start_offset()), |copy| (copy, 0));
        StripCopy { source, rows, len, from: (start, len), to: (to, row) }
    });
    let buffer = StripBuffer { dtype, total, strips: strips.collect() };
    Ok(S::copy_strips(device, &[buffer])?.remove(0))
}

/// Joins the elements of tensors, of one device, in new memory of this dtype: on CUDA devices by one launch for many of them.
pub(crate) fn joined(tensors: &[Tensor], dtype: DType) -> Result<Tensor> {
    let Some(Device::Cuda(device)) = tensors.first().map(Tensor::device) else {
        let flat = tensors.iter().map(|x| x.to_dtype(dtype)?.flatten_all());
        return Ok(Tensor::cat(&flat.collect::<candle_core::Result<Vec<_>>>()?, 0)?);
    };
    // Widening is a part of the copy.
    let is_copied = |x: &Tensor| {
        x.dtype() == dtype || dtype == DType::F32 && matches!(x.dtype(), DType::F16 | DType::BF16)
    };
    let fits =
        |x: &Tensor| if is_copied(x) { Ok(x.clone()) } else { empty::compute(x, |x| x.to_dtype(dtype)) };
    let tensors = tensors.iter().map(fits).collect::<candle_core::Result<Vec<_>>>()?;
    let operands: Vec<_> = tensors.iter().map(StorageOperand::of).collect();
    let guards = Guards::new(&operands);
    let parts = operands.iter().zip(guards.iter()).map(|(x, guard)| part::<CudaStorage>(x, guard, None));
    let total: usize = tensors.iter().map(Tensor::elem_count).sum();
    let storage = join_rows(device, &parts.collect::<Result<Vec<_>>>()?, (1, total), dtype)?;
    Ok(Fresh { storage: Storage::Cuda(storage), shape: Shape::from(total) }.into_tensor())
}

/// Checks that several ranks can read the tensors: they are on the CPU, or on one device that runs work in order.
///
/// This depends on the tensors of all ranks only, so all ranks get the same result.
pub(super) fn check_shared<'a>(op: Op, tensors: impl Iterator<Item = &'a Tensor> + Clone) -> Result<()> {
    let Some(first) = tensors.clone().next() else { return Ok(()) };
    let why = if tensors.clone().any(|tensor| !tensor.device().same_device(first.device())) {
        "of different `Device`s, whose streams do not wait for each other"
    } else if is_per_thread(first.device()) {
        "on the calling thread's own stream, for which other threads do not wait"
    } else {
        return Ok(());
    };
    let fix =
        "make one `Device::new_cuda_with_stream(ordinal)` and give every rank of that GPU a clone of it";
    Err(Error::Unsupported(format!("{op} among threads of CUDA tensors {why}; {fix}")))
}

/// Returns whether the device uses the stream of the calling thread, like one of `Device::new_cuda`.
#[cfg(feature = "cuda")]
pub(super) fn is_per_thread(device: &Device) -> bool {
    const PER_THREAD: usize = 2; // CU_STREAM_PER_THREAD
    matches!(device, Device::Cuda(device) if device.cuda_stream().cu_stream().addr() == PER_THREAD)
}

#[cfg(not(feature = "cuda"))]
pub(super) fn is_per_thread(_: &Device) -> bool {
    false
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;
    use candle_core::CpuStorage;
    use proptest::prelude::*;

    const DTYPES: [DType; 7] =
        [DType::U8, DType::U32, DType::I64, DType::BF16, DType::F16, DType::F32, DType::F64];
    const OPS: [ReduceOp; 6] = [
        ReduceOp::Sum,
        ReduceOp::Avg,
        ReduceOp::Min,
        ReduceOp::Max,
        ReduceOp::Product,
        ReduceOp::pre_mul_sum(0.3),
    ];

    /// Returns small whole numbers and thirds, with some NaN among floats. Products of three fit u8.
    fn tensors(seed: usize, n: usize, dims: &[usize], dtype: DType) -> Vec<Tensor> {
        let count: usize = dims.iter().product();
        let value = |rank: usize, i: usize| match (seed + 7 * rank + 3 * i) % 11 {
            10 if dtype.is_float() => f64::NAN,
            k if dtype.is_float() => k as f64 / 3.0 - 1.0,
            k => (k % 6) as f64,
        };
        let of = |rank| {
            Tensor::from_vec((0..count).map(|i| value(rank, i)).collect::<Vec<_>>(), dims, &Device::Cpu)
        };
        (0..n).map(|rank| of(rank).unwrap().to_dtype(dtype).unwrap()).collect()
    }

    /// Returns the bits of a result, because NaN differs from itself.
    fn bits(storage: CpuStorage) -> Vec<u64> {
        let count = match &storage {
            CpuStorage::U8(v) => v.len(),
            CpuStorage::U32(v) => v.len(),
            CpuStorage::I64(v) => v.len(),
            CpuStorage::BF16(v) => v.len(),
            CpuStorage::F16(v) => v.len(),
            CpuStorage::F32(v) => v.len(),
            CpuStorage::F64(v) => v.len(),
            _ => unreachable!(),
        };
        let tensor = super::super::Fresh::host(storage, count).into_tensor().to_dtype(DType::F64).unwrap();
        let canonical = |x: f64| if x.is_nan() { u64::MAX } else { x.to_bits() };
        tensor.to_vec1::<f64>().unwrap().into_iter().map(canonical).collect()
    }

    proptest! {
        // The kernels' code, run on the CPU, gives the same results as the CPU code.
        #[test]
        fn both_ways_reduce_alike(
            seed in 0usize..100, n in 1usize..4, a in 0usize..4, b in 1usize..4, dtype in 0usize..7, op in 0usize..6,
            cut in proptest::option::of((0usize..2, 0usize..3, 0usize..3)),
        ) {
            let (dtype, op) = (DTYPES[dtype], OPS[op]);
            prop_assume!(!(dtype.is_int() && op.is_fractional()));
            let dims = [a, b, 2];
            let all = tensors(seed, n, &dims, dtype);
            let all: Vec<StorageOperand<'_>> = all.iter().map(StorageOperand::of).collect();
            let piece = cut.map(|(dim, start, len)| {
                let start = start.min(dims[dim]);
                DimPiece { dim, start, len: len.min(dims[dim] - start) }
            });
            let (host, device) = (reduce::reduce(&all, op, piece).unwrap(), reduce_on(&all, op, piece).unwrap());
            prop_assert_eq!(bits(host), bits(device));
        }

        #[test]
        fn both_ways_join_alike(
            seed in 0usize..100, n in 1usize..4, a in 0usize..4, b in 1usize..4, join in 0usize..3,
            cut in proptest::option::of((0usize..3, 0usize..3, 0usize..3)),
        ) {
            let dims = [a, b, 3];
            let all = tensors(seed, n, &dims, DType::F32);
            let all: Vec<StorageOperand<'_>> = all.iter().map(StorageOperand::of).collect();
            let pieces: Vec<_> = (0..n).map(|rank| cut.map(|(dim, start, len)| {
                let start = start.min(dims[dim]);
                // Only the joined dim may differ between pieces.
                let len = if dim == join { len + rank } else { len };
                DimPiece { dim, start, len: len.min(dims[dim] - start) }
            })).collect();
            let host = regions::concat_pieces(&all, &pieces, join).unwrap();
            prop_assert_eq!(bits(host), bits(concat_on(&all, &pieces, join).unwrap()));
        }
    }
}
