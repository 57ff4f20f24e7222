//! Attention: rotary positions, and the scaled dot product with grouped heads.
use crate::kernels::{self, RopePairs};
use crate::placement::{Placement, Replicate, Shard};
use crate::rules::{self, Row, Rows, Signature};
use crate::{DTensor, Error, Result};

const SUM: Placement = Placement::PARTIAL_SUM;

/// Which keys a query of [`DTensor::scaled_dot_product_attention`] sees.
#[derive(Debug, Clone, Copy, Default)]
pub enum AttentionMask<'a> {
    /// All of them.
    #[default]
    None,
    /// Those that are not later: query `i` of `q` sees key `j` of `k` if `j <= i + k - q`.
    Causal,
    /// All, with numbers that are added to the scaled scores and broadcast to `[batch, heads, q, k]`; -∞ hides a key.
    Additive(&'a DTensor),
}

impl DTensor {
    /// The rotary position embedding of these rows `[.., s, d]`, the first at position `offset`.
    ///
    /// `cos` and `sin` are `[t, d/2]`, see [`kernels::rope`]. All dims but the last may be sharded, the positions too.
    pub fn rope(&self, cos: &Self, sin: &Self, offset: usize, pairs: RopePairs) -> Result<Self> {
        let attributes = [offset, usize::from(pairs == RopePairs::Halves)];
        let signature = || self.rope_signature(cos, sin, offset);
        rules::run("rope", &attributes, &[self, cos, sin], signature, |x, _| {
            let first = offset + x[0].spec().local_block()[self.rank() - 2].start;
            Ok(kernels::rope(x[0].to_local(), x[1].to_local(), x[2].to_local(), first, pairs)?)
        })
    }

    fn rope_signature(&self, cos: &Self, sin: &Self, offset: usize) -> Result<Signature> {
        let of_one_dtype = cos.dtype() == self.dtype() && sin.dtype() == self.dtype();
        let fits = match (self.dims(), cos.dims()) {
            (&[.., s, d], &[t, half]) => d == 2 * half && s <= t.saturating_sub(offset) && cos.dims() == sin.dims(),
            _ => false,
        };
        if !fits || !of_one_dtype || cos.tracked() || sin.tracked() {
            let (x, cos, sin) = (self.spec(), cos.spec(), sin.spec());
            let want = "want [.., s, d], two [t, d/2] without gradient and of one dtype, and t at least";
            return Error::op(
                "rope",
                format!("{x} at position {offset} with tables {cos} and {sin}: {want} {offset} + s"),
            );
        }
        self.check_float("rope")?;
        let mut rows: Rows =
            (0..self.rank() - 1).map(|d| Row::new(Shard(d), &[Shard(d), Replicate, Replicate])).collect();
        rows.push(Row::new(SUM, &[SUM, Replicate, Replicate]));
        Ok(Signature::new(rows, self.dims(), self.dtype()))
    }

    /// Attention: `softmax(query · keyᵀ · scale + mask) · value`, with the scale `1/√dim` where none is given.
    ///
    /// The query is `[batch, heads, q, dim]`, the key `[batch, kv_heads, k, dim]`, the value `[batch, kv_heads, k, v]`;
    /// the result is `[batch, heads, q, v]`. `kv_heads` divides `heads`: each key head serves a group of consecutive
    /// query heads (Ainslie et al. 2023). Batch and heads stay sharded, in pieces of any sizes; where the pieces of the
    /// query heads cut through a group, each rank uses copies of the key heads. Queries stay sharded but for a causal
    /// mask.
    ///
    /// # Errors
    /// If shapes or dtypes do not agree.
    pub fn scaled_dot_product_attention(
        &self,
        key: &Self,
        value: &Self,
        mask: AttentionMask<'_>,
        scale: Option<f64>,
    ) -> Result<Self> {
        let [batch, heads, queries, dim, kv_heads, keys, width] = self.attention_sizes(key, value)?;
        let group = heads / kv_heads.max(1);
        let merged = group > 1 && self.cut_by_groups(group, kv_heads);
        let (key, value) = match group > 1 && !merged {
            true => (key.repeat_heads(group)?, value.repeat_heads(group)?),
            false => (key.clone(), value.clone()),
        };
        // The query heads of a group become more queries of their key head.
        let merge = |x: &Self, last: usize| match merged {
            true => x.reshape((batch, kv_heads, group * queries, last)),
            false => Ok(x.clone()),
        };
        let split = |x: Self, last: usize| if merged { x.reshape((batch, heads, queries, last)) } else { Ok(x) };
        let scores = split(merge(self, dim)?.matmul(&key.t()?)?, keys)?;
        let scale = scale.unwrap_or(1.0 / (dim as f64).sqrt());
        let weights = match mask {
            AttentionMask::None => scores.affine(scale, 0.0)?.softmax_last_dim()?,
            AttentionMask::Causal => scores.causal_softmax(scale)?,
            AttentionMask::Additive(mask) => scores.masked_softmax(mask, scale)?,
        };
        split(merge(&weights, keys)?.matmul(&value)?, width)
    }

    fn attention_sizes(&self, key: &Self, value: &Self) -> Result<[usize; 7]> {
        if let (&[b, h, q, d], &[kb, kh, k, kd], &[vb, vh, vk, v]) = (self.dims(), key.dims(), value.dims()) {
            let groups = if kh == 0 { h == 0 } else { h.is_multiple_of(kh) };
            let dtypes = key.dtype() == self.dtype() && value.dtype() == self.dtype();
            if (b, b, d, kh, k) == (kb, vb, kd, vh, vk) && groups && dtypes {
                return Ok([b, h, q, d, kh, k, v]);
            }
        }
        let (q, k, v) = (self.spec(), key.spec(), value.spec());
        let want = "want [b, h, q, d], [b, g, k, d] and [b, g, k, v] of one dtype with h a multiple of g";
        Error::op("scaled_dot_product_attention", format!("query {q}, key {k}, value {v}: {want}"))
    }

    /// Whether the pieces of the heads of this query consist of whole groups, and the queries are not cut.
    fn cut_by_groups(&self, group: usize, kv_heads: usize) -> bool {
        if self.sharded_axes(2).next().is_some() {
            return false;
        }
        let axes: Vec<usize> = self.sharded_axes(1).collect();
        match axes[..] {
            _ if kv_heads == 1 => axes.len() < 2,
            [] => true,
            [axis] => self.spec().cut(axis, 1).sizes.iter().all(|size| size.is_multiple_of(group)),
            _ => {
                let parts: usize = axes.iter().map(|&axis| self.mesh().shape()[axis]).product();
                kv_heads.is_multiple_of(parts) && axes.iter().all(|&axis| self.spec().sizes(axis).is_none())
            }
        }
    }

    /// Each head of `[batch, heads, ..]` `times` times in a row.
    fn repeat_heads(&self, times: usize) -> Result<Self> {
        let dims = self.dims();
        let signature = || {
            let mut shape = dims.to_vec();
            shape[1] *= times;
            let mut rows: Rows = [0, 2, 3].into_iter().map(|d| Row::new(Shard(d), &[Shard(d)])).collect();
            rows.push(Row::new(SUM, &[SUM]));
            Ok(Signature::new(rows, &shape, self.dtype()))
        };
        rules::run("repeat_heads", &[times], &[self], signature, |x, out| {
            let (b, h, k, d) = x[0].to_local().dims4()?;
            let repeated = x[0].to_local().unsqueeze(2)?.broadcast_as((b, h, times, k, d))?;
            Ok(repeated.reshape(out.local_shape().as_slice())?)
        })
    }
}
