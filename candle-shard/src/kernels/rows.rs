//! Loops over the rows of a matrix, and reductions over one row.

use candle_core::utils::{get_num_threads, with_threadpool};
use pulp::{Arch, NullaryFnOnce};
use rayon::prelude::*;
use std::hint::black_box;

use super::real::Real;

/// Elements that one block of rows reads, about the size of a core's first cache.
const BLOCK: usize = 8 * 1024;

/// Elements from which a kernel is worth more than one thread.
const PARALLEL: usize = 128 * 1024;

/// Runs `work(first_row, rows)` over blocks of the rows of `out` and returns what each block gave, in order.
///
/// A row of `out` has `width` elements and stands for `cost` elements of input. The blocks do not depend on the number
/// of threads, so neither does a result summed over them. Each block runs with the widest vectors the processor has;
/// `work` and what it calls must be inlined for that, and since nothing is contracted the bits stay the same.
pub(super) fn by_blocks<T: Send, R: Send>(
    out: &mut [T],
    width: usize,
    cost: usize,
    work: impl Fn(usize, &mut [T]) -> R + Sync,
) -> Vec<R> {
    if out.is_empty() {
        return Vec::new();
    }
    let arch = Arch::new();
    let rows = (BLOCK / cost.max(1)).max(1);
    let run = |(i, block): (usize, &mut [T])| {
        let block = Block { work: &work, first: i * rows, rows: block };
        arch.dispatch(block)
    };
    if out.len() / width * cost >= PARALLEL && get_num_threads() > 1 {
        with_threadpool(|| out.par_chunks_mut(rows * width).enumerate().map(run).collect())
    } else {
        out.chunks_mut(rows * width).enumerate().map(run).collect()
    }
}

/// One call of the work of [`by_blocks`]; a closure in its place would not be inlined into the vectorised code.
struct Block<'a, T, F> {
    work: &'a F,
    first: usize,
    rows: &'a mut [T],
}

impl<T, R, F: Fn(usize, &mut [T]) -> R> NullaryFnOnce for Block<'_, T, F> {
    type Output = R;

    #[inline(always)]
    fn call(self) -> R {
        (self.work)(self.first, self.rows)
    }
}

/// Runs `work` with the widest vectors the processor has; it must be marked to be inlined, with all that it calls.
pub(super) fn vectorised<R>(work: impl FnOnce() -> R) -> R {
    Arch::new().dispatch(Inlined(work))
}

struct Inlined<F>(F);

impl<R, F: FnOnce() -> R> NullaryFnOnce for Inlined<F> {
    type Output = R;

    #[inline(always)]
    fn call(self) -> R {
        (self.0)()
    }
}

/// Rows to [`touch`] before the first of them is used: more would push each other out of the first cache.
pub(super) const BURST: usize = 16;

/// Brings rows of a large table into the cache, one read a line.
///
/// Reads that nothing depends on are on their way together, where those of a computation would wait in turn.
#[inline(always)]
pub(super) fn touch<T: Copy>(table: &[T], rows: impl Iterator<Item = usize>, width: usize) {
    let line = 64 / size_of::<T>();
    for row in rows {
        table[row * width..][..width].iter().step_by(line).for_each(|x| _ = black_box(*x));
    }
}

/// Independent partial results of a reduction, enough to fill vector registers and hide the latency of an addition.
const LANES: usize = 16;

/// A row taken in by several partial results, which all begin at `start` and are joined at the end.
#[inline(always)]
pub(super) fn reduce<T: Copy, A: Copy>(row: &[T], start: A, step: impl Fn(A, T) -> A, join: impl Fn(A, A) -> A) -> A {
    let mut lanes = [start; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &v) in lanes.iter_mut().zip(chunk) {
            *lane = step(*lane, v);
        }
    }
    let rest = rest.iter().fold(start, |acc, &v| step(acc, v));
    join(halve(lanes, &join), rest)
}

#[inline(always)]
fn halve<A: Copy>(mut lanes: [A; LANES], join: impl Fn(A, A) -> A) -> A {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] = join(lanes[i], lanes[i + half]);
        }
        half /= 2;
    }
    lanes[0]
}

/// The sum of `f` over a row.
#[inline(always)]
pub(super) fn sum<T: Real>(row: &[T], f: impl Fn(T) -> T) -> T {
    reduce(row, T::zero(), |acc, v| acc + f(v), |a, b| a + b)
}

/// The sum of `f` over the pairs of two rows.
#[inline(always)]
pub(super) fn sum_zip<T: Real>(a: &[T], b: &[T], f: impl Fn(T, T) -> T) -> T {
    let mut lanes = [T::zero(); LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for ((lane, &a), &b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += f(a, b);
        }
    }
    let rest = a_rest.iter().zip(b_rest).fold(T::zero(), |acc, (&a, &b)| acc + f(a, b));
    halve(lanes, |a, b| a + b) + rest
}

/// The largest element of a row that is not empty; NaN is skipped.
#[inline(always)]
pub(super) fn max<T: Real>(row: &[T]) -> T {
    let larger = |a: T, b: T| if b > a { b } else { a };
    reduce(row, row[0], larger, larger)
}

/// The smallest element of a row that is not empty; NaN is skipped.
#[inline(always)]
pub(super) fn min<T: Real>(row: &[T]) -> T {
    let smaller = |a: T, b: T| if b < a { b } else { a };
    reduce(row, row[0], smaller, smaller)
}

/// `total += part`, element by element.
#[inline(always)]
pub(super) fn add_assign<T: Real>(total: &mut [T], part: &[T]) {
    for (total, &part) in total.iter_mut().zip(part) {
        *total += part;
    }
}
