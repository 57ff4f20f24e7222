use candle_core::{Device, Result, Tensor, bail};
use candle_dist::empty;

use super::attention::{self, AttentionSizes, KeyBlock, Scale, Visible, attend};
use super::{check_dtype, compute_dtype};

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
    compute_dtype("flash_attn", query)?;
    if AttentionSizes::of(query.dims(), key.dims(), value.dims()).is_none() {
        let (q, k, v) = (query.shape(), key.shape(), value.shape());
        bail!(
            "flash_attn: query {q:?}, key {k:?}, value {v:?}: expected [b, q, h, d], [b, k, g, d], [b, k, g, v], g | h"
        );
    }
    check_dtype("flash_attn", query, key)?;
    check_dtype("flash_attn", query, value)?;
    let (queries, keys) = (query.dim(1)?, key.dim(1)?);
    flash_attn_of_blocks(
        [query, key, value],
        scale.into(),
        vec![KeyBlock { rows: 0..keys, visible: Visible::plain(queries, keys, causal) }],
    )
}

/// Attention over blocks of keys that follow each other and are all rows. The shapes fit each other.
pub fn flash_attn_of_blocks([query, key, value]: [&Tensor; 3], scale: Scale, blocks: Vec<KeyBlock>) -> Result<Tensor> {
    let dtype = compute_dtype("flash_attn", query)?;
    if !query.device().is_cpu() {
        return off_host([query, key, value], scale, &blocks);
    }
    let [q, k, v] = [query, key, value].map(|x| x.to_dtype(dtype));
    attend([&q?, &k?, &v?], scale, blocks)?.to_dtype(query.dtype())
}

/// Like [`composed`], also where there are no queries, keys or heads.
fn off_host(inputs @ [query, key, value]: [&Tensor; 3], scale: Scale, blocks: &[KeyBlock]) -> Result<Tensor> {
    if !attention::sizes(inputs)?.is_empty() {
        return composed(inputs, scale, blocks);
    }
    let (b, q, h, _) = query.dims4()?;
    empty::zeros_of(&[query, key, value], (b, q, h, value.dim(3)?), query.dtype())
}

fn composed([query, key, value]: [&Tensor; 3], scale: Scale, blocks: &[KeyBlock]) -> Result<Tensor> {
    let (b, q, h, _) = query.dims4()?;
    let heads_first = |x: &Tensor| -> Result<Tensor> {
        let (_, t, g, d) = x.dims4()?;
        let each = x.transpose(1, 2)?.unsqueeze(2)?.broadcast_as((b, g, h / g.max(1), t, d))?;
        each.reshape((b, h, t, d))
    };
    let scores = (heads_first(query)?.matmul(&heads_first(key)?.t()?)? * scale.factor)?;
    let scores = match scale.cap {
        Some(cap) => ((scores / cap)?.tanh()? * cap)?,
        None => scores,
    };
    let weights = match blocks {
        [block] if block.visible.is_all(block.rows.len()) => super::softmax(&scores)?,
        _ => super::softmax::softmax_of_seen(&scores, &seen(blocks, key.dim(1)?, query.device())?)?,
    };
    weights.matmul(&heads_first(value)?)?.transpose(1, 2)?.reshape((b, q, h, value.dim(3)?))
}

/// Returns which keys each query sees, `[1 or batch, 1, q, k]`.
fn seen(blocks: &[KeyBlock], keys: usize, device: &Device) -> Result<Tensor> {
    let lists = blocks.iter().map(|block| block.visible.lists().len()).max().unwrap_or(1);
    let queries = blocks.first().map_or(0, |block| block.visible.lists().first().map_or(0, Vec::len));
    let mut seen = vec![0u8; lists * queries * keys];
    if seen.is_empty() {
        return Tensor::from_vec(seen, (lists, 1, queries, keys), device);
    }
    for block in blocks {
        for element in 0..lists {
            for (i, range) in block.visible.of(element).iter().enumerate() {
                let row = (element * queries + i) * keys + block.rows.start;
                seen[row + range.start..row + range.end].fill(1);
            }
        }
    }
    Tensor::from_vec(seen, (lists, 1, queries, keys), device)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device::Cpu;

    #[test]
    fn where_there_is_nothing_the_result_is_zeros_in_the_graph_of_all_inputs() {
        let full = [2, 3, 5, 4, 2, 4, 3];
        for (at, name) in ["batch", "queries", "keys", "heads", "key heads", "dim", "width"].into_iter().enumerate() {
            let mut sizes = full;
            sizes[at] = 0;
            if sizes[3] * sizes[4] == 0 {
                (sizes[3], sizes[4]) = (0, 0);
            }
            let [batch, queries, keys, heads, kv_heads, dim, width] = sizes;
            let var = |dims: [usize; 4]| candle_core::Var::zeros(&dims, candle_core::DType::F32, &Cpu).unwrap();
            let q = var([batch, queries, heads, dim]);
            let [k, v] = [dim, width].map(|width| var([batch, keys, kv_heads, width]));
            let blocks = || vec![KeyBlock { rows: 0..keys, visible: Visible::plain(queries, keys, true) }];
            let got = off_host([&q, &k, &v], 0.5.into(), &blocks()).unwrap();
            let want = flash_attn_of_blocks([&q, &k, &v], 0.5.into(), blocks()).unwrap();
            assert_eq!(got.dims(), want.dims(), "no {name}");
            let elements = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(elements(&got), elements(&want), "no {name}");
            let grads = got.sum_all().unwrap().backward().unwrap();
            for var in [&q, &k, &v] {
                let grad = grads.get(var).unwrap();
                assert_eq!((grad.dims(), elements(grad)), (var.dims(), vec![0.0; var.elem_count()]), "no {name}");
            }
        }
    }

    #[test]
    fn the_composed_form_equals_the_fused_one() {
        for (causal, [queries, keys, heads, kv_heads]) in
            [(false, [3, 5, 4, 2]), (true, [4, 4, 2, 2]), (true, [5, 3, 3, 1])]
        {
            let randn = |dims: [usize; 4]| Tensor::randn(0f64, 1.0, &dims, &Cpu).unwrap();
            let (q, k, v) =
                (randn([2, queries, heads, 4]), randn([2, keys, kv_heads, 4]), randn([2, keys, kv_heads, 3]));
            let visible = Visible::plain(queries, keys, causal);
            for cap in [None, Some(1.5)] {
                let scale = Scale { factor: 0.7, cap };
                let blocks = vec![KeyBlock { rows: 0..keys, visible: visible.clone() }];
                let a = composed([&q, &k, &v], scale, &blocks).unwrap();
                let b = flash_attn_of_blocks([&q, &k, &v], scale, blocks).unwrap();
                let diff = (a - b).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f64>().unwrap();
                assert!(diff < 1e-14, "{queries} queries, {keys} keys, cap {cap:?}: {diff}");
            }
        }
    }
}
