//! Products of few rows with a matrix, at the cost of one pass over the matrix in memory.
//!
//! All inputs use a row of the weight while it is in the cache. 16-bit weights are widened on the way, so they cost
//! half the memory traffic of the same weights in 32 bits; the products are summed in f32.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Layout, Result, bail};
use std::hint::black_box;

use super::element::Element;
use super::real::Real;
use super::rows::by_blocks;

/// The most input rows that are multiplied one by one, so that the bits of a row do not depend on their number.
const ALONE: usize = 4;

/// The most input rows of 16 bits: with more, blocks of the weight that are widened once are cheaper.
const FEW_HALVES: usize = ALONE;

/// The most input rows of 32 and 64 bits: with more, it is cheaper to pack blocks of the weight.
const FEW_FLOATS: usize = 32;

/// Rows of the weight that are read at once, each from its own part of the weight: the processor prefetches several
/// streams, and more data from several streams than from one.
pub(super) const STREAMS: usize = 4;

/// Concurrent sums of a row, two vectors of f32.
const LANES: usize = 16;

/// Concurrent sums of a row that several inputs share, whose sums are all in registers.
const SHARED_LANES: usize = 8;

/// Returns whether so many input rows of a dtype are few.
pub(super) fn are_few(m: usize, dtype: DType) -> bool {
    m <= if matches!(dtype, DType::F16 | DType::BF16) { FEW_HALVES } else { FEW_FLOATS }
}

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
                if m <= ALONE {
                    for (sums, x) in sums.chunks_exact_mut(STREAMS).zip(x.chunks_exact(k)) {
                        sums.copy_from_slice(&dots(x, rows));
                    }
                    continue;
                }
                let (two, last) = sums.split_at_mut(m / 2 * 2 * STREAMS);
                for (sums, x) in two.chunks_exact_mut(2 * STREAMS).zip(x.chunks_exact(2 * k)) {
                    let (a, b) = x.split_at(k);
                    sums.copy_from_slice(shared_dots([a, b], rows).as_flattened());
                }
                if !last.is_empty() {
                    last.copy_from_slice(shared_dots([&x[(m - 1) * k..]], rows).as_flattened());
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

/// Returns the products of several inputs with several rows, which are loaded once for all inputs. The bits of an input do not depend on the
/// others.
#[inline(always)]
fn shared_dots<T: Real, E: Element<Real = T>, const INPUTS: usize>(
    x: [&[T]; INPUTS],
    rows: [&[E]; STREAMS],
) -> [[T; STREAMS]; INPUTS] {
    let mut lanes = [[[T::zero(); SHARED_LANES]; STREAMS]; INPUTS];
    let [(a, _), (b, _), (c, _), (d, _)] = rows.map(|row| row.as_chunks::<SHARED_LANES>());
    let inputs = x.map(|x| &x.as_chunks::<SHARED_LANES>().0[..a.len()]);
    for (i, (((a, b), c), d)) in a.iter().zip(b).zip(c).zip(d).enumerate() {
        // In registers: with references the compiler would keep the sums in memory.
        let loaded = [*a, *b, *c, *d];
        for (lanes, x) in lanes.iter_mut().zip(&inputs) {
            let x = x[i];
            for (lanes, row) in lanes.iter_mut().zip(loaded) {
                for ((lane, x), w) in lanes.iter_mut().zip(x).zip(row) {
                    *lane += x * w.load();
                }
            }
        }
    }
    // As in `dots`.
    let lanes = black_box(lanes);
    let whole = a.len() * SHARED_LANES;
    std::array::from_fn(|input| {
        std::array::from_fn(|s| {
            let sum = lanes[input][s].iter().fold(T::zero(), |sum, &lane| sum + lane);
            let rest = x[input][whole..].iter().zip(&rows[s][whole..]);
            rest.fold(sum, |sum, (&x, &w)| sum + x * w.load())
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
    use candle_core::{DType, Tensor};

    use crate::linear;
    use crate::linear::composed;
    use crate::waves::waves;

    fn row(x: &Tensor, at: usize) -> Vec<f64> {
        x.get(at).unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
    }

    #[test]
    fn rows_of_any_number_have_the_same_products() {
        for dtype in [DType::F32, DType::F64] {
            // Parts of the weight that are not alike, and inputs that are no whole vectors.
            for (n, k) in [(7, 19), (16, 64), (3, 5)] {
                let weight = waves(&[n, k], dtype);
                let all = waves(&[34, k], dtype);
                let many = linear(&all.narrow(0, 0, 5).unwrap(), &weight, None).unwrap();
                for rows in [1, 4, 5, 6, 31, 32, 33, 34] {
                    let x = all.narrow(0, 0, rows).unwrap();
                    let got = linear(&x, &weight, None).unwrap();
                    let want = composed(&x, &weight, None).unwrap();
                    for at in 0..rows {
                        for (got, want) in row(&got, at).iter().zip(row(&want, at)) {
                            assert!((got - want).abs() < 1e-4, "{dtype:?} {rows} × {n} × {k}: {got}, {want}");
                        }
                        if (5..=32).contains(&rows) && at < 5 {
                            assert_eq!(row(&got, at), row(&many, at), "row {at} of {rows}");
                        }
                    }
                }
            }
        }
    }
}
