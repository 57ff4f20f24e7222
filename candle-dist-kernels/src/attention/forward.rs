//! Attention over a block of keys, and results over several blocks joined.
use super::Scale;
use super::heads::{AttentionSizes, BLOCK, HeadPiece, ProductForm, TILE, blocks};
use super::visible::{Visible, union};
use crate::{
    TensorReader,
    parallel::threads,
    product::{LeftOperand, ProductRows},
    real::Real,
    rows::{max, min, sum, vectorised},
};
use candle_core::{Result, Tensor, bail};
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

    /// The result over keys `[batch, k, kv_heads, dim]` of the compute dtype, or of 16-bit floats.
    pub(super) fn over([q, k, v]: [&Tensor; 3], scale: Scale, visible: &Visible) -> Result<Self> {
        let [q, k, v] = [q, k, v].map(TensorReader::new);
        let Some(sizes) = AttentionSizes::of(q.layout.dims(), k.layout.dims(), v.layout.dims()) else {
            bail!("flash_attn: shapes do not fit")
        };
        if sizes.is_empty() {
            return Ok(Self::nothing(&sizes));
        }
        let AttentionSizes { queries, heads, kv_heads, width, .. } = sizes;
        let (group, form) = (sizes.group(), ProductForm::of::<T>(visible, &[&v])?);
        let mut whole = Self::nothing(&sizes);
        let size = piece_size(&sizes, threads());
        let pieces = sizes.pieces(queries, size);
        let rows = HeadPiece::cut(
            &mut whole.out,
            [queries, kv_heads, group * width],
            [queries.div_ceil(size), size],
        );
        // The last queries first: under a causal mask they see most.
        let norms = sizes.each(pieces.iter().zip(rows).rev(), |(piece, rows)| {
            over_piece([&q, &k, &v], (&sizes, piece), scale, (visible, form), rows)
        })?;
        for (piece, norms) in pieces.iter().rev().zip(norms) {
            let count = piece.rows.len();
            for (at, (top, sum)) in norms.top.into_iter().zip(norms.sum).enumerate() {
                let (head, query) = (piece.kv_head * group + at / count, piece.rows.start + at % count);
                let row = (piece.batch * queries + query) * heads + head;
                (whole.norms.top[row], whole.norms.sum[row]) = (top, sum);
            }
        }
        Ok(whole)
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

/// Returns how many queries of a head meet a tile of keys while it is packed: more in long texts, as long as each thread has some pieces.
///
/// A row has the same bits in each piece.
fn piece_size(sizes: &AttentionSizes, threads: usize) -> usize {
    let most = (sizes.queries / 32).next_power_of_two().clamp(256, 1024);
    let share = sizes.queries * sizes.batch * sizes.kv_heads / (PIECES_OF_THREAD * threads);
    share.next_multiple_of(BLOCK).clamp(BLOCK, most)
}

/// Pieces of queries for each thread, where there are several threads: they see different numbers of keys.
const PIECES_OF_THREAD: usize = 4;

/// Computes the queries of a piece for each head of its group; `out` has a row of all of them for each query. Returns
/// the norms, head by head.
fn over_piece<T: Real>(
    [q, k, v]: [&TensorReader<'_>; 3],
    (sizes, piece): (&AttentionSizes, &HeadPiece),
    scale: Scale,
    (visible, form): (&Visible, ProductForm),
    out: Vec<&mut [T]>,
) -> Result<SoftmaxNorms<T>> {
    let HeadPiece { batch, kv_head, rows: queries } = piece;
    let (count, group) = (queries.len(), sizes.group());
    let AttentionSizes { dim, width, .. } = *sizes;
    let zeros = |len: usize| vec![T::zero(); len];
    let mut norms = SoftmaxNorms { top: zeros(group * count), sum: zeros(group * count) };
    let ranges = &visible.of(*batch)[queries.clone()];
    let seen = union(ranges);
    if seen.is_empty() {
        return Ok(norms);
    }
    let mut query = zeros(group * count * dim);
    for (h, query) in query.chunks_exact_mut(count * dim).enumerate() {
        q.head(*batch, kv_head * group + h)?.copy(queries.clone(), query);
    }
    let (k, v) = (k.head::<T>(*batch, *kv_head)?, v.head::<T>(*batch, *kv_head)?);
    let (mut keys, mut values) = (form.operand(), form.operand());
    let mut scores = zeros(BLOCK.min(count) * TILE.min(sizes.keys));
    let mut mixed = zeros(group * count * width);
    for tile in tiles(seen) {
        k.pack(&tile, true, &mut keys);
        v.pack(&tile, false, &mut values);
        for h in 0..group {
            for rows in blocks(0..count, form.queries) {
                let ranges = &ranges[rows.clone()];
                let (from, to) = within(&union(ranges), &tile);
                if from == to {
                    continue;
                }
                let needed = |some: Range<usize>| {
                    let (from, to) = within(&union(&ranges[some]), &tile);
                    from..to
                };
                let first = h * count + rows.start;
                let scores = &mut scores[..rows.len() * tile.len()];
                ProductRows {
                    left: LeftOperand { elements: &query[first * dim..], strides: [dim, 1] },
                    right: &keys,
                    rows: 0..rows.len(),
                    needed: &|some| [0..dim, needed(some)],
                    width: tile.len(),
                    adds: false,
                }
                .write(scores);
                let (top, sum) = (&mut norms.top[first..], &mut norms.sum[first..]);
                let mixed = &mut mixed[first * width..][..rows.len() * width];
                vectorised(
                    #[inline(always)]
                    || {
                        let rows = scores.chunks_exact_mut(tile.len()).zip(mixed.chunks_exact_mut(width));
                        for (i, (scores, mixed)) in rows.enumerate() {
                            let (from, to) = within(&ranges[i], &tile);
                            scores[..from].fill(T::zero());
                            scores[to..].fill(T::zero());
                            let scores = &mut scores[from..to];
                            scale.cap_row(scores);
                            add_exponentials(scores, scale.rest(), (&mut top[i], &mut sum[i]), mixed);
                        }
                    },
                );
                ProductRows {
                    left: LeftOperand { elements: scores, strides: [tile.len(), 1] },
                    right: &values,
                    rows: 0..rows.len(),
                    needed: &|some| [needed(some), 0..width],
                    width,
                    adds: true,
                }
                .write(mixed);
            }
        }
    }
    for (i, out) in out.into_iter().enumerate() {
        for (h, out) in out.chunks_exact_mut(width).enumerate() {
            let row = h * count + i;
            if norms.sum[row] != T::zero() {
                let norm = T::one() / norms.sum[row];
                out.iter_mut().zip(&mixed[row * width..]).for_each(|(out, &mixed)| *out = norm * mixed);
            }
        }
    }
    Ok(norms)
}

/// Cuts the keys that some queries see into tiles, whose ends do not depend on the queries. Nor do pairs of keys: tiles begin with an even one.
pub(super) fn tiles(seen: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let (first, start) = (seen.start / TILE, seen.start / 2 * 2);
    (first..seen.end.div_ceil(TILE)).map(move |i| (i * TILE).max(start)..((i + 1) * TILE).min(seen.end))
}

/// The part of a row's range that lies in a tile, counted from the tile's start.
#[inline(always)]
pub(super) fn within(range: &Range<usize>, tile: &Range<usize>) -> (usize, usize) {
    let at = |at: usize| at.clamp(tile.start, tile.end) - tile.start;
    if range.is_empty() { (0, 0) } else { (at(range.start), at(range.end)) }
}

/// Replaces scores by their exponentials relative to the largest score so far, and adds them to the sum. If the largest
/// score changes, the sum and what was mixed with the exponentials so far follow it.
#[inline(always)]
fn add_exponentials<T: Real>(row: &mut [T], scale: T, (top, total): (&mut T, &mut T), mixed: &mut [T]) {
    if row.is_empty() {
        return;
    }
    let here = if scale < T::zero() { min(row) } else { max(row) };
    if *total == T::zero() {
        *top = here;
    } else if (here > *top) == (scale > T::zero()) && here != *top {
        let part = ((*top - here) * scale).exp_neg(T::zero());
        *total *= part;
        mixed.iter_mut().for_each(|mixed| *mixed *= part);
        *top = here;
    }
    let largest = *top;
    for v in row.iter_mut() {
        *v = ((*v - largest) * scale).exp_neg(T::zero());
    }
    *total += sum(row, |v| v);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::backward;
    use crate::parallel::busiest;

    /// The work of the busiest of simulated threads, by an even share: forward, then backward.
    fn unevenness(sizes: &AttentionSizes, visible: &Visible, threads: usize) -> [f64; 2] {
        let of = visible.of(0);
        let pieces = sizes.pieces(sizes.queries, piece_size(sizes, threads)).into_iter().rev();
        let forward: Vec<usize> = pieces.map(|piece| of[piece.rows].iter().map(Range::len).sum()).collect();
        let pieces = sizes.pieces(sizes.keys, backward::piece_size(sizes)).into_iter();
        let backward = pieces.map(|HeadPiece { rows: keys, .. }| {
            let seen =
                |range: &Range<usize>| range.end.min(keys.end).saturating_sub(range.start.max(keys.start));
            of.iter().map(seen).sum()
        });
        let backward: Vec<usize> = backward.collect();
        let at_a_time = backward::at_a_time(sizes, threads);
        let busy = [
            busiest(&forward, threads),
            backward.chunks(at_a_time).map(|costs| busiest(costs, threads)).sum::<usize>(),
        ];
        let all = [&forward, &backward].map(|costs| costs.iter().sum::<usize>());
        [0, 1].map(|pass| (busy[pass] * threads) as f64 / all[pass] as f64)
    }

    #[test]
    fn work_is_cut_evenly_for_many_threads() {
        let all = [[1, 4096, 8, 8], [4, 2048, 32, 8], [8, 1024, 9, 3], [1, 32768, 8, 2]];
        for [batch, tokens, heads, kv_heads] in all {
            let keys = [batch, tokens, kv_heads, 64];
            let Some(sizes) = AttentionSizes::of(&[batch, tokens, heads, 64], &keys, &keys) else {
                panic!("{heads} heads, {kv_heads} of keys")
            };
            let visible = Visible::plain(tokens, tokens, true);
            // Backward a piece has 512 keys at least, of which short texts have few.
            let bounds = [(1, [1.01, 1.01]), (2, [1.01, 1.01]), (4, [1.01, 1.05]), (8, [1.1, 1.15])];
            for (threads, bounds) in
                bounds.into_iter().chain([(16, [1.2, 1.5]), (32, [1.3, 1.6]), (64, [1.4, 2.1])])
            {
                let found = unevenness(&sizes, &visible, threads);
                let is_even = found.iter().zip(bounds).all(|(found, bound)| *found <= bound);
                assert!(is_even, "{batch} × {tokens}, {threads} threads: {found:.2?} for {bounds:?}");
            }
        }
    }
}
