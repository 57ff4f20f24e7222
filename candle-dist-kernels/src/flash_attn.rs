use candle_core::utils::{get_num_threads, with_threadpool};
use candle_core::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;
use std::ops::Range;

use super::{
    Reading, check_dtype, compute_dtype, cpu,
    linear::product,
    real::Real,
    rows::{add_assign, by_blocks},
    softmax::{soften, soften_backward},
};

/// Attention: `softmax(query · keyᵀ · scale) · value` for each head, without the score matrix in memory.
///
/// The query is `[batch, q, heads, d]`, the key `[batch, k, kv_heads, d]` and the value `[batch, k, kv_heads, v]`; the
/// result is `[batch, q, heads, v]`. `kv_heads` divides `heads`: each key head serves `heads / kv_heads` consecutive
/// query heads. With `causal`, query `i` sees key `j` iff `j ≤ i + (k - q)`, and a query without a visible key yields
/// zeros. The backward pass recomputes the scores block by block (Dao et al. 2022). Fails if shapes or dtypes do not
/// match.
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// use candle_core::{DType, Device::Cpu, Tensor};
/// let ones = Tensor::ones((1, 2, 1, 4), DType::F32, &Cpu)?;
/// let value = Tensor::new(&[[[[1f32]], [[3.]]]], &Cpu)?;
/// let y = candle_dist_kernels::flash_attn(&ones, &ones, &value, 0.5, true)?;
/// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [1.0, 2.0]);
/// # Ok(())
/// # }
/// ```
pub fn flash_attn(query: &Tensor, key: &Tensor, value: &Tensor, scale: f64, causal: bool) -> Result<Tensor> {
    let dtype = compute_dtype("flash_attn", query)?;
    if Sizes::of(query.dims(), key.dims(), value.dims()).is_none() {
        let (q, k, v) = (query.shape(), key.shape(), value.shape());
        bail!(
            "flash_attn: query {q:?}, key {k:?}, value {v:?}: expected [b, q, h, d], [b, k, g, d], [b, k, g, v], g | h"
        );
    }
    check_dtype("flash_attn", query, key)?;
    check_dtype("flash_attn", query, value)?;
    if !query.device().is_cpu() {
        return composed(query, key, value, scale, causal);
    }
    let [q, k, v] = [query, key, value].map(|x| x.to_dtype(dtype));
    q?.apply_op3(&k?, &v?, FlashAttn { scale, causal })?.to_dtype(query.dtype())
}

fn composed(query: &Tensor, key: &Tensor, value: &Tensor, scale: f64, causal: bool) -> Result<Tensor> {
    let (b, q, h, _) = query.dims4()?;
    let heads_first = |x: &Tensor| -> Result<Tensor> {
        let (_, t, g, d) = x.dims4()?;
        let each = x.transpose(1, 2)?.unsqueeze(2)?.broadcast_as((b, g, h / g.max(1), t, d))?;
        each.reshape((b, h, t, d))
    };
    let scores = heads_first(query)?.matmul(&heads_first(key)?.t()?)?;
    let weights = match causal {
        true => super::causal_softmax(&scores, scale)?,
        false => super::softmax(&(scores * scale)?)?,
    };
    weights.matmul(&heads_first(value)?)?.transpose(1, 2)?.reshape((b, q, h, value.dim(3)?))
}

/// Queries per block: their scores stay in a core's L2 cache.
const BLOCK: usize = 64;

/// The number of multiplications from which the batch is distributed over threads.
const PARALLEL: usize = 1 << 20;

struct FlashAttn {
    scale: f64,
    causal: bool,
}

#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    queries: usize,
    keys: usize,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    width: usize,
}

impl Sizes {
    fn of(query: &[usize], key: &[usize], value: &[usize]) -> Option<Self> {
        let (&[batch, queries, heads, dim], &[kb, keys, kv_heads, kd], &[vb, vk, vg, width]) = (query, key, value)
        else {
            return None;
        };
        let groups = if kv_heads == 0 { heads == 0 } else { heads.is_multiple_of(kv_heads) };
        let fits = groups && (batch, batch, dim, keys, kv_heads) == (kb, vb, kd, vk, vg);
        fits.then_some(Self { batch, queries, keys, heads, kv_heads, dim, width })
    }

    fn is_empty(&self) -> bool {
        [self.batch, self.queries, self.keys, self.heads, self.dim, self.width].contains(&0)
    }

    fn blocks(&self) -> impl Iterator<Item = Range<usize>> {
        let queries = self.queries;
        (0..queries).step_by(BLOCK).map(move |start| start..(start + BLOCK).min(queries))
    }

    /// Calls `run` for each element of the batch, on several threads if that is faster.
    fn each<R: Send>(&self, run: impl Fn(usize) -> Result<R> + Sync + Send) -> Result<Vec<R>> {
        let cost = self.batch * self.heads * self.queries * self.keys * (self.dim + self.width);
        if cost >= PARALLEL && get_num_threads() > 1 {
            return with_threadpool(|| (0..self.batch).into_par_iter().map(run).collect());
        }
        (0..self.batch).map(run).collect()
    }
}

/// The rows of one head of `[batch, rows, heads, width]`, with any strides.
struct Head<'a> {
    storage: &'a CpuStorage,
    start: usize,
    width: usize,
    strides: [usize; 2],
}

impl<'a> Head<'a> {
    fn new(storage: &'a CpuStorage, layout: &Layout, batch: usize, head: usize) -> Result<Self> {
        let &[of_batch, of_row, of_head, of_column] = layout.stride() else { bail!("flash_attn: expected four dims") };
        let start = layout.start_offset() + batch * of_batch + head * of_head;
        Ok(Self { storage, start, width: layout.dims()[3], strides: [of_row, of_column] })
    }

    fn rows(&self, rows: Range<usize>) -> Layout {
        let start = self.start + rows.start * self.strides[0];
        Layout::new((rows.len(), self.width).into(), self.strides.to_vec(), start)
    }
}

/// Applies `put` to the rows of one head of `out`, `[rows, heads, width]` from `first` on, and to the rows of `part`.
fn into_head<T: Real>(
    out: &mut [T],
    part: &CpuStorage,
    (first, step, width): (usize, usize, usize),
    put: fn(&mut [T], &[T]),
) -> Result<()> {
    let rows = out[first..].chunks_mut(step).zip(T::cpu_storage_as_slice(part)?.chunks_exact(width));
    rows.for_each(|(out, part)| put(&mut out[..width], part));
    Ok(())
}

impl FlashAttn {
    /// Returns the number of leading keys that a query sees.
    fn visible(&self, query: usize, sizes: &Sizes) -> usize {
        if self.causal { (query + 1 + sizes.keys).saturating_sub(sizes.queries) } else { sizes.keys }
    }

    /// Returns the attention weights of some queries over the first `keys`.
    fn weights<T: Real>(
        &self,
        q: &Head<'_>,
        k: &Head<'_>,
        rows: Range<usize>,
        keys: usize,
        sizes: &Sizes,
    ) -> Result<Vec<T>> {
        let scores = product(q.storage, &q.rows(rows.clone()), k.storage, &k.rows(0..keys).transpose(0, 1)?)?;
        let (mut scores, scale) = (T::cpu_storage_data(scores)?, T::from_f64(self.scale));
        by_blocks(
            &mut scores,
            keys,
            keys,
            #[inline(always)]
            |first, scores| {
                for (i, row) in scores.chunks_exact_mut(keys).enumerate() {
                    let (seen, hidden) = row.split_at_mut(self.visible(rows.start + first + i, sizes));
                    soften(seen, scale);
                    hidden.fill(T::zero());
                }
            },
        );
        Ok(scores)
    }

    fn forward<T: Real>(&self, [q, k, v]: [(&CpuStorage, &Layout); 3]) -> Result<(CpuStorage, Shape)> {
        let Some(sizes) = Sizes::of(q.1.dims(), k.1.dims(), v.1.dims()) else { bail!("flash_attn: shapes do not fit") };
        let Sizes { batch, queries, heads, kv_heads, width, .. } = sizes;
        let shape = Shape::from((batch, queries, heads, width));
        if sizes.is_empty() {
            return Ok((T::to_cpu_storage_owned(vec![T::zero(); shape.elem_count()]), shape));
        }
        let out = sizes.each(|b| {
            let mut out = vec![T::zero(); queries * heads * width];
            for h in 0..heads {
                let g = h / (heads / kv_heads);
                let (q, k, v) = (Head::new(q.0, q.1, b, h)?, Head::new(k.0, k.1, b, g)?, Head::new(v.0, v.1, b, g)?);
                for rows in sizes.blocks() {
                    let keys = self.visible(rows.end - 1, &sizes);
                    if keys == 0 {
                        continue;
                    }
                    let weights = T::to_cpu_storage_owned(self.weights::<T>(&q, &k, rows.clone(), keys, &sizes)?);
                    let weights_l = Layout::contiguous((rows.len(), keys));
                    let mixed = product(&weights, &weights_l, v.storage, &v.rows(0..keys))?;
                    let place = ((rows.start * heads + h) * width, heads * width, width);
                    into_head::<T>(&mut out, &mixed, place, |out, mixed| out.copy_from_slice(mixed))?;
                }
            }
            Ok(out)
        })?;
        Ok((T::to_cpu_storage_owned(out.concat()), shape))
    }

    fn backward<T: Real>(&self, inputs: [&Tensor; 3], grad: &Tensor) -> Result<[Tensor; 3]> {
        let [q, k, v, grad] = [inputs[0], inputs[1], inputs[2], grad].map(Reading::new);
        let Some(sizes) = Sizes::of(q.layout.dims(), k.layout.dims(), v.layout.dims()) else {
            bail!("flash_attn: shapes do not fit")
        };
        let Sizes { queries, keys: all_keys, heads, kv_heads, dim, width, .. } = sizes;
        if sizes.is_empty() {
            let [q, k, v] = inputs.map(|x| x.zeros_like());
            return Ok([q?, k?, v?]);
        }
        let scale = T::from_f64(self.scale);
        let parts = sizes.each(|b| {
            let mut dq = vec![T::zero(); queries * heads * dim];
            let (mut dk, mut dv) =
                (vec![T::zero(); all_keys * kv_heads * dim], vec![T::zero(); all_keys * kv_heads * width]);
            for h in 0..heads {
                let g = h / (heads / kv_heads);
                let (q, k, v) = (q.head(b, h)?, k.head(b, g)?, v.head(b, g)?);
                let grad = grad.head(b, h)?;
                for rows in sizes.blocks() {
                    let keys = self.visible(rows.end - 1, &sizes);
                    if keys == 0 {
                        continue;
                    }
                    let weights = self.weights::<T>(&q, &k, rows.clone(), keys, &sizes)?;
                    let values = v.rows(0..keys).transpose(0, 1)?;
                    let scores = product(grad.storage, &grad.rows(rows.clone()), v.storage, &values)?;
                    let mut scores = T::cpu_storage_data(scores)?;
                    by_blocks(
                        &mut scores,
                        keys,
                        keys,
                        #[inline(always)]
                        |first, scores| {
                            let pairs = scores.chunks_exact_mut(keys).zip(weights[first * keys..].chunks_exact(keys));
                            for (i, (scores, weights)) in pairs.enumerate() {
                                let seen = self.visible(rows.start + first + i, &sizes);
                                soften_backward(&mut scores[..seen], &weights[..seen], scale);
                                scores[seen..].fill(T::zero());
                            }
                        },
                    );
                    let (weights, scores) = (T::to_cpu_storage_owned(weights), T::to_cpu_storage_owned(scores));
                    let block = Layout::contiguous((rows.len(), keys));
                    let turned = block.transpose(0, 1)?;
                    let part = product(&scores, &block, k.storage, &k.rows(0..keys))?;
                    let place = ((rows.start * heads + h) * dim, heads * dim, dim);
                    into_head::<T>(&mut dq, &part, place, |out, part| out.copy_from_slice(part))?;
                    let part = product(&scores, &turned, q.storage, &q.rows(rows.clone()))?;
                    into_head::<T>(&mut dk, &part, (g * dim, kv_heads * dim, dim), add_assign)?;
                    let part = product(&weights, &turned, grad.storage, &grad.rows(rows))?;
                    into_head::<T>(&mut dv, &part, (g * width, kv_heads * width, width), add_assign)?;
                }
            }
            Ok([dq, dk, dv])
        })?;
        let whole =
            |i: usize, x: &Reading<'_>| x.like(parts.iter().flat_map(|part| &part[i]).copied().collect::<Vec<T>>());
        Ok([whole(0, &q)?, whole(1, &k)?, whole(2, &v)?])
    }
}

impl Reading<'_> {
    /// Returns one head of `[batch, rows, heads, width]`.
    fn head(&self, batch: usize, head: usize) -> Result<Head<'_>> {
        Head::new(cpu(&self.storage)?, self.layout, batch, head)
    }
}

impl CustomOp3 for FlashAttn {
    fn name(&self) -> &'static str {
        "flash_attn"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_l: &Layout,
        k: &CpuStorage,
        k_l: &Layout,
        v: &CpuStorage,
        v_l: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let inputs = [(q, q_l), (k, k_l), (v, v_l)];
        match q {
            CpuStorage::F64(_) => self.forward::<f64>(inputs),
            _ => self.forward::<f32>(inputs),
        }
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [q, k, v] = match q.dtype() {
            DType::F64 => self.backward::<f64>([q, k, v], grad)?,
            _ => self.backward::<f32>([q, k, v], grad)?,
        };
        Ok((Some(q), Some(k), Some(v)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device::Cpu;

    #[test]
    fn the_composed_form_equals_the_fused_one() {
        for (causal, [queries, keys, heads, kv_heads]) in
            [(false, [3, 5, 4, 2]), (true, [4, 4, 2, 2]), (true, [5, 3, 3, 1])]
        {
            let randn = |dims: [usize; 4]| Tensor::randn(0f64, 1.0, &dims, &Cpu).unwrap();
            let (q, k, v) =
                (randn([2, queries, heads, 4]), randn([2, keys, kv_heads, 4]), randn([2, keys, kv_heads, 3]));
            let (a, b) = (composed(&q, &k, &v, 0.7, causal).unwrap(), flash_attn(&q, &k, &v, 0.7, causal).unwrap());
            let diff = (a - b).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f64>().unwrap();
            assert!(diff < 1e-14, "{queries} queries, {keys} keys: {diff}");
        }
    }
}
