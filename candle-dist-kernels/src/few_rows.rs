//! Products of few rows with a matrix, at the cost of one pass over the matrix in memory.
//!
//! All inputs use a row of the weight while it is in the cache. 16-bit weights are widened on the way, so they cost
//! half the memory traffic of the same weights in 32 bits; the products are summed in f32.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Layout, Result, bail};
use std::hint::black_box;

use super::element::Element;
use super::parallel;
use super::real::Real;
use super::rows::{PARALLEL, by_blocks};

/// The most input rows of training: a step's numbers then depend on its microbatches only where they are that small.
const FEW: usize = 4;

/// The most input rows otherwise: with more, blocks of the weight that are used several times are cheaper.
const MANY: usize = 32;

/// The most elements of more input rows than [`FEW`]: they stay in the core's cache.
const CACHED: usize = 1 << 18;

/// Input rows that are multiplied at once.
const PAIR: usize = 2;

/// Returns whether `m` input rows of `k` elements are few, in a product that is a part of a gradient's graph or not.
pub(super) fn is_few(m: usize, k: usize, is_tracked: bool) -> bool {
    m <= FEW || !is_tracked && m <= MANY && m * k <= CACHED
}

/// Rows of the weight that are read at once, each from its own part of the weight: the processor prefetches several
/// streams, and more data from several streams than from one.
pub(super) const STREAMS: usize = 4;

/// Concurrent sums of a row, two vectors of f32.
const LANES: usize = 16;

/// Returns whether each row of a weight with this layout is contiguous.
pub(super) fn has_rows(weight: &Layout) -> bool {
    matches!((weight.dims(), weight.stride()), ([_, k], [row, 1]) if row >= k)
}

/// Computes `x · weightᵀ` for `x` `[m, k]` and `weight` `[n, k]`, whose rows are contiguous; returns `[m, n]` elements
/// of the compute type.
pub(super) fn product<T: Real, E: Element<Real = T>>(
    m: usize,
    x: &[T],
    weight: &[E],
    layout: &Layout,
) -> Result<Vec<T>> {
    let (n, k) = layout.shape().dims2()?;
    let (start, stride) = (layout.start_offset(), layout.stride()[0]);
    if m * n * k == 0 {
        return Ok(vec![T::zero(); m * n]);
    }
    let part = n.div_ceil(STREAMS);
    if m <= FEW && part * STREAMS * k >= PARALLEL {
        parallel::keep_awake();
    }
    let mut sums = vec![T::zero(); part * STREAMS * m];
    by_blocks(
        &mut sums,
        STREAMS * m,
        STREAMS * k,
        #[inline(always)]
        |first, sums| {
            for (j, sums) in sums.chunks_exact_mut(STREAMS * m).enumerate() {
                // Where the last part is short, its surplus sums are not used.
                let row = |s: usize| &weight[start + (first + j + s * part).min(n - 1) * stride..][..k];
                let rows = [row(0), row(1), row(2), row(3)];
                let paired = m - m % PAIR;
                let (pairs, single) = sums.split_at_mut(paired * STREAMS);
                let (x_pairs, x_single) = x.split_at(paired * k);
                for (sums, x) in pairs.chunks_exact_mut(PAIR * STREAMS).zip(x_pairs.chunks_exact(PAIR * k)) {
                    let (a, b) = x.split_at(k);
                    sums.copy_from_slice(dots([a, b], rows).as_flattened());
                }
                for (sums, x) in single.chunks_exact_mut(STREAMS).zip(x_single.chunks_exact(k)) {
                    sums.copy_from_slice(dots([x], rows).as_flattened());
                }
            }
        },
    );
    let at = |i: usize, j: usize| sums[((j % part) * m + i) * STREAMS + j / part];
    Ok((0..m).flat_map(|i| (0..n).map(move |j| (i, j))).map(|(i, j)| at(i, j)).collect())
}

/// Returns the products of each of `xs` with several rows. The bits do not depend on how many are multiplied at once.
#[inline(always)]
pub(super) fn dots<T: Real, E: Element<Real = T>, const M: usize>(
    xs: [&[T]; M],
    rows: [&[E]; STREAMS],
) -> [[T; STREAMS]; M] {
    let mut lanes = [[[T::zero(); LANES]; STREAMS]; M];
    let [(a, _), (b, _), (c, _), (d, _)] = rows.map(|row| row.as_chunks::<LANES>());
    let blocks = xs.map(|x| x.as_chunks::<LANES>().0);
    let count = a.len();
    let blocks = blocks.map(|x| &x[..count]);
    for (i, (((a, b), c), d)) in a.iter().zip(b).zip(c).zip(d).enumerate() {
        for (s, row) in [a, b, c, d].into_iter().enumerate() {
            let row = row.map(|w| w.load());
            for (lanes, x) in lanes.iter_mut().zip(&blocks) {
                for ((lane, &x), w) in lanes[s].iter_mut().zip(&x[i]).zip(row) {
                    *lane += x * w;
                }
            }
        }
    }
    // If the compiler saw these sums together with the loop, it would keep lanes in pairs instead of whole vectors.
    let lanes = black_box(lanes);
    let whole = count * LANES;
    std::array::from_fn(|m| {
        std::array::from_fn(|s| {
            let sum = lanes[m][s].iter().fold(T::zero(), |sum, &lane| sum + lane);
            xs[m][whole..].iter().zip(&rows[s][whole..]).fold(sum, |sum, (&x, &w)| sum + x * w.load())
        })
    })
}

/// Computes the product of an f32 input and a weight of 32 or 16 bits, in f32.
pub(super) fn widening(m: usize, x: &[f32], weight: &CpuStorage, layout: &Layout) -> Result<Vec<f32>> {
    match weight {
        CpuStorage::F32(weight) => product(m, x, weight, layout),
        CpuStorage::BF16(weight) => product(m, x, weight, layout),
        CpuStorage::F16(weight) => product(m, x, weight, layout),
        other => bail!("linear: a weight of {} is not widened", other.dtype().as_str()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::{CACHED, FEW, MANY, is_few};
    use crate::{linear, waves::waves};
    use candle_core::{DType, Tensor};

    #[test]
    fn a_row_has_the_same_bits_alone_and_among_others() {
        for dtype in [DType::F32, DType::BF16, DType::F64] {
            for (n, k) in [(13, 1), (5, 15), (8, 64), (30, 577)] {
                let weight = waves(&[n, k], dtype).detach();
                let x = waves(&[MANY, k], dtype).detach();
                let bits = |x: &Tensor| {
                    linear(x, &weight, None).unwrap().to_dtype(DType::F64).unwrap().to_vec2::<f64>().unwrap()
                };
                let alone: Vec<_> = (0..MANY).flat_map(|i| bits(&x.narrow(0, i, 1).unwrap())).collect();
                for m in [2, 3, FEW, FEW + 1, 31, MANY] {
                    assert_eq!(bits(&x.narrow(0, 0, m).unwrap()), alone[..m], "{m} rows, {n}x{k}, {dtype:?}");
                }
            }
        }
    }

    #[test]
    fn steps_of_training_multiply_few_rows_apart_only_up_to_four() {
        assert!(is_few(FEW, 1 << 20, true) && !is_few(FEW + 1, 8, true));
        assert!(is_few(MANY, CACHED / MANY, false) && !is_few(MANY, CACHED / MANY + 1, false));
        // The same numbers as products of panels, in both cases.
        let (x, weight) = (waves(&[8, 64], DType::F64).detach(), waves(&[6, 64], DType::F64));
        let [apart, panels] = [&weight.detach(), &*weight].map(|weight| linear(&x, weight, None).unwrap());
        let off = (apart - panels).unwrap().abs().unwrap().max_all().unwrap();
        assert!(off.to_scalar::<f64>().unwrap() < 1e-12);
    }
}
