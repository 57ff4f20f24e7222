//! Attention over a block of keys, and results over several blocks joined.
use super::Scale;
use super::heads::{AttentionSizes, into_head, queries_at_once};
use super::visible::{Visible, union};
use crate::{
    TensorReader,
    product::product,
    real::Real,
    rows::{by_blocks, max, min, sum},
};
use candle_core::{Layout, Result, Tensor, bail};
use std::ops::Range;

/// What the softmax of each row divided by: the largest score (before scaling, if there is no cap), and the sum of the exponentials relative
/// to it. The sum is 0 for a row without a visible key.
///
/// Their logarithm alone would lose the small differences of large scores.
#[derive(Debug, Clone, Default)]
pub struct SoftmaxNorms<T> {
    pub(super) top: Vec<T>,
    pub(super) sum: Vec<T>,
}

/// The result of attention over some of the keys: rows `[batch, q, heads, width]`, with the norms of each.
#[derive(Debug, Clone)]
pub struct Partial<T> {
    /// The rows.
    pub out: Vec<T>,
    /// The norms of the rows.
    pub norms: SoftmaxNorms<T>,
    width: usize,
}

impl<T: Real> Partial<T> {
    /// The result over no keys.
    pub(super) fn nothing(sizes: &AttentionSizes) -> Self {
        let zeros = |len: usize| vec![T::zero(); len];
        let norms = SoftmaxNorms { top: zeros(sizes.rows()), sum: zeros(sizes.rows()) };
        Self { out: zeros(sizes.rows() * sizes.width), norms, width: sizes.width }
    }

    /// The result over keys `[batch, k, kv_heads, dim]` of the compute dtype.
    pub(super) fn over([q, k, v]: [&Tensor; 3], scale: Scale, visible: &Visible) -> Result<Self> {
        let [q, k, v] = [q, k, v].map(TensorReader::new);
        let Some(sizes) = AttentionSizes::of(q.layout.dims(), k.layout.dims(), v.layout.dims()) else {
            bail!("flash_attn: shapes do not fit")
        };
        if sizes.is_empty() {
            return Ok(Self::nothing(&sizes));
        }
        let AttentionSizes { queries, heads, width, .. } = sizes;
        let rest = scale.rest();
        let at_once = queries_at_once::<T>(visible, &[&v])?;
        let parts = sizes.each(|b| {
            let ranges = visible.of(b);
            let mut part = Self::nothing(&AttentionSizes { batch: 1, ..sizes });
            for h in 0..heads {
                let g = sizes.key_head(h);
                let (q, k, v) = (q.head(b, h)?, k.head(b, g)?, v.head(b, g)?);
                for rows in sizes.blocks(at_once) {
                    let mut whole: Option<Self> = None;
                    for tile in tiles(union(&ranges[rows.clone()]), rows.len()) {
                        let keys = tile.len();
                        let keys_of = k.rows(tile.clone()).transpose(0, 1)?;
                        let scores = product(q.storage, &q.rows(rows.clone()), k.storage, &keys_of)?;
                        let mut scores = T::cpu_storage_data(scores)?;
                        let found = by_blocks(
                            &mut scores,
                            keys,
                            keys,
                            #[inline(always)]
                            |first, scores| {
                                let mut found = Vec::with_capacity(scores.len() / keys);
                                for (row, range) in
                                    scores.chunks_exact_mut(keys).zip(&ranges[rows.start + first..])
                                {
                                    let (from, to) = within(range, &tile);
                                    row[..from].fill(T::zero());
                                    row[to..].fill(T::zero());
                                    scale.cap_row(&mut row[from..to]);
                                    found.push(soften(&mut row[from..to], rest));
                                }
                                found
                            },
                        );
                        let (top, sum) = found.into_iter().flatten().unzip();
                        let (weights, dense) =
                            (T::to_cpu_storage_owned(scores), Layout::contiguous((rows.len(), keys)));
                        let mixed = product(&weights, &dense, v.storage, &v.rows(tile))?;
                        let made = Self {
                            out: T::cpu_storage_data(mixed)?,
                            norms: SoftmaxNorms { top, sum },
                            width,
                        };
                        match &mut whole {
                            Some(whole) => whole.join(made, scale),
                            None => whole = Some(made),
                        }
                    }
                    let Some(whole) = whole else { continue };
                    for (i, (&top, &sum)) in rows.clone().zip(whole.norms.top.iter().zip(&whole.norms.sum)) {
                        (part.norms.top[i * heads + h], part.norms.sum[i * heads + h]) = (top, sum);
                    }
                    let place = ((rows.start * heads + h) * width, heads * width, width);
                    into_head::<T>(&mut part.out, &whole.out, place, |out, mixed| out.copy_from_slice(mixed));
                }
            }
            Ok(part)
        })?;
        debug_assert_eq!(parts.len() * queries * heads, sizes.rows());
        let norm =
            |of: fn(&Self) -> &Vec<T>| parts.iter().map(|part| &of(part)[..]).collect::<Vec<_>>().concat();
        let norms = SoftmaxNorms { top: norm(|part| &part.norms.top), sum: norm(|part| &part.norms.sum) };
        Ok(Self { out: norm(|part| &part.out), norms, width })
    }

    /// Returns the rows, each with the logarithm of the sum of the exponentials of its scores behind it; -∞ without a visible key.
    pub(super) fn beside_log_sums(&self, scale: Scale) -> Vec<T> {
        let rest = scale.rest::<T>();
        let rows = self.norms.top.iter().zip(&self.norms.sum).enumerate();
        rows.flat_map(|(i, (&top, &sum))| {
            let row = self.out[i * self.width..][..self.width].iter().copied();
            row.chain([log_sum((top, sum), rest)])
        })
        .collect()
    }

    /// Returns the result and the norms as one list for other ranks, row by row.
    pub fn pack(&self) -> Vec<T> {
        let rows = self.norms.top.iter().zip(&self.norms.sum).enumerate();
        rows.flat_map(|(i, (&top, &sum))| {
            self.out[i * self.width..][..self.width].iter().copied().chain([top, sum])
        })
        .collect()
    }

    /// Reads what [`pack`](Self::pack) returned.
    pub fn unpack(packed: &[T], width: usize) -> Self {
        let rows = || packed.chunks_exact(width + 2);
        let norms = SoftmaxNorms {
            top: rows().map(|row| row[width]).collect(),
            sum: rows().map(|row| row[width + 1]).collect(),
        };
        Self { out: rows().flat_map(|row| &row[..width]).copied().collect(), norms, width }
    }

    /// Joins this result with that over other keys. Exact for rows without a visible key on either side.
    pub fn join(&mut self, other: Self, scale: Scale) {
        let (scale, width) = (scale.rest::<T>(), self.width);
        for i in 0..self.norms.sum.len() {
            let ((a, of_a), (b, of_b)) =
                ((self.norms.top[i], self.norms.sum[i]), (other.norms.top[i], other.norms.sum[i]));
            if of_b == T::zero() {
                continue;
            }
            let (out, theirs) = (&mut self.out[i * width..][..width], &other.out[i * width..][..width]);
            if of_a == T::zero() {
                out.copy_from_slice(theirs);
                (self.norms.top[i], self.norms.sum[i]) = (b, of_b);
                continue;
            }
            let top = if (b > a) == (scale > T::zero()) { b } else { a };
            let part = |x: T, sum: T| sum * ((x - top) * scale).exp_neg(T::zero());
            let (of_a, of_b) = (part(a, of_a), part(b, of_b));
            let share = of_b / (of_a + of_b);
            for (out, &theirs) in out.iter_mut().zip(theirs) {
                *out += share * (theirs - *out);
            }
            (self.norms.top[i], self.norms.sum[i]) = (top, of_a + of_b);
        }
    }
}

/// The logarithm of the sum of exponentials with these norms, where scores are multiplied by `rest`.
pub(super) fn log_sum<T: Real>((top, sum): (T, T), rest: T) -> T {
    // Without scores there is no largest one.
    if sum == T::zero() { T::from_f64(f64::NEG_INFINITY) } else { top * rest + sum.ln() }
}

/// The scores of a tile, which stay in a core's L2 cache with what is made of them.
const TILE: usize = 32 << 10;

/// Cuts the keys that some queries see into tiles.
pub(super) fn tiles(seen: Range<usize>, queries: usize) -> impl Iterator<Item = Range<usize>> {
    let (size, end) = ((TILE / queries.max(1)).max(1), seen.end);
    seen.step_by(size).map(move |start| start..(start + size).min(end))
}

/// The part of a row's range that lies in a tile, counted from the tile's start.
#[inline(always)]
pub(super) fn within(range: &Range<usize>, tile: &Range<usize>) -> (usize, usize) {
    let at = |at: usize| at.clamp(tile.start, tile.end) - tile.start;
    if range.is_empty() { (0, 0) } else { (at(range.start), at(range.end)) }
}

/// Replaces a row by the softmax of `row · scale`, and returns its largest element and the sum of the exponentials.
#[inline(always)]
pub(super) fn soften<T: Real>(row: &mut [T], scale: T) -> (T, T) {
    if row.is_empty() {
        return (T::zero(), T::zero());
    }
    let top = if scale < T::zero() { min(row) } else { max(row) };
    for v in row.iter_mut() {
        *v = ((*v - top) * scale).exp_neg(T::zero());
    }
    let total = sum(row, |v| v);
    let norm = T::one() / total;
    for v in row.iter_mut() {
        *v *= norm;
    }
    (top, total)
}
