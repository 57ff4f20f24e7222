//! Elementwise reductions over the ranks' buffers, in rank order.
use super::element::{ReduceElement, with_element};
use super::guards::Guards;
use super::overwrite::{HostWrite, write_host};
use super::runs::{DimPiece, TensorRuns};
#[cfg(feature = "mpi")]
use super::sink::UninitSink;
use super::sink::{Sink, SliceSink};
use super::storage::StorageOperand;
use crate::call::ReduceOp;
use crate::{Error, Result};
use candle_core::{CpuStorage, Tensor, WithDType};
use smallvec::SmallVec;
#[cfg(feature = "mpi")]
use std::mem::MaybeUninit;

/// The number of elements that are reduced at a time, so that the accumulator stays in the L1 cache.
const BLOCK: usize = 2048;

/// Returns the reduction of all tensors, or of the same `piece` of each, as one new contiguous buffer.
pub(super) fn reduce(
    tensors: &[StorageOperand<'_>],
    op: ReduceOp,
    piece: Option<DimPiece>,
) -> Result<CpuStorage> {
    with_element!(tensors[0].dtype(), T => {
        let len = piece.map_or(tensors[0].elem_count(), |piece| piece.count(&tensors[0]));
        let mut out: Vec<T> = Vec::with_capacity(len);
        reduce_to(tensors, op, piece, &mut out)?;
        Ok(T::to_cpu_storage_owned(out))
    })
}

/// Like [`reduce`], but writes the result to the memory of `output`.
pub(super) fn reduce_into(
    output: &Tensor,
    tensors: &[StorageOperand<'_>],
    op: ReduceOp,
    piece: Option<DimPiece>,
) -> Result<()> {
    struct Reduction<'a>(&'a [StorageOperand<'a>], ReduceOp, Option<DimPiece>);
    impl HostWrite for Reduction<'_> {
        fn write<T: ReduceElement>(&self, to: &mut [T]) -> Result<()> {
            reduce_to(self.0, self.1, self.2, &mut SliceSink(to))
        }
    }
    write_host(output, &Reduction(tensors, op, piece))
}

fn reduce_to<T: ReduceElement>(
    tensors: &[StorageOperand<'_>],
    op: ReduceOp,
    piece: Option<DimPiece>,
    out: &mut impl Sink<T>,
) -> Result<()> {
    let guards = Guards::new(tensors);
    let sources = tensors.iter().zip(guards.iter()).map(|(t, g)| TensorRuns::<T>::new(t, g, piece));
    let sources = sources.collect::<Result<SmallVec<[TensorRuns<'_, T>; 8]>>>()?;
    check::<T>(op)?;
    reduce_runs(&sources, op, out);
    Ok(())
}

/// Refuses ops that the elements do not have.
fn check<T: ReduceElement>(op: ReduceOp) -> Result<()> {
    if T::IS_INT && op.is_fractional() || T::IS_FLOAT && op.is_bitwise() {
        return Err(Error::Unsupported(format!("{op} of {} tensors", T::DTYPE.as_str())));
    }
    Ok(())
}

/// Reduces slices of equal length, in their order, and writes every element of `out`, which has the same length.
///
/// # Errors
/// If the elements do not have the op. Then nothing is written.
#[cfg(feature = "mpi")]
pub(super) fn reduce_slices<T: ReduceElement>(
    sources: &[&[T]],
    op: ReduceOp,
    out: &mut [MaybeUninit<T>],
) -> Result<()> {
    check::<T>(op)?;
    let runs: Vec<TensorRuns<'_, T>> = sources.iter().map(|data| TensorRuns::flat(data)).collect();
    assert_eq!(out.len(), runs[0].total, "the result has as many elements as each source");
    let mut rest = UninitSink(out);
    reduce_runs(&runs, op, &mut rest);
    assert!(rest.0.is_empty(), "every element is written");
    Ok(())
}

/// Reduces elements that have the op; see [`check`]. A condition, which must be a bare constant, keeps the op from being
/// compiled for other elements.
fn reduce_runs<T: ReduceElement>(sources: &[TensorRuns<'_, T>], op: ReduceOp, out: &mut impl Sink<T>) {
    match op {
        ReduceOp::Sum => fold(sources, out, T::widen, |a, b| a + b, |a| a),
        ReduceOp::Product => fold(sources, out, T::widen, |a, b| a * b, |a| a),
        ReduceOp::Min => {
            fold(sources, out, T::widen, |a, b| if (b < a) | T::is_nan(b) { b } else { a }, |a| a);
        }
        ReduceOp::Max => {
            fold(sources, out, T::widen, |a, b| if (b > a) | T::is_nan(b) { b } else { a }, |a| a);
        }
        ReduceOp::Avg => {
            if T::IS_FLOAT {
                let n = sources.len();
                fold(sources, out, T::widen, |a, b| a + b, |a| T::divide(a, n));
            }
        }
        ReduceOp::PreMulSum(factor) => {
            if T::IS_FLOAT {
                let by = factor.value();
                fold(sources, out, |x: T| T::scale(x.widen(), by), |a, b| a + b, |a| a);
            }
        }
        ReduceOp::And => {
            if T::IS_INT {
                fold(sources, out, T::widen, |a, b| T::bits(ReduceOp::And, a, b), |a| a);
            }
        }
        ReduceOp::Or => {
            if T::IS_INT {
                fold(sources, out, T::widen, |a, b| T::bits(ReduceOp::Or, a, b), |a| a);
            }
        }
        ReduceOp::Xor => {
            if T::IS_INT {
                fold(sources, out, T::widen, |a, b| T::bits(ReduceOp::Xor, a, b), |a| a);
            }
        }
    }
}

/// Combines the sources block by block. Each source is read once, and the accumulator stays in the cache.
fn fold<T: ReduceElement>(
    sources: &[TensorRuns<'_, T>],
    out: &mut impl Sink<T>,
    widen: impl Fn(T) -> T::Acc,
    combine: impl Fn(T::Acc, T::Acc) -> T::Acc,
    finish: impl Fn(T::Acc) -> T::Acc,
) {
    let (total, run) = (sources[0].total, sources[0].run);
    let Some((last, front)) = sources.split_last().filter(|_| total > 0) else { return };
    let mut acc: Vec<T::Acc> = Vec::new();
    for start in (0..total).step_by(run) {
        for at in (start..start + run).step_by(BLOCK) {
            let len = BLOCK.min(start + run - at);
            acc.clear();
            match front {
                // A single pass for worlds of two ranks, which are the most common.
                [first] => {
                    let pairs = first.slice(at, len).iter().zip(last.slice(at, len));
                    out.put(pairs.map(|(&a, &b)| T::narrow(finish(combine(widen(a), widen(b))))));
                    continue;
                }
                [] => acc.extend(last.slice(at, len).iter().map(|&a| widen(a))),
                [first, middle @ ..] => {
                    acc.extend(first.slice(at, len).iter().map(|&a| widen(a)));
                    for source in middle.iter().chain([last]) {
                        for (a, &b) in acc.iter_mut().zip(source.slice(at, len)) {
                            *a = combine(*a, widen(b));
                        }
                    }
                }
            }
            out.put(acc.iter().map(|&a| T::narrow(finish(a))));
        }
    }
}
