//! The gradient of attention over a block of keys, with scores that are computed again.
use super::Scale;
use super::forward::{SoftmaxNorms, tiles, within};
use super::heads::{AttentionSizes, into_head, queries_at_once};
use super::visible::{Visible, union};
use crate::{
    TensorReader,
    product::product,
    real::Real,
    rows::{add_assign, by_blocks, sum_zip},
};
use candle_core::{Layout, Result, Tensor, bail};

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
    let AttentionBackward { norms, inner, scale, .. } = *work;
    let [q, k, v, grad] = [work.query, k, v, work.grad].map(TensorReader::new);
    let Some(sizes) = AttentionSizes::of(q.layout.dims(), k.layout.dims(), v.layout.dims()) else {
        bail!("flash_attn: shapes do not fit")
    };
    let AttentionSizes { queries, heads, kv_heads, dim, width, .. } = sizes;
    if sizes.is_empty() {
        return Ok(());
    }
    let rest = scale.rest::<T>();
    let at_once = queries_at_once::<T>(visible, &[&q, &k, &grad])?;
    sizes.each_with([of_query, of_keys], |b, [dq, of_keys]| {
        let ranges = visible.of(b);
        let (dk, dv) = of_keys.split_at_mut(of_keys.len() / (dim + width) * dim);
        for h in 0..heads {
            let g = sizes.key_head(h);
            let (q, k, v, grad) = (q.head(b, h)?, k.head(b, g)?, v.head(b, g)?, grad.head(b, h)?);
            for rows in sizes.blocks(at_once) {
                for tile in tiles(union(&ranges[rows.clone()]), rows.len()) {
                    let keys = tile.len();
                    let (these, keys_of) = (q.rows(rows.clone()), k.rows(tile.clone()));
                    let scores = product(q.storage, &these, k.storage, &keys_of.transpose(0, 1)?)?;
                    let mut weights = T::cpu_storage_data(scores)?;
                    let values = v.rows(tile.clone()).transpose(0, 1)?;
                    let scores = product(grad.storage, &grad.rows(rows.clone()), v.storage, &values)?;
                    let mut scores = T::cpu_storage_data(scores)?;
                    let row_of = |i: usize| (b * queries + rows.start + i) * heads + h;
                    // A capped score is flatter the nearer it is to the cap.
                    let slopes: Option<Vec<T>> = scale.cap.map(|_| {
                        scale.cap_row(&mut weights);
                        weights.iter().map(|&score| scale.slope(score)).collect()
                    });
                    let factor = T::from_f64(scale.factor);
                    by_blocks(
                        &mut weights,
                        keys,
                        keys,
                        #[inline(always)]
                        |first, weights| {
                            for (i, row) in weights.chunks_exact_mut(keys).enumerate() {
                                let (from, to) = within(&ranges[rows.start + first + i], &tile);
                                row[..from].fill(T::zero());
                                row[to..].fill(T::zero());
                                let (top, sum) = (norms.top[row_of(first + i)], norms.sum[row_of(first + i)]);
                                let norm = if sum == T::zero() { T::zero() } else { T::one() / sum };
                                for v in &mut row[from..to] {
                                    *v = norm * ((*v - top) * rest).exp_neg(T::zero());
                                }
                            }
                        },
                    );
                    by_blocks(
                        &mut scores,
                        keys,
                        keys,
                        #[inline(always)]
                        |first, scores| {
                            let pairs =
                                scores.chunks_exact_mut(keys).zip(weights[first * keys..].chunks_exact(keys));
                            for (i, (scores, weights)) in pairs.enumerate() {
                                let (from, to) = within(&ranges[rows.start + first + i], &tile);
                                scores[..from].fill(T::zero());
                                scores[to..].fill(T::zero());
                                let inner = inner[row_of(first + i)];
                                for (score, &weight) in scores[from..to].iter_mut().zip(&weights[from..to]) {
                                    *score = factor * weight * (*score - inner);
                                }
                                if let Some(slopes) = &slopes {
                                    let slopes = &slopes[(first + i) * keys..][from..to];
                                    for (score, &slope) in scores[from..to].iter_mut().zip(slopes) {
                                        *score *= slope;
                                    }
                                }
                            }
                        },
                    );
                    let (weights, scores) =
                        (T::to_cpu_storage_owned(weights), T::to_cpu_storage_owned(scores));
                    let block = Layout::contiguous((rows.len(), keys));
                    let turned = block.transpose(0, 1)?;
                    let part = product(&scores, &block, k.storage, &keys_of)?;
                    let place = ((rows.start * heads + h) * dim, heads * dim, dim);
                    into_head::<T>(dq, T::cpu_storage_as_slice(&part)?, place, add_assign);
                    let row = (first + tile.start) * kv_heads + g;
                    let part = product(&scores, &turned, q.storage, &these)?;
                    into_head::<T>(
                        dk,
                        T::cpu_storage_as_slice(&part)?,
                        (row * dim, kv_heads * dim, dim),
                        add_assign,
                    );
                    let part = product(&weights, &turned, grad.storage, &grad.rows(rows.clone()))?;
                    into_head::<T>(
                        dv,
                        T::cpu_storage_as_slice(&part)?,
                        (row * width, kv_heads * width, width),
                        add_assign,
                    );
                }
            }
        }
        Ok(())
    })
}
