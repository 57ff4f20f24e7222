//! Products of few rows with a matrix, at the cost of one pass over the matrix in memory.
//!
//! All inputs use a row of the weight while it is in the cache. 16-bit weights are widened on the way, so they cost
//! half the memory traffic of the same weights in 32 bits; the products are summed in f32.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Layout, Result, bail};
use std::hint::black_box;

use super::element::Element;
use super::real::Real;
use super::rows::by_blocks;

/// The most input rows: with more, blocks of the weight that are used several times are cheaper.
pub(super) const FEW: usize = 4;

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
                for (sums, x) in sums.chunks_exact_mut(STREAMS).zip(x.chunks_exact(k)) {
                    sums.copy_from_slice(&dots(x, rows));
                }
            }
        },
    );
    let at = |i: usize, j: usize| sums[((j % part) * m + i) * STREAMS + j / part];
    Ok((0..m).flat_map(|i| (0..n).map(move |j| (i, j))).map(|(i, j)| at(i, j)).collect())
}

/// Returns the products of `x` with several rows.
#[inline(always)]
pub(super) fn dots<T: Real, E: Element<Real = T>>(x: &[T], rows: [&[E]; STREAMS]) -> [T; STREAMS] {
    let mut lanes = [[T::zero(); LANES]; STREAMS];
    let [(a, _), (b, _), (c, _), (d, _)] = rows.map(|row| row.as_chunks::<LANES>());
    let (xs, rest) = x.as_chunks::<LANES>();
    for ((((x, a), b), c), d) in xs.iter().zip(a).zip(b).zip(c).zip(d) {
        for (lanes, row) in lanes.iter_mut().zip([a, b, c, d]) {
            for ((lane, &x), &w) in lanes.iter_mut().zip(x).zip(row) {
                *lane += x * w.load();
            }
        }
    }
    // If the compiler saw these sums together with the loop, it would keep lanes in pairs instead of whole vectors.
    let lanes = black_box(lanes);
    let whole = xs.len() * LANES;
    std::array::from_fn(|s| {
        let sum = lanes[s].iter().fold(T::zero(), |sum, &lane| sum + lane);
        rest.iter().zip(&rows[s][whole..]).fold(sum, |sum, (&x, &w)| sum + x * w.load())
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
