//! Loops over the rows of a matrix, and reductions over one row.

use candle_core::WithDType;
use pulp::{Arch, NullaryFnOnce};
use std::mem::MaybeUninit;

use super::parallel;
use super::real::Real;

/// Elements that one block of rows reads, about the size of a core's L1 cache.
const BLOCK: usize = 8 * 1024;

/// The number of elements from which a kernel uses several threads.
pub(super) const PARALLEL: usize = 128 * 1024;

/// Runs `work(first_row, rows)` over blocks of the rows of `out` and returns the results of the blocks, in order.
///
/// A row of `out` has `width` elements and reads about `cost` input elements. The blocks do not depend on the number of
/// threads, so neither does a result summed over them. Each block runs with the processor's widest vectors; for that,
/// `work` and the functions that it calls must be inlined. Multiplications and additions are not fused, so the bits
/// stay the same.
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
    let run = |i: usize, block: &mut [T]| {
        let block = RowBlock { work: &work, first: i * rows, rows: block };
        arch.dispatch(block)
    };
    parallel::map(out.len() / width * cost >= PARALLEL, out.chunks_mut(rows * width), run)
}

/// Like [`by_blocks`] for a new vector of `len` zeros, which it also returns.
///
/// Each block is filled with zeros just before its work, in the core's cache and not in memory.
pub(super) fn new_by_blocks<T: WithDType, R: Send>(
    len: usize,
    width: usize,
    cost: usize,
    work: impl Fn(usize, &mut [T]) -> R + Sync,
) -> (Vec<T>, Vec<R>) {
    let mut out = Vec::with_capacity(len);
    let found = by_blocks(
        &mut out.spare_capacity_mut()[..len],
        width,
        cost,
        #[inline(always)]
        |first, rows| work(first, zeroed(rows)),
    );
    // SAFETY: the blocks are all of the first `len` elements, and each was written.
    unsafe { out.set_len(len) };
    (out, found)
}

/// Fills new memory with zeros.
#[inline(always)]
fn zeroed<T: WithDType>(memory: &mut [MaybeUninit<T>]) -> &mut [T] {
    memory.fill(MaybeUninit::new(T::zero()));
    // SAFETY: all elements were just written, and `MaybeUninit<T>` has the layout of `T`.
    unsafe { &mut *(std::ptr::from_mut(memory) as *mut [T]) }
}

/// Like [`new_by_blocks`] for two new vectors of `len` elements, which `work(first, a, b)` computes together.
pub(super) fn new_pair_by_blocks<T: Real>(
    len: usize,
    work: impl Fn(usize, &mut [T], &mut [T]) + Sync,
) -> [Vec<T>; 2] {
    let mut pair = [Vec::with_capacity(len), Vec::with_capacity(len)];
    let [a, b] = pair.each_mut().map(|made| made.spare_capacity_mut()[..len].chunks_mut(BLOCK));
    let mut blocks: Vec<_> = a.zip(b).collect();
    by_blocks(
        &mut blocks,
        1,
        BLOCK,
        #[inline(always)]
        |first, blocks| {
            for (i, (a, b)) in blocks.iter_mut().enumerate() {
                work((first + i) * BLOCK, zeroed(a), zeroed(b));
            }
        },
    );
    for made in &mut pair {
        // SAFETY: the blocks are all of the first `len` elements, and each was written.
        unsafe { made.set_len(len) };
    }
    pair
}

/// One call of the work of [`by_blocks`]; a closure in its place would not be inlined into the vectorized code.
struct RowBlock<'a, T, F> {
    work: &'a F,
    first: usize,
    rows: &'a mut [T],
}

impl<T, R, F: Fn(usize, &mut [T]) -> R> NullaryFnOnce for RowBlock<'_, T, F> {
    type Output = R;

    #[inline(always)]
    fn call(self) -> R {
        (self.work)(self.first, self.rows)
    }
}

/// Runs `work` with the processor's widest vectors; `work` and the functions that it calls must be inlined.
pub(super) fn vectorised<R>(work: impl FnOnce() -> R) -> R {
    Arch::new().dispatch(InlineCall(work))
}

struct InlineCall<F>(F);

impl<R, F: FnOnce() -> R> NullaryFnOnce for InlineCall<F> {
    type Output = R;

    #[inline(always)]
    fn call(self) -> R {
        (self.0)()
    }
}

/// Independent partial results of a reduction, enough to fill vector registers and hide the latency of an addition.
const LANES: usize = 16;

/// Reduces a row with several partial results, which all begin at `start` and are joined at the end.
#[inline(always)]
pub(super) fn reduce<T: Copy, A: Copy>(
    row: &[T],
    start: A,
    step: impl Fn(A, T) -> A,
    join: impl Fn(A, A) -> A,
) -> A {
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

/// Returns the sum of `f` over a row.
#[inline(always)]
pub(super) fn sum<T: Real>(row: &[T], f: impl Fn(T) -> T) -> T {
    reduce(row, T::zero(), |acc, v| acc + f(v), |a, b| a + b)
}

/// Returns the sum of `f` over the pairs of two rows.
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

/// Returns the largest element of a non-empty row; NaN is skipped.
#[inline(always)]
pub(super) fn max<T: Real>(row: &[T]) -> T {
    let larger = |a: T, b: T| if b > a { b } else { a };
    reduce(row, row[0], larger, larger)
}

/// Returns the smallest element of a non-empty row; NaN is skipped.
#[inline(always)]
pub(super) fn min<T: Real>(row: &[T]) -> T {
    let smaller = |a: T, b: T| if b < a { b } else { a };
    reduce(row, row[0], smaller, smaller)
}

/// Computes `total += part`, element by element.
#[inline(always)]
pub(super) fn add_assign<T: Real>(total: &mut [T], part: &[T]) {
    for (total, &part) in total.iter_mut().zip(part) {
        *total += part;
    }
}
