//! Attention of the queries of one key head over a block of its tokens, and what joins blocks.
use super::Scale;
use super::forward::log_sum;
use crate::element::Element;
use crate::real::Real;
use crate::rows::{max, min, sum};
use crate::{TensorReader, cpu};
use candle_core::{Result, bail};
use std::hint::black_box;
use std::ops::Range;

/// Queries that meet a row at once.
const QUERIES: usize = 4;

/// Keys that a query meets at once.
const ROWS: usize = 2;

/// Rows of values that are added up at once.
const MIXED: usize = 32;

/// Columns that are added up at once.
const LANES: usize = 16;

/// What follows the sums of a query: its largest score, and the sum of its weights.
pub(super) const NORMS: usize = 2;

/// The keys or the values of a text in memory.
#[derive(Clone, Copy)]
pub(super) struct CacheRows<'a, E> {
    elements: &'a [E],
    pub(super) tokens: usize,
    width: usize,
    /// From head to head, and from token to token.
    strides: [usize; 2],
}

impl<'a, E: Element> CacheRows<'a, E> {
    pub(super) fn of(x: &'a TensorReader<'_>) -> Result<Self> {
        let (&[_, _, tokens, width], &[_, of_head, of_token, _]) = (x.layout.dims(), x.layout.stride())
        else {
            bail!("decode_attn: expected four dims")
        };
        let elements = &E::cpu_storage_as_slice(cpu(&x.storage)?)?[x.layout.start_offset()..];
        Ok(Self { elements, tokens, width, strides: [of_head, of_token] })
    }

    /// Some tokens of one head.
    pub(super) fn part(self, head: usize, tokens: &Range<usize>) -> Self {
        let start = head * self.strides[0] + tokens.start * self.strides[1];
        let tokens = tokens.end.min(self.tokens) - tokens.start.min(self.tokens);
        Self { elements: &self.elements[start.min(self.elements.len())..], tokens, ..self }
    }

    #[inline(always)]
    fn row(&self, token: usize) -> &'a [E] {
        &self.elements[token * self.strides[1]..][..self.width]
    }
}

/// Attention of the queries of one key head over some tokens: for each query the weighted rows of the values, the largest score, and the sum of
/// the weights.
///
/// `scores` has room for each query and token. The bits of a query do not depend on the others.
#[inline(always)]
pub(super) fn attend<T: Real, E: Element<Real = T>>(
    queries: &[T],
    [keys, values]: [CacheRows<'_, E>; 2],
    scale: Scale,
    scores: &mut [T],
    sums: &mut [T],
) {
    let (tokens, dim, width) = (keys.tokens, keys.width, values.width);
    if tokens == 0 {
        return;
    }
    let several = scores.chunks_mut(QUERIES * tokens).zip(sums.chunks_mut(QUERIES * (width + NORMS)));
    for (i, (scores, sums)) in several.enumerate() {
        let queries = &queries[i * QUERIES * dim..];
        match scores.len() / tokens {
            1 => attend_at_once::<T, E, 1>(queries, [keys, values], scale, scores, sums),
            2 => attend_at_once::<T, E, 2>(queries, [keys, values], scale, scores, sums),
            3 => attend_at_once::<T, E, 3>(queries, [keys, values], scale, scores, sums),
            _ => attend_at_once::<T, E, QUERIES>(queries, [keys, values], scale, scores, sums),
        }
    }
}

/// [`attend`] of `N` queries.
#[inline(always)]
fn attend_at_once<T: Real, E: Element<Real = T>, const N: usize>(
    queries: &[T],
    [keys, values]: [CacheRows<'_, E>; 2],
    scale: Scale,
    scores: &mut [T],
    sums: &mut [T],
) {
    let (tokens, dim, width) = (keys.tokens, keys.width, values.width);
    for first in (0..tokens).step_by(ROWS) {
        // Where there are fewer keys, the surplus scores are not used.
        let rows = [keys.row(first), keys.row((first + 1).min(tokens - 1))];
        let made = dots::<T, E, N>(queries, rows, dim);
        for (scores, made) in scores.chunks_exact_mut(tokens).zip(&made) {
            for (score, &made) in scores[first..].iter_mut().zip(made) {
                *score = made;
            }
        }
    }
    for (scores, sums) in scores.chunks_exact_mut(tokens).zip(sums.chunks_exact_mut(width + NORMS)) {
        scale.cap_row(scores);
        (sums[width], sums[width + 1]) = soften(scores, scale.rest());
    }
    for first in (0..tokens).step_by(MIXED) {
        let here = MIXED.min(tokens - first);
        let mut weights = [[T::zero(); MIXED]; N];
        for (weights, scores) in weights.iter_mut().zip(scores.chunks_exact(tokens)) {
            weights[..here].copy_from_slice(&scores[first..][..here]);
        }
        mix(&weights, &values, first..first + here, sums);
    }
}

/// The products of some queries and keys. The compiler keeps vectors only where it sees plain loops.
#[inline(always)]
fn dots<T: Real, E: Element<Real = T>, const N: usize>(
    queries: &[T],
    rows: [&[E]; ROWS],
    dim: usize,
) -> [[T; ROWS]; N] {
    let mut lanes = [[[T::zero(); LANES]; ROWS]; N];
    let whole = dim - dim % LANES;
    for at in (0..whole).step_by(LANES) {
        let mut wide = [[T::zero(); LANES]; ROWS];
        for (wide, row) in wide.iter_mut().zip(rows) {
            for (wide, value) in wide.iter_mut().zip(&row[at..][..LANES]) {
                *wide = value.load();
            }
        }
        for (i, lanes) in lanes.iter_mut().enumerate() {
            let query = &queries[i * dim + at..][..LANES];
            for (lanes, wide) in lanes.iter_mut().zip(&wide) {
                for ((lane, &x), &value) in lanes.iter_mut().zip(query).zip(wide) {
                    *lane += x * value;
                }
            }
        }
    }
    // If the compiler saw these sums together with the loop, it would keep lanes in pairs instead of whole vectors.
    let lanes = black_box(lanes);
    let mut made = [[T::zero(); ROWS]; N];
    for (i, (made, lanes)) in made.iter_mut().zip(&lanes).enumerate() {
        for ((made, lanes), row) in made.iter_mut().zip(lanes).zip(rows) {
            let mut quarters = [T::zero(); 4];
            for (lane, quarter) in quarters.iter_mut().enumerate() {
                *quarter = (lanes[lane] + lanes[lane + 4]) + (lanes[lane + 8] + lanes[lane + 12]);
            }
            *made = (quarters[0] + quarters[1]) + (quarters[2] + quarters[3]);
            for (&x, value) in queries[i * dim..][whole..dim].iter().zip(&row[whole..]) {
                *made += x * value.load();
            }
        }
    }
    made
}

/// Replaces scores by weights, `e` to the power of their distance from the largest one, and returns that one and the sum of the weights.
#[inline(always)]
fn soften<T: Real>(row: &mut [T], scale: T) -> (T, T) {
    let top = if scale < T::zero() { min(row) } else { max(row) };
    // Others may be larger, where all scores of these tokens are -∞.
    let from = if top * scale == T::from_f64(f64::NEG_INFINITY) { T::zero() } else { top };
    for v in row.iter_mut() {
        *v = ((*v - from) * scale).exp_neg(T::zero());
    }
    (top, sum(row, |v| v))
}

/// Adds the weighted rows of some tokens to the sums of each query, in their order.
#[inline(always)]
fn mix<T: Real, E: Element<Real = T>, const N: usize>(
    weights: &[[T; MIXED]; N],
    values: &CacheRows<'_, E>,
    tokens: Range<usize>,
    sums: &mut [T],
) {
    let (first, here, width) = (tokens.start, tokens.len(), values.width);
    let whole = width - width % LANES;
    for at in (0..whole).step_by(LANES) {
        let mut made = [[T::zero(); LANES]; N];
        for (i, made) in made.iter_mut().enumerate() {
            made.copy_from_slice(&sums[i * (width + NORMS) + at..][..LANES]);
        }
        for token in 0..here.min(MIXED) {
            let row = &values.elements[(first + token) * values.strides[1] + at..][..LANES];
            let mut wide = [T::zero(); LANES];
            for (wide, value) in wide.iter_mut().zip(row) {
                *wide = value.load();
            }
            for (made, weights) in made.iter_mut().zip(weights) {
                for (made, value) in made.iter_mut().zip(wide) {
                    *made += weights[token] * value;
                }
            }
        }
        for (i, made) in made.iter().enumerate() {
            sums[i * (width + NORMS) + at..][..LANES].copy_from_slice(made);
        }
    }
    for token in 0..here {
        let row = &values.row(first + token)[whole..];
        for (sums, weights) in sums.chunks_exact_mut(width + NORMS).zip(weights) {
            for (sum, value) in sums[whole..width].iter_mut().zip(row) {
                *sum += weights[token] * value.load();
            }
        }
    }
}

/// Joins what the blocks of a key head's tokens made of a query.
pub(super) fn join<T: Real>(blocks: &[&[T]], query: usize, scale: T, width: usize, out: &mut [T]) {
    let of_query =
        || blocks.iter().map(|block| block[query * (width + NORMS)..][..width + NORMS].split_at(width));
    let larger = |a: T, b: T| if b * scale > a * scale { b } else { a };
    let top = of_query().map(|(_, norms)| norms[0]).reduce(larger).unwrap_or(T::zero());
    let (out, logarithm) = out.split_at_mut(width);
    let mut total = T::zero();
    for (mixed, norms) in of_query() {
        let share = ((norms[0] - top) * scale).exp_neg(T::zero());
        total += norms[1] * share;
        for (out, &mixed) in out.iter_mut().zip(mixed) {
            *out += mixed * share;
        }
    }
    let norm = T::one() / total;
    out.iter_mut().for_each(|out| *out *= norm);
    logarithm.iter_mut().for_each(|logarithm| *logarithm = log_sum((top, total), scale));
}
