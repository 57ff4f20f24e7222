//! Rotary position embedding, and scaled dot product attention with grouped heads.
//!
#![doc = include_str!("attention/README.md")]

mod heads;
mod mask;
mod options;
mod order;
mod ring;
mod run;
mod sequence;
mod sinks;

use crate::kernels::{self, RopePairs};
use crate::layout::{Placement, Replicate, Shard};
use crate::rules::{self, ShardingRule, ShardingRules, Signature};
use crate::{DTensor, Error, Result};
use candle_core::Tensor;
pub use options::{Attention, ContextWay, Documents};
pub use order::TokenOrder;
use std::cell::RefCell;

const SUM: Placement = Placement::PARTIAL_SUM;

/// The keys that a query of [`DTensor::scaled_dot_product_attention`] sees.
#[derive(Debug, Clone, Copy, Default)]
pub enum AttentionMask<'a> {
    /// All keys.
    #[default]
    None,
    /// Keys that are not later: query `i` of `q` sees key `j` of `k` if `j <= i + k - q`.
    Causal,
    /// All keys. This tensor, broadcast to `[batch, heads, q, k]`, is added to the scaled scores; -∞ hides a key.
    Additive(&'a DTensor),
}

impl DTensor {
    /// Applies the rotary position embedding to rows `[.., s, d]`. The first row is at position `offset`.
    ///
    /// `cos` and `sin` are `[t, d/2]`, or `[b, t, d/2]` with angles of each element of the batch; see [`kernels::rope`]. All
    /// dims but the last may be sharded, also the positions.
    #[track_caller]
    pub fn rope(&self, cos: &Self, sin: &Self, offset: usize, pairs: RopePairs) -> Result<Self> {
        self.rope_by([cos, sin], offset, pairs, &|[x, cos, sin], first| {
            Ok(kernels::rope(x, cos, sin, first, pairs)?)
        })
    }

    /// Applies [`rope`](Self::rope) to queries and to keys.
    ///
    /// On a GPU it is one launch where the local tensors differ at most in their heads, and one for both gradients.
    #[track_caller]
    pub fn rope_both(
        &self,
        key: &Self,
        cos: &Self,
        sin: &Self,
        offset: usize,
        pairs: RopePairs,
    ) -> Result<[Self; 2]> {
        let held = key.to_local();
        let first_of_keys = || key.first_row(offset);
        let are_alike = |x: &Tensor| {
            let of_batch = |x: &Tensor| x.dims().first().copied();
            x.rank() == held.rank()
                && of_batch(x) == of_batch(held)
                && x.dims().last_chunk::<2>() == held.dims().last_chunk::<2>()
        };
        // The turned keys, with what they were made of.
        let made = RefCell::new(None);
        let of = |x: [&Tensor; 3], first: usize| (x.map(Tensor::id), first);
        let query = self.rope_by([cos, sin], offset, pairs, &|[x, cos, sin], first| {
            if x.device().is_cpu() || !are_alike(x) || first != first_of_keys() {
                return Ok(kernels::rope(x, cos, sin, first, pairs)?);
            }
            let [query, key] = kernels::rope_both([x, held], cos, sin, first, pairs)?;
            *made.borrow_mut() = Some((of([held, cos, sin], first), key));
            Ok(query)
        })?;
        let key = key.rope_by([cos, sin], offset, pairs, &|x, first| match made.take() {
            Some((known, key)) if known == of(x, first) => Ok(key),
            _ => Ok(kernels::rope(x[0], x[1], x[2], first, pairs)?),
        })?;
        Ok([query, key])
    }

    /// The position of the first row that this rank has.
    fn first_row(&self, offset: usize) -> usize {
        offset + self.spec().local_block()[self.rank() - 2].start
    }

    /// Applies the rotary position embedding to local rows and tables, from a position on, by `turn`.
    #[track_caller]
    fn rope_by(
        &self,
        [cos, sin]: [&Self; 2],
        offset: usize,
        pairs: RopePairs,
        turn: &dyn Fn([&Tensor; 3], usize) -> Result<Tensor>,
    ) -> Result<Self> {
        let attributes = [offset, usize::from(pairs == RopePairs::Halves)];
        let signature = || self.rope_signature(cos, sin, offset);
        rules::run("rope", &attributes, &[self, cos, sin], signature, |x, _| {
            turn([x[0].to_local(), x[1].to_local(), x[2].to_local()], x[0].first_row(offset))
        })
    }

    #[track_caller]
    fn rope_signature(&self, cos: &Self, sin: &Self, offset: usize) -> Result<Signature> {
        let of_one_dtype = cos.dtype() == self.dtype() && sin.dtype() == self.dtype();
        let fits = |s: usize, d: usize, t: usize, half: usize| {
            d == 2 * half && s <= t.saturating_sub(offset) && cos.dims() == sin.dims()
        };
        let fits = match (self.dims(), cos.dims()) {
            (&[.., s, d], &[t, half]) => fits(s, d, t, half),
            (&[b, .., s, d], &[tables, t, half]) => self.rank() > 2 && b == tables && fits(s, d, t, half),
            _ => false,
        };
        if !fits || !of_one_dtype || cos.tracked() || sin.tracked() {
            let (x, cos, sin) = (self.spec(), cos.spec(), sin.spec());
            let want = "expected [.., s, d], two [t, d/2] or [b, t, d/2] without gradient and of one dtype, and t at least";
            return Error::op(
                "rope",
                format!("{x} at position {offset} with tables {cos} and {sin}: {want} {offset} + s"),
            );
        }
        self.check_float("rope")?;
        let of_elements = cos.rank() == 3;
        let table = |d: usize| if of_elements && d == 0 { Shard(0) } else { Replicate };
        let mut rows: ShardingRules = (0..self.rank() - 1)
            .map(|d| ShardingRule::new(Shard(d), &[Shard(d), table(d), table(d)]))
            .collect();
        rows.push(ShardingRule::new(SUM, &[SUM, Replicate, Replicate]));
        Ok(Signature::new(rows, self.dims(), self.dtype()))
    }

    /// Attention: `softmax(query · keyᵀ · scale) · value`. The matrix of scores is never stored.
    ///
    /// The query is `[batch, q, heads, dim]`, the key `[batch, k, kv_heads, dim]` and the value `[batch, k, kv_heads,
    /// v]`; the result is `[batch, q, heads, v]`. `kv_heads` divides `heads`: each key head serves a group of
    /// consecutive query heads (Ainslie et al. 2023). With `causal`, query `i` sees key `j` if `j <= i + k - q`. Batch
    /// and heads stay sharded, with shards of any sizes. Where shards of the query heads cut through a group, each rank
    /// uses copies of the key heads. Queries stay sharded, with replicated keys, or with keys that are sharded along
    /// the sequence too. [`Attention`] has more options. The kernel is [`kernels::flash_attn`].
    ///
    /// # Errors
    /// If shapes or dtypes do not agree.
    #[track_caller]
    pub fn flash_attn(&self, key: &Self, value: &Self, scale: f64, causal: bool) -> Result<Self> {
        Attention::default().scale(scale).causal(causal).of(self, key, value)
    }

    /// Attention with a mask: `softmax(query · keyᵀ · scale + mask) · value`. The default scale is `1/√dim`.
    ///
    /// The query is `[batch, heads, q, dim]`, the key `[batch, kv_heads, k, dim]`, the value `[batch, kv_heads, k, v]`;
    /// the result is `[batch, heads, q, v]`. Without an additive mask this is [`flash_attn`](Self::flash_attn) with
    /// heads and rows swapped.
    ///
    /// # Errors
    /// If shapes or dtypes do not agree.
    #[track_caller]
    pub fn scaled_dot_product_attention(
        &self,
        key: &Self,
        value: &Self,
        mask: AttentionMask<'_>,
        scale: Option<f64>,
    ) -> Result<Self> {
        let sizes = match (self.dims(), key.dims(), value.dims()) {
            (&[b, h, _, d], &[kb, g, k, kd], &[vb, vg, vk, _]) => {
                ((b, b, d, g, k) == (kb, vb, kd, vg, vk)).then_some(d).zip(groups(h, g))
            }
            _ => None,
        };
        let dtypes = key.dtype() == self.dtype() && value.dtype() == self.dtype();
        let Some((dim, _)) = sizes.filter(|_| dtypes) else {
            let (q, k, v) = (self.spec(), key.spec(), value.spec());
            let want =
                "expected [b, h, q, d], [b, g, k, d] and [b, g, k, v] of one dtype with h a multiple of g";
            return Error::op(
                "scaled_dot_product_attention",
                format!("query {q}, key {k}, value {v}: {want}"),
            );
        };
        let scale = if dim == 0 { 1.0 } else { scale.unwrap_or(1.0 / (dim as f64).sqrt()) };
        if let AttentionMask::Additive(mask) = mask {
            return self.capped_attention(key, value, mask, scale, None);
        }
        let rows_first = |x: &Self| x.transpose(1, 2);
        let (query, key, value) = (rows_first(self)?, rows_first(key)?, rows_first(value)?);
        query.flash_attn(&key, &value, scale, matches!(mask, AttentionMask::Causal))?.transpose(1, 2)
    }

    /// Attention with an additive mask and, if there is a `cap`, scores in ±cap: `softmax(cap · tanh(query · keyᵀ · scale /
    /// cap) + mask) · value`, as in Gemma 2.
    ///
    /// Shapes are those of [`scaled_dot_product_attention`](Self::scaled_dot_product_attention).
    ///
    /// # Errors
    /// If shapes or dtypes do not agree.
    #[track_caller]
    pub fn capped_attention(
        &self,
        key: &Self,
        value: &Self,
        mask: &Self,
        scale: f64,
        cap: Option<f64>,
    ) -> Result<Self> {
        let heads = |x: &Self| x.dims().get(1).copied().unwrap_or(0);
        let Some(group) = groups(heads(self), heads(key)).filter(|_| heads(key) == heads(value)) else {
            let (q, k, v) = (self.spec(), key.spec(), value.spec());
            return Error::op(
                "capped_attention",
                format!("query {q}, key {k}, value {v}: key heads do not divide the heads"),
            );
        };
        let (key, value) = (key.repeat_heads(group, 1)?, value.repeat_heads(group, 1)?);
        let scores = self.matmul(&key.t()?)?;
        let weights = match cap {
            Some(cap) => {
                scores.affine(scale / cap, 0.0)?.tanh()?.affine(cap, 0.0)?.masked_softmax(mask, 1.0)?
            }
            None => scores.masked_softmax(mask, scale)?,
        };
        weights.matmul(&value)
    }

    /// Returns whether the shards of the heads of this query `[batch, q, heads, dim]` consist of whole groups.
    fn is_cut_by_groups(&self, group: usize, kv_heads: usize) -> bool {
        let axes: Vec<usize> = self.sharded_axes(2).collect();
        match axes[..] {
            [] => true,
            [axis] => self.spec().cut(axis, 2).sizes.iter().all(|size| size.is_multiple_of(group)),
            _ => {
                let parts: usize = axes.iter().map(|&axis| self.mesh().shape()[axis]).product();
                kv_heads.is_multiple_of(parts) && axes.iter().all(|&axis| self.spec().sizes(axis).is_none())
            }
        }
    }

    /// Repeats each head `times` times in a row. The heads are dim `dim` of four.
    #[track_caller]
    fn repeat_heads(&self, times: usize, dim: usize) -> Result<Self> {
        if times == 1 {
            return Ok(self.clone());
        }
        let dims = self.dims();
        let signature = || {
            let mut shape = dims.to_vec();
            shape[dim] *= times;
            let others = (0..4).filter(|&d| d != dim);
            let mut rows: ShardingRules = others.map(|d| ShardingRule::new(Shard(d), &[Shard(d)])).collect();
            rows.push(ShardingRule::new(SUM, &[SUM]));
            Ok(Signature::new(rows, &shape, self.dtype()))
        };
        rules::run("repeat_heads", &[times, dim], &[self], signature, |x, out| {
            let mut each = x[0].to_local().dims().to_vec();
            each.insert(dim + 1, times);
            let repeated = x[0].to_local().unsqueeze(dim + 1)?.broadcast_as(each)?;
            Ok(repeated.reshape(out.local_shape().as_slice())?)
        })
    }
}

/// Returns a query `[batch, q, heads, dim]` of one with a dim for the heads of each key head.
fn all_heads(query: &Tensor) -> Result<Tensor> {
    Ok(match *query.dims() {
        [batch, rows, groups, group, dim] => kernels::reshape(query, (batch, rows, groups * group, dim))?,
        _ => query.clone(),
    })
}

/// The number of `heads` that share one of `kv_heads`.
fn groups(heads: usize, kv_heads: usize) -> Option<usize> {
    match kv_heads {
        0 => (heads == 0).then_some(1),
        n => heads.is_multiple_of(n).then(|| heads / n),
    }
}
