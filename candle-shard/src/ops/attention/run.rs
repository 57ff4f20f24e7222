//! Attention with options: checks, groups of heads, and the rows of layouts.
use super::mask::Mask;
use super::options::Attention;
use super::{all_heads, groups, sequence};
use crate::kernels::{self, Scale};
use crate::layout::{Placement, Replicate, Shard};
use crate::rules::{self, ShardingRule, ShardingRules, Signature};
use crate::strict::inherent;
use crate::{DTensor, Error, Result};

const SUM: Placement = Placement::PARTIAL_SUM;

impl Attention {
    /// Computes attention of a query `[batch, q, heads, dim]`, a key `[batch, k, kv_heads, dim]` and a value `[batch, k,
    /// kv_heads, v]`; the result is `[batch, q, heads, v]`.
    ///
    /// # Errors
    /// If shapes or dtypes do not agree, the options do not fit the shapes, or a [`way`](Self::way) is asked for that
    /// the layouts do not allow. They are the same on all ranks.
    #[track_caller]
    pub fn of(&self, query: &DTensor, key: &DTensor, value: &DTensor) -> Result<DTensor> {
        let sizes = match (query.dims(), key.dims(), value.dims()) {
            (&[b, q, h, d], &[kb, k, g, kd], &[vb, vk, vg, _]) => (groups(h, g).is_some()
                && (b, b, d, g, k) == (kb, vb, kd, vg, vk))
                .then_some((b, [q, k], h, d, g)),
            _ => None,
        };
        let dtypes = key.dtype() == query.dtype() && value.dtype() == query.dtype();
        let Some((batch, [queries, keys], heads, dim, kv_heads)) = sizes.filter(|_| dtypes) else {
            let (q, k, v) = (query.spec(), key.spec(), value.spec());
            let want =
                "expected [b, q, h, d], [b, k, g, d] and [b, k, g, v] of one dtype with h a multiple of g";
            return Error::op("flash_attn", format!("query {q}, key {k}, value {v}: {want}"));
        };
        if !kernels::is_computed(query.dtype()) {
            return Error::op(
                "flash_attn",
                format!("query {}: expected f16, bf16, f32 or f64", query.spec()),
            );
        }
        self.check(batch, queries, keys)?;
        if dim == 0 {
            // All scores are 0 whatever their factor, as those of one dim of zeros.
            let (query, key) = (query.pad_with_zeros(3, 0, 1)?, key.pad_with_zeros(3, 0, 1)?);
            return self.clone().scale(1.0).of(&query, &key, value);
        }
        let mask = Mask::new(self, queries, keys);
        let scale = Scale { factor: self.scale.unwrap_or(1.0 / (dim as f64).sqrt()), cap: self.cap };
        let group = groups(heads, kv_heads).unwrap_or(1);
        let is_cut = |x: &DTensor| x.sharded_axes(2).any(|axis| x.mesh().shape()[axis] > 1);
        // One key head serves the queries of all ranks, unless the rank that has it also has all queries.
        if group == 1 || (kv_heads == 1 && !(is_cut(key) && query.is_cut_by_groups(group, kv_heads))) {
            return self.of_groups([query, key, value], (&mask, scale));
        }
        if !query.is_cut_by_groups(group, kv_heads) {
            let (key, value) = (key.repeat_heads(group, 2)?, value.repeat_heads(group, 2)?);
            return self.of_groups([query, &key, &value], (&mask, scale));
        }
        self.of_groups([&query.split_units(2, group)?, key, value], (&mask, scale))?.merge_units(2)
    }

    /// Attention with as many query heads as key heads, with one key head, or with a dim for the queries of each key
    /// head.
    #[track_caller]
    fn of_groups(&self, inputs: [&DTensor; 3], (mask, scale): (&Mask, Scale)) -> Result<DTensor> {
        if let Some(made) = sequence::run(self, inputs, (mask, scale))? {
            return Ok(made);
        }
        let [query, key, value] = inputs;
        let is_sequence = |axis: &usize| inputs.iter().all(|x| x.placements()[*axis] == Shard(1));
        let is_cut = inputs.iter().any(|x| x.sharded_axes(1).any(|axis| x.mesh().shape()[axis] > 1));
        if self.way.is_some() && (is_cut || (0..query.mesh().ndim()).find(is_sequence).is_none()) {
            let (q, k, v, way) = (query.spec(), key.spec(), value.spec(), self.way);
            let want = "shard the rows of all three on one axis, or leave the way open";
            return Error::op(
                "flash_attn",
                format!("the way {way:?} for query {q}, key {k}, value {v}: {want}"),
            );
        }
        let signature = || {
            let mut shape = query.dims().to_vec();
            let (width, dtype) = self.result(value.dims()[3], query.dtype());
            shape[query.rank() - 1] = width;
            // One key head serves all query heads.
            let of_keys = if key.dims()[2] < query.dims()[2] { Replicate } else { Shard(2) };
            // Logarithms are no sums over parts of the values.
            let of_sums = (!self.log_sums).then(|| ShardingRule::new(SUM, &[Replicate, Replicate, SUM]));
            let rows = [
                ShardingRule::new(Shard(0), &[Shard(0); 3]),
                ShardingRule::new(Shard(2), &[Shard(2), of_keys, of_keys]),
            ];
            let rows = rows.into_iter().chain(of_sums);
            let rows = rows.chain([ShardingRule::new(Shard(1), &[Shard(1), Replicate, Replicate])]);
            Ok(Signature::new(ShardingRules::from_iter(rows), &shape, dtype))
        };
        let run = || {
            rules::run("flash_attn", &[usize::from(self.log_sums)], &inputs, signature, |x, out| {
                let (query, key, value) = (x[0].to_local(), x[1].to_local(), x[2].to_local());
                let query = all_heads(query)?;
                let block = out.local_block();
                let blocks = mask.blocks(&block[1], &(0..x[1].dims()[1]), &block[0]);
                let mixed =
                    kernels::flash_attn_of_blocks([&query, key, value], scale, blocks, self.log_sums)?;
                Ok(kernels::reshape(&mixed, out.local_shape().as_slice())?)
            })
        };
        if sequence::is_inherent(inputs)? { inherent(run) } else { run() }
    }
}
