//! Reads of runs of bytes into the memory of a tensor.
use super::file::{DigestBlock, WeightFile};
use super::runs::{ByteRun, ByteRuns};
use crate::Result;
use bytemuck::Pod;
use candle_core::{DType, Device, Tensor, WithDType};
use half::{bf16, f16};
use std::ops::Range;

/// Runs whose starts are less than this many bytes apart are read together with the gaps between them: below it, one
/// call per run takes longer than reading the gaps and copying the run out.
const TOGETHER: usize = 8192;
/// The most bytes that are read together.
const AT_ONCE: usize = 256 << 10;

/// Creates a tensor of a block's shape whose bytes `fill` writes.
pub(super) fn filled(
    dtype: DType,
    block: &[Range<usize>],
    device: &Device,
    fill: impl FnOnce(&mut [u8]) -> Result<()>,
) -> Result<Tensor> {
    let shape: Vec<usize> = block.iter().map(Range::len).collect();
    match dtype {
        DType::U8 => typed::<u8>(shape, device, fill),
        DType::U32 => typed::<u32>(shape, device, fill),
        DType::I16 => typed::<i16>(shape, device, fill),
        DType::I32 => typed::<i32>(shape, device, fill),
        DType::I64 => typed::<i64>(shape, device, fill),
        DType::BF16 => typed::<bf16>(shape, device, fill),
        DType::F16 => typed::<f16>(shape, device, fill),
        DType::F32 => typed::<f32>(shape, device, fill),
        DType::F64 => typed::<f64>(shape, device, fill),
        dtype => Err(candle_core::Error::UnsupportedDTypeForOp(dtype, "read").into()),
    }
}

fn typed<T: Pod + WithDType>(
    shape: Vec<usize>,
    device: &Device,
    fill: impl FnOnce(&mut [u8]) -> Result<()>,
) -> Result<Tensor> {
    let mut values = vec![T::zeroed(); shape.iter().product()];
    fill(bytemuck::cast_slice_mut(&mut values))?;
    Ok(Tensor::from_vec(values, shape, device)?)
}

/// Reads the runs of the stored block at offset `at` to their places in `bytes`; returns the number of bytes read.
pub(super) fn read(file: &WeightFile, at: u64, runs: ByteRuns, bytes: &mut [u8]) -> Result<u64> {
    let (mut pending, mut held, mut read): (Vec<ByteRun>, ReadBuffers, u64) =
        (Vec::new(), ReadBuffers::default(), 0);
    for run in runs {
        if let (Some(first), Some(last)) = (pending.first(), pending.last())
            && (run.from - last.from >= TOGETHER || run.from + run.len - first.from > AT_ONCE)
        {
            read += flush(file, at, &pending, &mut held, bytes)?;
            pending.clear();
        }
        pending.push(run);
    }
    Ok(read + flush(file, at, &pending, &mut held, bytes)?)
}

/// Bytes that one read of a tensor keeps from run to run.
#[derive(Default)]
struct ReadBuffers {
    scratch: Vec<u8>,
    block: Option<DigestBlock>,
}

/// Reads these runs with one call; returns the number of bytes read.
fn flush(
    file: &WeightFile,
    at: u64,
    runs: &[ByteRun],
    held: &mut ReadBuffers,
    bytes: &mut [u8],
) -> Result<u64> {
    let (Some(first), Some(last)) = (runs.first(), runs.last()) else { return Ok(0) };
    let (start, len) = (at + first.from as u64, last.from + last.len - first.from);
    if runs.len() == 1 {
        return file.read_at(start, &mut bytes[first.to..first.to + first.len], &mut held.block);
    }
    held.scratch.resize(len, 0);
    let read = file.read_at(start, &mut held.scratch, &mut held.block)?;
    for run in runs {
        let from = run.from - first.from;
        bytes[run.to..run.to + run.len].copy_from_slice(&held.scratch[from..from + run.len]);
    }
    Ok(read)
}
