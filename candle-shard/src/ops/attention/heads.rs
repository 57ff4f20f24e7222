//! Attention by heads: each rank gets some heads of the whole sequence (DeepSpeed-Ulysses).
use super::order::even_sizes;
use super::sequence::{AttentionCall, part};
use crate::{Result, kernels};
use candle_core::Tensor;
use candle_dist::functional::Step;
use candle_dist::{Cut, empty};
use std::ops::Range;

/// The query heads and the key heads of one rank.
type HeadRanges = (Range<usize>, Range<usize>);

/// Assigns heads to ranks: whole groups of query heads if there are as many key heads as ranks, else parts of groups,
/// each with a copy of its key head.
fn assign(heads: usize, kv_heads: usize, ranks: usize) -> Vec<HeadRanges> {
    let group = heads / kv_heads.max(1);
    let mut made = Vec::with_capacity(ranks);
    if kv_heads >= ranks || kv_heads == 0 {
        let mut start = 0;
        for size in even_sizes(kv_heads, ranks) {
            let keys = start..start + size;
            made.push((keys.start * group..keys.end * group, keys));
            start += size;
        }
        return made;
    }
    let mut start = 0;
    for (key_head, ranks) in even_sizes(ranks, kv_heads).into_iter().enumerate() {
        for size in even_sizes(group, ranks) {
            let keys = if size == 0 { 0..0 } else { key_head..key_head + 1 };
            made.push((start..start + size, keys));
            start += size;
        }
    }
    made
}

/// Attention of `[b, q, h, d]`, whose rows are cut as those of the keys. The result has the dtype of the query.
pub(super) fn run(call: &AttentionCall, [q, k, v]: [&Tensor; 3]) -> Result<Tensor> {
    let (group, me) = (&call.group, call.group.rank());
    let (batch, rows, heads, dim) = q.dims4()?;
    let (kv_heads, width) = (k.dim(2)?, v.dim(3)?);
    let of_ranks = assign(heads, kv_heads, group.size());
    let features = |(of_q, of_k): &HeadRanges| of_q.len() * dim + of_k.len() * (dim + width);
    let all_rows: Vec<usize> = call.keys.iter().map(Range::len).collect();
    let len: usize = all_rows.iter().sum();

    // The features of each rank follow each other: its query heads, its keys and its values.
    let flat = |x: &Tensor, columns: usize| x.reshape((batch, rows, columns));
    let whole =
        Tensor::cat(&[flat(q, heads * dim)?, flat(k, kv_heads * dim)?, flat(v, kv_heads * width)?], 2)?;
    let (of_keys, of_values) = (heads * dim, (heads + kv_heads) * dim);
    let columns: Vec<Range<usize>> = of_ranks
        .iter()
        .flat_map(|(of_q, of_k)| {
            let at = |first: usize, heads: &Range<usize>, size: usize| {
                first + heads.start * size..first + heads.end * size
            };
            [at(0, of_q, dim), at(of_keys, of_k, dim), at(of_values, of_k, width)]
        })
        .collect();
    let ordered = select(&whole, &columns)?;
    let split = Cut::new(2, &of_ranks.iter().map(features).collect::<Vec<_>>());
    let mine = Step::AllToAll { split, concat: Cut::new(1, &all_rows) }.apply(&ordered, group)?;

    let (of_q, of_k) = &of_ranks[me];
    let piece = |start: usize, heads: usize, size: usize| -> Result<Tensor> {
        Ok(part(&mine, 2, start, heads * size)?.reshape((batch, len, heads, size))?)
    };
    let start = of_q.len() * dim;
    let (q, k) = (piece(0, of_q.len(), dim)?, piece(start, of_k.len(), dim)?);
    let v = piece(start + of_k.len() * dim, of_k.len(), width)?;
    let blocks = call.mask.blocks(&(0..len), &(0..len), &call.batch);
    let mixed = kernels::flash_attn_of_blocks([&q, &k, &v], call.scale, blocks, call.log_sums)?;
    let width = width + usize::from(call.log_sums);

    let mixed = mixed.reshape((batch, len, of_q.len() * width))?;
    let concat = Cut::new(2, &of_ranks.iter().map(|(of_q, _)| of_q.len() * width).collect::<Vec<_>>());
    let back = Step::AllToAll { split: Cut::new(1, &all_rows), concat }.apply(&mixed, group)?;
    Ok(back.reshape((batch, rows, heads, width))?)
}

/// Joins ranges of the columns of `[b, rows, columns]`.
fn select(x: &Tensor, columns: &[Range<usize>]) -> Result<Tensor> {
    let total: usize = columns.iter().map(Range::len).sum();
    let (batch, rows, width) = x.dims3()?;
    // candle cannot select from tensors without elements, which must stay in the graph.
    if x.elem_count() == 0 {
        let times = total.checked_div(width).unwrap_or(0) + 1;
        return part(&Tensor::cat(&vec![x.clone(); times], 2)?, 2, 0, total.min(times * width));
    }
    let unit = columns
        .iter()
        .filter(|range| !range.is_empty())
        .fold(0, |unit, range| gcd(gcd(unit, range.start), range.end));
    let unit = gcd(unit, width).max(1);
    let units = columns.iter().flat_map(|range| range.start / unit..range.end / unit).map(|unit| unit as u32);
    let units: Vec<u32> = units.collect();
    let selected = empty::index_select(&x.reshape((batch, rows, width / unit, unit))?, &units, 2)?;
    Ok(selected.reshape((batch, rows, total))?)
}

const fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_query_head_is_assigned_once_with_its_key_head() {
        for kv_heads in 1..9 {
            for group in 1..5 {
                for ranks in 1..10 {
                    let heads = kv_heads * group;
                    let made = assign(heads, kv_heads, ranks);
                    assert_eq!(made.len(), ranks);
                    let all: Vec<usize> = made.iter().flat_map(|(of_q, _)| of_q.clone()).collect();
                    assert_eq!(all, (0..heads).collect::<Vec<_>>(), "{heads} {kv_heads} {ranks}");
                    for (of_q, of_k) in made.iter().filter(|(of_q, _)| !of_q.is_empty()) {
                        let own = of_q.len() / of_k.len();
                        let fits = |i: usize| (of_q.start + i) / group == of_k.start + i / own;
                        assert!((0..of_q.len()).all(fits), "{heads} {kv_heads} {ranks}: {of_q:?} {of_k:?}");
                    }
                }
            }
        }
    }
}
