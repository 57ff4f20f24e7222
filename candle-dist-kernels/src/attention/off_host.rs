//! Attention of tensors that are not on the host: by kernels on CUDA devices, elsewhere made of candle's operations on matrices of scores.
//!
//! The graph keeps no matrix of scores and none of visible pairs: the backward pass computes them again. 16-bit floats are widened to f32, as on the host.
//!
//! A pair of a query and a key that it does not see has a weight of 0. In a product, 0 times NaN is NaN, so rows that are not
//! finite are replaced by zeros before each product, and those that see one get NaN after it.
use super::heads::AttentionSizes;
use super::node::{graph_node, sizes};
use super::{KeyBlock, Scale};
use crate::compute_dtype;
use crate::softmax::{softmax, softmax_of_seen};
use candle_core::{D, DType, Device, Result, Tensor};
use candle_dist_base::{Fresh, empty};
use itertools::Itertools;
use std::ops::Range;

/// Attention over blocks of keys that are all rows of the key and the value, on the device of the inputs.
///
/// See [`flash_attn_of_blocks`](crate::parts::flash_attn_of_blocks) for `log_sums`.
pub(crate) fn attend_off_host(
    [q, k, v]: [&Tensor; 3],
    scale: Scale,
    blocks: &[KeyBlock],
    log_sums: bool,
) -> Result<Tensor> {
    let sizes = sizes([q, k, v])?;
    let AttentionSizes { batch, queries, heads, width, .. } = sizes;
    if sizes.is_empty() {
        if log_sums {
            let dtype = compute_dtype("flash_attn", q)?;
            if batch * queries * heads == 0 {
                return empty::zeros_of(&[q, k, v], (batch, queries, heads, width + 1), dtype);
            }
            let zeros = empty::zeros_of(&[q, k, v], (batch, queries, heads, width), dtype)?;
            let nothing = Tensor::full(f32::NEG_INFINITY, (batch, queries, heads, 1), q.device())?;
            return Tensor::cat(&[zeros, nothing.to_dtype(dtype)?], 3);
        }
        return empty::zeros_of(&[q, k, v], (batch, queries, heads, width), q.dtype());
    }
    #[cfg(feature = "cuda")]
    if crate::device_text::is_fused(q.device())
        && let Some(fused) = super::cuda::FusedAttention::of([q, k, v], (scale, log_sums), blocks, sizes)?
    {
        return fused.attend([q, k, v]);
    }
    let ranges = match blocks {
        [block] if block.visible.is_all(block.rows.len()) => None,
        _ => Some(Ranges::new(blocks, sizes, q.device())?),
    };
    let pass = move || -> Result<AttentionPass> {
        let seen = ranges.as_ref().map(Ranges::seen).transpose()?;
        Ok(AttentionPass { scale, seen, sizes, log_sums })
    };
    let out = pass()?.forward([&q.detach(), &k.detach(), &v.detach()])?;
    if ![q, k, v].iter().any(|x| x.track_op()) {
        return Ok(out);
    }
    let made = Fresh::copy_of(&out)?;
    graph_node("flash_attn", [q, k, v], made, move |inputs, [out, grad]| {
        pass()?.backward(inputs.map(Tensor::detach).each_ref(), [&out.detach(), grad])
    })
}

/// The keys that each query sees, on the device of the inputs. They are small: a pass makes a matrix of pairs of them.
struct Ranges {
    /// The first key that a query sees of each block, and the end of those keys: `[1 or batch, q, blocks]`.
    bounds: [Tensor; 2],
    /// The block of each key, where there are several.
    block_of_key: Option<Tensor>,
    /// The numbers of the keys.
    keys: Tensor,
}

impl Ranges {
    fn new(
        blocks: &[KeyBlock],
        AttentionSizes { queries, keys, .. }: AttentionSizes,
        device: &Device,
    ) -> Result<Self> {
        let lists = blocks.iter().map(|block| block.visible.lists().len()).max().unwrap_or(1);
        let bounds = |of: fn(&Range<usize>) -> usize| {
            let of_query = |(list, query)| {
                let of_block =
                    move |block: &KeyBlock| (block.rows.start + of(&block.visible.of(list)[query])) as u32;
                blocks.iter().map(of_block)
            };
            let bounds: Vec<u32> = (0..lists).cartesian_product(0..queries).flat_map(of_query).collect();
            Tensor::from_vec(bounds, (lists, queries, blocks.len()), device)
        };
        let mut block_of_key = vec![0; keys];
        for (number, block) in blocks.iter().enumerate() {
            block_of_key[block.rows.clone()].fill(number as u32);
        }
        let block_of_key = (blocks.len() > 1).then(|| Tensor::new(block_of_key, device)).transpose()?;
        let bounds = [bounds(|range| range.start)?, bounds(|range| range.end)?];
        Ok(Self { bounds, block_of_key, keys: Tensor::arange(0, keys as u32, device)? })
    }

    fn seen(&self) -> Result<VisiblePairs> {
        let of_keys = |bounds: &Tensor| match &self.block_of_key {
            Some(block_of_key) => bounds.index_select(block_of_key, 2),
            None => Ok(bounds.clone()),
        };
        let [start, end] = self.bounds.each_ref().map(of_keys);
        let pairs = (self.keys.broadcast_ge(&start?)? * self.keys.broadcast_lt(&end?)?)?;
        Ok(VisiblePairs { factors: pairs.to_dtype(DType::F32)?, pairs: pairs.unsqueeze(1)?.unsqueeze(1)? })
    }
}

/// The pairs of a query and a key that it sees.
struct VisiblePairs {
    /// 1 or 0 of u8, `[1 or batch, 1, 1, q, k]`.
    pairs: Tensor,
    /// The same of f32, `[1 or batch, q, k]`.
    factors: Tensor,
}

impl VisiblePairs {
    /// `x` where a pair is seen, and 0 elsewhere.
    fn only(&self, x: &Tensor) -> Result<Tensor> {
        self.pairs.broadcast_as(x.shape())?.where_cond(x, &x.zeros_like()?)
    }
}

/// Which side of the pairs a product runs over.
#[derive(Clone, Copy, PartialEq)]
enum PairSide {
    Keys,
    Queries,
}

/// One pass, forward or backward.
struct AttentionPass {
    scale: Scale,
    seen: Option<VisiblePairs>,
    sizes: AttentionSizes,
    log_sums: bool,
}

impl AttentionPass {
    fn forward(&self, inputs: [&Tensor; 3]) -> Result<Tensor> {
        let [q, k, v] = wide(inputs)?;
        let scores = self.scores(&q, &k)?;
        let mixed = self.to_rows(&self.mix(&self.weights(&scores)?, &v)?)?;
        match self.log_sums {
            true => Tensor::cat(&[mixed, self.to_rows(&self.log_sums_of(&scores)?)?], 3),
            false => mixed.to_dtype(inputs[0].dtype()),
        }
    }

    /// The logarithm of the sum of the exponentials of each query's scores, `[batch, kv_heads, group, q, 1]`.
    fn log_sums_of(&self, scores: &Tensor) -> Result<Tensor> {
        let Some(seen) = &self.seen else { return scores.log_sum_exp(D::Minus1)?.unsqueeze(D::Minus1) };
        let pairs = seen.pairs.broadcast_as(scores.shape())?;
        let hidden = Tensor::full(-1e30f32, (), scores.device())?.to_dtype(scores.dtype())?;
        let masked = pairs.where_cond(scores, &hidden.broadcast_as(scores.shape())?)?;
        let top = masked.max_keepdim(D::Minus1)?;
        let sums = seen.only(&masked.broadcast_sub(&top)?.exp()?)?.sum_keepdim(D::Minus1)?;
        sums.log()?.add(&top)
    }

    fn backward(&self, inputs: [&Tensor; 3], of_result: [&Tensor; 2]) -> Result<[Tensor; 3]> {
        let ([q, k, v], [out, grad], dtype) = (wide(inputs)?, wide(of_result)?, inputs[0].dtype());
        let raw = self.uncapped(&q, &k)?;
        let weights = self.weights(&self.capped(&raw)?)?;
        let (of_values, width) = (|x: &Tensor| x.narrow(3, 0, self.sizes.width), self.sizes.width);
        let products = (of_values(&out)? * of_values(&grad)?)?.sum_keepdim(D::Minus1)?;
        let products = match self.log_sums {
            // A score moves the logarithm by its weight, as it moves the product.
            true => (products - grad.narrow(3, width, 1)?)?,
            false => products,
        };
        let (of_rows, grad) = (self.by_heads(&products)?, of_values(&grad)?.contiguous()?);
        let of_weights = self.pairs(&grad, &v)?;
        let mut of_scores = (weights.mul(&of_weights.broadcast_sub(&of_rows)?)? * self.scale.factor)?;
        if let Some(cap) = self.scale.cap {
            // A capped score is flatter the nearer it is to the cap. It does not tell how near: few of its digits do.
            let e = (raw.abs()? * (-2.0 / cap))?.exp()?;
            of_scores = of_scores.mul(&((&e * 4.0)? / (e + 1.0)?.sqr()?)?)?;
        }
        if let Some(seen) = &self.seen {
            of_scores = seen.only(&of_scores)?;
        }
        let dq = self.to_rows(&self.mix(&of_scores, &k)?)?;
        let (dk, dv) = (self.collect(&of_scores, &q)?, self.collect(&weights, &grad)?);
        Ok([dq.to_dtype(dtype)?, dk.to_dtype(dtype)?, dv.to_dtype(dtype)?])
    }

    /// The scores `[batch, kv_heads, group, q, k]`.
    fn scores(&self, q: &Tensor, k: &Tensor) -> Result<Tensor> {
        self.capped(&self.uncapped(q, k)?)
    }

    fn uncapped(&self, q: &Tensor, k: &Tensor) -> Result<Tensor> {
        self.pairs(q, k)? * self.scale.factor
    }

    fn capped(&self, scores: &Tensor) -> Result<Tensor> {
        match self.scale.cap {
            Some(cap) => (scores / cap)?.tanh()? * cap,
            None => Ok(scores.clone()),
        }
    }

    fn weights(&self, scores: &Tensor) -> Result<Tensor> {
        match &self.seen {
            Some(seen) => softmax_of_seen(scores, &seen.pairs),
            None => softmax(scores),
        }
    }

    /// The products of the rows `[batch, q, heads, n]` with the rows `[batch, k, kv_heads, n]`.
    fn pairs(&self, rows: &Tensor, keys: &Tensor) -> Result<Tensor> {
        let products = self.flat(&self.by_heads(rows)?)?.matmul(&heads_first(keys)?.t()?)?;
        products.reshape(self.shape(self.sizes.keys))
    }

    /// Mixes the rows `[batch, k, kv_heads, n]` of keys for each query.
    fn mix(&self, weights: &Tensor, keys: &Tensor) -> Result<Tensor> {
        let (finite, poison) = self.finite(keys, PairSide::Keys)?;
        let mixed = self.flat(weights)?.matmul(&heads_first(&finite)?)?.reshape(self.shape(keys.dim(3)?))?;
        match poison {
            Some(poison) => mixed.broadcast_add(&heads_first(&poison)?.unsqueeze(2)?),
            None => Ok(mixed),
        }
    }

    /// Collects the rows `[batch, q, heads, n]` of the queries for each key: `[batch, k, kv_heads, n]`.
    fn collect(&self, weights: &Tensor, rows: &Tensor) -> Result<Tensor> {
        let (finite, poison) = self.finite(rows, PairSide::Queries)?;
        let collected = self.flat(weights)?.t()?.matmul(&self.flat(&self.by_heads(&finite)?)?)?;
        let collected = heads_first(&collected)?;
        match poison {
            Some(poison) => collected.broadcast_add(&poison),
            None => Ok(collected),
        }
    }

    /// Returns rows `[batch, rows, heads, n]` without those that are not finite, and what is added for each of the other
    /// side: NaN if it sees such a row, else 0.
    fn finite(&self, rows: &Tensor, over: PairSide) -> Result<(Tensor, Option<Tensor>)> {
        let Some(seen) = &self.seen else { return Ok((rows.clone(), None)) };
        let AttentionSizes { batch, kv_heads, .. } = self.sizes;
        // The sum of zeros is 0, unless there is an infinity or NaN.
        let sums = (rows * 0.0)?.sum_keepdim(D::Minus1)?;
        let bad = sums.ne(&sums.zeros_like()?)?;
        let finite = bad.broadcast_as(rows.shape())?.where_cond(&rows.zeros_like()?, rows)?;
        let (len, heads) = (rows.dim(1)?, rows.dim(2)?);
        let bad = bad.to_dtype(DType::F32)?.reshape((batch, len, kv_heads, heads / kv_heads))?.sum(3)?;
        let factors = if over == PairSide::Keys { seen.factors.clone() } else { seen.factors.t()? };
        let counts = match factors.dim(0)? {
            1 => {
                let all = bad.transpose(0, 1)?.reshape((len, batch * kv_heads))?;
                let counts = factors.squeeze(0)?.matmul(&all)?;
                counts.reshape((counts.dim(0)?, batch, kv_heads))?.transpose(0, 1)?.contiguous()?
            }
            _ => factors.matmul(&bad)?,
        };
        // 1 ÷ 1 - 1 is 0, and 0 ÷ 0 is NaN.
        let none = counts.eq(&counts.zeros_like()?)?.to_dtype(DType::F32)?;
        let poison = none.div(&none)?.affine(1.0, -1.0)?.to_dtype(rows.dtype())?;
        Ok((finite, Some(poison.unsqueeze(3)?)))
    }

    /// `[batch, q, heads, n]` as `[batch, kv_heads, group, q, n]`.
    fn by_heads(&self, rows: &Tensor) -> Result<Tensor> {
        heads_first(rows)?.reshape(self.shape(rows.dim(3)?))
    }

    /// The queries of a group one after another: `[batch, kv_heads, group · q, n]`.
    fn flat(&self, x: &Tensor) -> Result<Tensor> {
        x.flatten(2, 3)
    }

    /// `[batch, kv_heads, group, q, n]` as `[batch, q, heads, n]`.
    fn to_rows(&self, x: &Tensor) -> Result<Tensor> {
        heads_first(&x.flatten(1, 2)?)
    }

    fn shape(&self, last: usize) -> (usize, usize, usize, usize, usize) {
        let AttentionSizes { batch, queries, heads, kv_heads, .. } = self.sizes;
        (batch, kv_heads, heads / kv_heads, queries, last)
    }
}

/// 16-bit floats as f32: their products may overflow, and cancel badly.
fn wide<const N: usize>(inputs: [&Tensor; N]) -> Result<[Tensor; N]> {
    let mut made = inputs.map(Tensor::clone);
    for x in &mut made {
        *x = x.to_dtype(compute_dtype("flash_attn", x)?)?;
    }
    Ok(made)
}

/// Swaps dims 1 and 2, rows and heads, in new memory: a product takes them in this order only.
fn heads_first(x: &Tensor) -> Result<Tensor> {
    x.transpose(1, 2)?.contiguous()
}
