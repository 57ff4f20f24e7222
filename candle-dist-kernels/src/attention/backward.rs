//! The gradient of attention over a block of keys, with scores that are computed again.
use super::Scale;
use super::forward::{SoftmaxNorms, tiles, within};
use super::heads::{AttentionSizes, BLOCK, HeadPiece, ProductForm, TILE, blocks};
use super::visible::{Visible, union};
use crate::{
    TensorReader,
    parallel::threads,
    product::{LeftOperand, ProductRows},
    real::Real,
    rows::{add_assign, sum_zip, vectorised},
};
use candle_core::{Result, Tensor, bail};
use std::ops::Range;

/// Returns the product of each row of the result with its gradient, less the gradient of the logarithm behind the `width` values of a
/// row, if there is one: a score moves the logarithm by its weight, as it moves the product.
///
/// It must be that of the result over *all* keys. Then the gradients over blocks of keys just add up.
pub(super) fn inner<T: Real>(out: &Tensor, grad: &Tensor, width: usize) -> Result<Vec<T>> {
    let columns = out.dims().last().copied().unwrap_or(0);
    let (out, grad) = (out.contiguous()?, grad.contiguous()?);
    let (out, grad) = (TensorReader::new(&out), TensorReader::new(&grad));
    let (out, grad) = (out.elements::<T>()?, grad.elements::<T>()?);
    if columns == 0 {
        return Ok(Vec::new());
    }
    let of_row = |(a, b): (&[T], &[T])| {
        let of_logarithm = b.get(width).copied().unwrap_or(T::zero());
        sum_zip(&a[..width], &b[..width], |a, b| a * b) - of_logarithm
    };
    Ok(out.chunks_exact(columns).zip(grad.chunks_exact(columns)).map(of_row).collect())
}

/// What the gradients through any block of keys are made of.
#[derive(Debug, Clone, Copy)]
pub struct AttentionBackward<'a, T> {
    /// The query, and the gradient of the result.
    pub query: &'a Tensor,
    /// The gradient of the result.
    pub grad: &'a Tensor,
    /// The norms of each row over all keys.
    pub norms: &'a SoftmaxNorms<T>,
    /// What [`AttentionDtype::inner`](super::AttentionDtype::inner) returns.
    pub inner: &'a [T],
    /// The scale of the scores.
    pub scale: Scale,
}

/// Pieces of work from which on the keys of a head are not cut further. Each piece has a gradient of the query of its own, which takes memory
/// and is added to that of the others.
const PIECES: usize = 64;

/// Returns the keys of a piece. The cuts follow from the sizes alone, and so do the sums.
pub(super) fn piece_size(sizes: &AttentionSizes) -> usize {
    let cuts = PIECES.div_ceil(sizes.batch * sizes.kv_heads).min(sizes.keys.div_ceil(2 * TILE));
    sizes.keys.div_ceil(cuts).next_multiple_of(TILE)
}

/// Adds the gradients through a block of keys and values, which are the rows from `first` on of those that `of_keys` is for.
///
/// `of_keys` has for each element of the batch the gradient of all keys, then that of all values.
pub(super) fn over<T: Real>(
    work: &AttentionBackward<'_, T>,
    [k, v]: [&Tensor; 2],
    (first, visible): (usize, &Visible),
    of_query: &mut [T],
    of_keys: &mut [T],
) -> Result<()> {
    let [q, k, v, grad] = [work.query, k, v, work.grad].map(TensorReader::new);
    let Some(sizes) = AttentionSizes::of(q.layout.dims(), k.layout.dims(), v.layout.dims()) else {
        bail!("flash_attn: shapes do not fit")
    };
    let AttentionSizes { batch, queries, keys, heads, kv_heads, dim, width } = sizes;
    if sizes.is_empty() {
        return Ok(());
    }
    let form = ProductForm::of::<T>(visible, &[&q, &k, &grad])?;
    let size = piece_size(&sizes);
    let pieces = sizes.pieces(keys, size);
    let per_head = keys.div_ceil(size);
    let [mut of_key, mut of_value] = [Vec::new(), Vec::new()];
    for of_keys in of_keys.chunks_exact_mut(of_keys.len() / batch) {
        let (dk, dv) = of_keys.split_at_mut(of_keys.len() / (dim + width) * dim);
        for (sums, all, columns) in [(&mut of_key, dk, dim), (&mut of_value, dv, width)] {
            let all = &mut all[first * kv_heads * columns..][..keys * kv_heads * columns];
            sums.extend(HeadPiece::cut(all, [keys, kv_heads, columns], [per_head, size]));
        }
    }
    let of_element = (queries * heads * dim).max(1);
    let (mut work_of, mut first) = (pieces.iter().zip(of_key).zip(of_value), 0);
    // A few at a time, so that their parts of the gradient of the query do not take memory for all pieces.
    loop {
        let some: Vec<_> = work_of.by_ref().take(at_a_time(&sizes, threads())).collect();
        let parts = sizes.each(some.into_iter(), |((piece, dk), dv)| {
            over_piece(work, [&q, &k, &v, &grad], (&sizes, piece), (visible, form), [dk, dv])
        })?;
        if parts.is_empty() {
            return Ok(());
        }
        let rows = of_query.chunks_mut(of_element).enumerate().flat_map(|(b, of_query)| {
            of_query.chunks_mut(BLOCK * heads * dim).enumerate().map(move |(i, rows)| (b, i * BLOCK, rows))
        });
        sizes.each(rows, |(b, start, rows)| {
            // The gradients through later keys follow those through earlier ones.
            for (piece, part) in (first..).zip(&parts) {
                let head = piece / per_head;
                if head / kv_heads == b {
                    part.add(rows, start, [head % kv_heads * sizes.group(), heads, dim]);
                }
            }
            Ok(())
        })?;
        first += parts.len();
    }
}

/// How many pieces are computed before their parts are added: enough for threads that are done to take others. At most all parts together take
/// twice the memory of the gradient of the query, or each thread has two.
pub(super) fn at_a_time(sizes: &AttentionSizes, threads: usize) -> usize {
    if threads == 1 { 1 } else { 2 * threads.max(sizes.batch * sizes.kv_heads) }
}

/// The gradient of some queries of the heads that a key head serves, through some of its keys: head by head.
struct QueryPart<T> {
    queries: Range<usize>,
    elements: Vec<T>,
}

impl<T: Real> QueryPart<T> {
    /// Adds this to the rows of queries `[rows, heads, dim]` from `start` on, from a head on.
    fn add(&self, rows: &mut [T], start: usize, [first, heads, dim]: [usize; 3]) {
        let count = self.queries.len();
        for (query, row) in (start..).zip(rows.chunks_exact_mut(heads * dim)) {
            if !self.queries.contains(&query) {
                continue;
            }
            let of_heads = self.elements.chunks_exact(count * dim);
            for (row, part) in row.chunks_exact_mut(dim).skip(first).zip(of_heads) {
                add_assign(row, &part[(query - self.queries.start) * dim..][..dim]);
            }
        }
    }
}

/// Adds the gradients of the keys and the values of a piece to their rows, and returns that of the queries.
fn over_piece<T: Real>(
    work: &AttentionBackward<'_, T>,
    [q, k, v, grad]: [&TensorReader<'_>; 4],
    (sizes, piece): (&AttentionSizes, &HeadPiece),
    (visible, form): (&Visible, ProductForm),
    [mut dk, mut dv]: [Vec<&mut [T]>; 2],
) -> Result<QueryPart<T>> {
    let HeadPiece { batch, kv_head, rows: keys } = piece;
    let AttentionSizes { heads, dim, width, queries, .. } = *sizes;
    let (ranges, group) = (visible.of(*batch), sizes.group());
    let sees = |range: &Range<usize>| range.start.max(keys.start) < range.end.min(keys.end);
    let seen_by = hull(ranges, sees);
    let zeros = |len: usize| vec![T::zero(); len];
    let count = seen_by.len();
    let mut made = QueryPart { queries: seen_by.clone(), elements: zeros(group * count * dim) };
    let seen = union(&ranges[seen_by.clone()]);
    let seen = seen.start.max(keys.start)..seen.end.min(keys.end);
    if seen.is_empty() {
        return Ok(made);
    }
    let (k, v) = (k.head::<T>(*batch, *kv_head)?, v.head::<T>(*batch, *kv_head)?);
    let [mut keys_turned, mut key_rows, mut values, mut query_rows, mut grad_rows] =
        [(); 5].map(|()| form.operand());
    // A tile may begin one key before those that are seen.
    let (block, longest) = (BLOCK.min(count), TILE.min(seen.len() + 1));
    let mut copies = [zeros(block * dim), zeros(block * width)];
    let [mut weights, mut scores] = [(); 2].map(|()| zeros(block * longest));
    let mut sums = [zeros(longest * dim), zeros(longest * width)];
    for tile in tiles(seen) {
        k.pack(&tile, true, &mut keys_turned);
        k.pack(&tile, false, &mut key_rows);
        v.pack(&tile, true, &mut values);
        sums.iter_mut().for_each(|sums| sums.fill(T::zero()));
        for h in 0..group {
            let head = kv_head * group + h;
            let (q, grad) = (q.head::<T>(*batch, head)?, grad.head::<T>(*batch, head)?);
            for rows in aligned_blocks(seen_by.clone(), form.queries) {
                let ranges = &ranges[rows.clone()];
                let (from, to) = within(&union(ranges), &tile);
                if from == to {
                    continue;
                }
                q.copy(rows.clone(), &mut copies[0]);
                grad.copy(rows.clone(), &mut copies[1]);
                q.pack(&rows, false, &mut query_rows);
                grad.pack(&rows, false, &mut grad_rows);
                let needed = |some: Range<usize>| {
                    let (from, to) = within(&union(&ranges[some]), &tile);
                    from..to
                };
                let (count, len) = (rows.len(), tile.len());
                let weights = &mut weights[..count * len];
                let scores = &mut scores[..count * len];
                for (out, copy, right, inner) in [
                    (&mut *weights, &copies[0], &keys_turned, dim),
                    (&mut *scores, &copies[1], &values, width),
                ] {
                    ProductRows {
                        left: LeftOperand { elements: copy, strides: [inner, 1] },
                        right,
                        rows: 0..count,
                        needed: &|some| [0..inner, needed(some)],
                        width: len,
                        adds: false,
                    }
                    .write(out);
                }
                vectorised(
                    #[inline(always)]
                    || {
                        let pairs = weights.chunks_exact_mut(len).zip(scores.chunks_exact_mut(len));
                        for (i, (weights, scores)) in pairs.enumerate() {
                            let (from, to) = within(&ranges[i], &tile);
                            for row in [&mut *weights, &mut *scores] {
                                row[..from].fill(T::zero());
                                row[to..].fill(T::zero());
                            }
                            let row = (batch * queries + rows.start + i) * heads + head;
                            work.of_row(row, &mut weights[from..to], &mut scores[from..to]);
                        }
                    },
                );
                let at = (h * seen_by.len() + rows.start - seen_by.start) * dim;
                ProductRows {
                    left: LeftOperand { elements: scores, strides: [len, 1] },
                    right: &key_rows,
                    rows: 0..count,
                    needed: &|some| [needed(some), 0..dim],
                    width: dim,
                    adds: true,
                }
                .write(&mut made.elements[at..][..count * dim]);
                // The queries of the block that see one of some keys of the tile.
                let seen_by = |some: Range<usize>| {
                    hull(ranges, |range| {
                        let (from, to) = within(range, &tile);
                        from.max(some.start) < to.min(some.end)
                    })
                };
                let [of_key, of_value] = &mut sums;
                for (out, left, right, columns) in
                    [(of_key, &*scores, &query_rows, dim), (of_value, &*weights, &grad_rows, width)]
                {
                    ProductRows {
                        left: LeftOperand { elements: left, strides: [1, len] },
                        right,
                        rows: from..to,
                        needed: &|some| [seen_by(some), 0..columns],
                        width: columns,
                        adds: true,
                    }
                    .write(out);
                }
            }
        }
        let of_tile = tile.start - keys.start..tile.end - keys.start;
        for (rows, sums, columns) in [(&mut dk, &sums[0], dim), (&mut dv, &sums[1], width)] {
            for (row, sums) in rows[of_tile.clone()].iter_mut().zip(sums.chunks_exact(columns)) {
                add_assign(row, sums);
            }
        }
    }
    Ok(made)
}

/// The blocks of queries that [`ProductForm::of`] judged, as far as they are in a range.
fn aligned_blocks(rows: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    blocks(rows.start / size * size..rows.end, size).map(move |block| block.start.max(rows.start)..block.end)
}

/// The smallest range that has all numbers of ranges which `is_in` accepts.
fn hull(ranges: &[Range<usize>], is_in: impl Fn(&Range<usize>) -> bool) -> Range<usize> {
    let first = ranges.iter().position(&is_in).unwrap_or(0);
    first..ranges.iter().rposition(is_in).map_or(first, |last| last + 1)
}

impl<T: Real> AttentionBackward<'_, T> {
    /// Turns the products of a query and keys into weights, and those of its gradient and values into the gradients of the products.
    #[inline(always)]
    fn of_row(&self, row: usize, weights: &mut [T], scores: &mut [T]) {
        let Self { norms, inner, scale, .. } = *self;
        let (rest, factor) = (scale.rest::<T>(), T::from_f64(scale.factor));
        let (top, sum) = (norms.top[row], norms.sum[row]);
        let norm = if sum == T::zero() { T::zero() } else { T::one() / sum };
        let inner = match scale.cap {
            // A capped score is flatter the nearer it is to the cap.
            Some(cap) => {
                for (weight, score) in weights.iter_mut().zip(&mut *scores) {
                    *score = (*score - inner[row]) * scale.cap_with_slope(weight, cap);
                }
                T::zero()
            }
            None => inner[row],
        };
        for (weight, score) in weights.iter_mut().zip(scores) {
            *weight = norm * ((*weight - top) * rest).exp_neg(T::zero());
            *score = factor * *weight * (*score - inner);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use crate::attention::{KeyBlock, Scale, Visible, attend, attend_off_host};
    use candle_core::{DType, Device::Cpu, Tensor, Var};

    /// The gradients of a query, a key and a value, computed in a dtype.
    fn gradients(inputs: &[Tensor; 4], dtype: DType, is_off_host: bool) -> Vec<Tensor> {
        let [q, k, v, weights] = inputs.each_ref().map(|x| x.to_dtype(dtype).unwrap());
        let [q, k, v] = [q, k, v].map(|x| Var::from_tensor(&x).unwrap());
        let keys = k.dims()[1];
        let blocks = vec![KeyBlock { rows: 0..keys, visible: Visible::plain(q.dims()[1], keys, false) }];
        let scale = Scale { factor: 0.5, cap: Some(2.0) };
        let out = match is_off_host {
            false => attend([&q, &k, &v], scale, blocks, false),
            true => attend_off_host([&q, &k, &v], scale, &blocks, false),
        };
        let grads = (out.unwrap() * weights).unwrap().sum_all().unwrap().backward().unwrap();
        [q, k, v].map(|x| grads.get(&x).unwrap().to_dtype(DType::F64).unwrap()).into()
    }

    /// Where all scores are so near to the cap that only f64 tells how near, gradients of f32 have their digits all the same.
    #[test]
    fn gradients_of_scores_near_the_cap_keep_their_digits() {
        let values = |tokens: usize, (mean, width): (f64, f64)| {
            let drawn = Tensor::randn(mean, width, (2, tokens, 2, 8), &Cpu).unwrap();
            drawn.to_dtype(DType::F32).unwrap()
        };
        let near = (1.8, 0.1);
        let inputs = [values(9, near), values(13, near), values(13, (0.0, 1.0)), values(9, (0.0, 1.0))];
        let most = |x: &Tensor| x.abs().unwrap().max_all().unwrap().to_scalar::<f64>().unwrap();
        for is_off_host in [false, true] {
            let want = gradients(&inputs, DType::F64, is_off_host);
            for (got, want) in gradients(&inputs, DType::F32, is_off_host).iter().zip(&want) {
                let off = most(&(got - want).unwrap()) / most(want);
                assert!(off < 1e-4, "off by {off:e} of {:e}, off the host: {is_off_host}", most(want));
            }
        }
        // On the host and off it they are the same.
        let [host, other] = [false, true].map(|is_off_host| gradients(&inputs, DType::F64, is_off_host));
        for (host, other) in host.iter().zip(&other) {
            assert!(most(&(host - other).unwrap()) < 1e-9 * most(host));
        }
    }
}
