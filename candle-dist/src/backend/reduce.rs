//! Elementwise reductions over the ranks' buffers, in rank order.
use super::guards::Guards;
use super::regions::{Piece, Runs, with_element};
use crate::Result;
use crate::backend::ReduceOp;
use candle_core::{CpuStorage, Tensor, WithDType};
use half::{bf16, f16};
use std::mem::MaybeUninit;

/// Elements reduced at a time, so that the accumulator stays in the first-level cache.
const BLOCK: usize = 2048;

/// An element type with the wider type that its sums and products accumulate in.
pub(super) trait Element: WithDType {
    type Acc: Copy + PartialOrd + std::ops::Add<Output = Self::Acc> + std::ops::Mul<Output = Self::Acc>;
    fn widen(self) -> Self::Acc;
    fn narrow(acc: Self::Acc) -> Self;
    fn divide(acc: Self::Acc, by: usize) -> Self::Acc;
    fn is_nan(acc: Self::Acc) -> bool;
}

macro_rules! element {
    (float $t:ty, $acc:ty, $widen:expr, $narrow:expr) => {
        impl Element for $t {
            type Acc = $acc;
            fn widen(self) -> $acc {
                $widen(self)
            }
            fn narrow(acc: $acc) -> Self {
                $narrow(acc)
            }
            fn divide(acc: $acc, by: usize) -> $acc {
                acc / by as $acc
            }
            fn is_nan(acc: $acc) -> bool {
                acc.is_nan()
            }
        }
    };
    (int $t:ty) => {
        impl Element for $t {
            type Acc = std::num::Wrapping<$t>;
            fn widen(self) -> Self::Acc {
                std::num::Wrapping(self)
            }
            fn narrow(acc: Self::Acc) -> Self {
                acc.0
            }
            fn divide(acc: Self::Acc, _: usize) -> Self::Acc {
                acc
            }
            fn is_nan(_: Self::Acc) -> bool {
                false
            }
        }
    };
}
element!(float f32, f32, |x| x, |x| x);
element!(float f64, f64, |x| x, |x| x);
element!(float f16, f32, f16::to_f32, f16::from_f32);
element!(float bf16, f32, bf16::to_f32, bf16::from_f32);
element!(int u8);
element!(int u32);
element!(int i64);

/// The reduction of all tensors, or of the same `piece` of each, as one fresh contiguous buffer.
pub(super) fn reduce(tensors: &[&Tensor], op: ReduceOp, piece: Option<Piece>) -> Result<CpuStorage> {
    with_element!(tensors[0].dtype(), T => Ok(T::to_cpu_storage_owned(reduce_as::<T>(tensors, op, piece)?)))
}

fn reduce_as<T: Element>(tensors: &[&Tensor], op: ReduceOp, piece: Option<Piece>) -> Result<Vec<T>> {
    let guards = Guards::new(tensors);
    let sources =
        tensors.iter().zip(guards.iter()).map(|(t, g)| Runs::<T>::new(t, g, piece)).collect::<Result<Vec<_>>>()?;
    let total = sources[0].total;
    let mut out: Vec<T> = Vec::with_capacity(total);
    reduce_runs(&sources, op, &mut out.spare_capacity_mut()[..total]);
    // SAFETY: `reduce_runs` writes every element of what it is given.
    unsafe { out.set_len(total) };
    Ok(out)
}

/// The reduction of slices of equal length, in their order, written to every element of `out`, which is as long.
#[cfg(feature = "mpi")]
pub(super) fn reduce_slices<T: Element>(sources: &[&[T]], op: ReduceOp, out: &mut [MaybeUninit<T>]) {
    let runs: Vec<Runs<'_, T>> = sources.iter().map(|data| Runs::flat(data)).collect();
    reduce_runs(&runs, op, out);
}

fn reduce_runs<T: Element>(sources: &[Runs<'_, T>], op: ReduceOp, out: &mut [MaybeUninit<T>]) {
    match op {
        ReduceOp::Sum => fold(sources, out, |a, b| a + b, |a| a),
        ReduceOp::Avg => {
            let n = sources.len();
            fold(sources, out, |a, b| a + b, |a| T::divide(a, n));
        }
        ReduceOp::Product => fold(sources, out, |a, b| a * b, |a| a),
        ReduceOp::Min => fold(sources, out, |a, b| if (b < a) | T::is_nan(b) { b } else { a }, |a| a),
        ReduceOp::Max => fold(sources, out, |a, b| if (b > a) | T::is_nan(b) { b } else { a }, |a| a),
    }
}

/// Combines the sources block by block: each is read once, the accumulator never leaves the cache.
fn fold<T: Element>(
    sources: &[Runs<'_, T>],
    out: &mut [MaybeUninit<T>],
    combine: impl Fn(T::Acc, T::Acc) -> T::Acc,
    finish: impl Fn(T::Acc) -> T::Acc,
) {
    let (total, run) = (sources[0].total, sources[0].run);
    assert_eq!(out.len(), total, "the result has as many elements as each source");
    let Some((last, front)) = sources.split_last().filter(|_| total > 0) else { return };
    let mut acc: Vec<T::Acc> = Vec::with_capacity(BLOCK.min(run));
    for start in (0..total).step_by(run) {
        for at in (start..start + run).step_by(BLOCK) {
            let len = BLOCK.min(start + run - at);
            let out = &mut out[at..at + len];
            acc.clear();
            match front {
                // One pass for the commonest world.
                [first] => {
                    let pairs = first.slice(at, len).iter().zip(last.slice(at, len));
                    for (to, (&a, &b)) in out.iter_mut().zip(pairs) {
                        to.write(T::narrow(finish(combine(a.widen(), b.widen()))));
                    }
                    continue;
                }
                [] => acc.extend(last.slice(at, len).iter().map(|&a| a.widen())),
                [first, middle @ ..] => {
                    acc.extend(first.slice(at, len).iter().map(|&a| a.widen()));
                    for source in middle.iter().chain([last]) {
                        for (a, &b) in acc.iter_mut().zip(source.slice(at, len)) {
                            *a = combine(*a, b.widen());
                        }
                    }
                }
            }
            for (to, &a) in out.iter_mut().zip(&acc) {
                to.write(T::narrow(finish(a)));
            }
        }
    }
}
