//! Attention and its positions.
use super::{Call, Dice, Entry, apart, call, float};
use crate::plain;
use candle_core::{D, Tensor};
use candle_shard::AttentionMask;
use candle_shard::kernels::{self, RopePairs};

/// Keys and values for queries `[batch, heads, rows, dim]`, whose heads groups share.
fn keys(dice: &mut Dice, (heads_at, rows_at): (usize, usize), queries: &[usize]) -> Option<Call> {
    let heads = queries[heads_at];
    let divisors: Vec<usize> = (1..=heads).filter(|n| heads.is_multiple_of(*n)).collect();
    let mut key = queries.to_vec();
    (key[heads_at], key[rows_at]) = (dice.pick(&divisors), dice.size());
    let mut value = key.clone();
    value[3] = dice.size();
    call(vec![float(&key), float(&value)], vec![dice.below(2)])
}

fn pairs(n: usize) -> RopePairs {
    if n == 0 { RopePairs::Halves } else { RopePairs::Neighbors }
}

fn softmax(causal: usize) -> impl Fn(&Tensor) -> candle_core::Result<Tensor> {
    move |scores| {
        if causal == 1 {
            kernels::causal_softmax(scores, 1.0)
        } else {
            candle_nn::ops::softmax(scores, D::Minus1)
        }
    }
}

pub(super) const OPS: &[Entry] = apart! {
    scaled_dot_product_attention, 4..=4, |d, s| keys(d, (1, 2), s), |x, n| {
        let mask = if n[0] == 1 { AttentionMask::Causal } else { AttentionMask::None };
        x[0].scaled_dot_product_attention(&x[1], &x[2], mask, None)
    }, plain::attention(x, softmax(n[0]));
    capped_attention, 4..=4, |d, s| {
        let mut call = keys(d, (1, 2), s)?;
        let rows = call.others[0].0[2];
        call.others.push(float(&[s[2], rows]));
        Some(call)
    }, |x, n| {
        let cap = (n[0] == 1).then_some(1.5);
        x[0].capped_attention(&x[1], &x[2], &x[3], 1.0 / (x[0].dim(D::Minus1)? as f64).sqrt(), cap)
    }, plain::attention(&x[..3], |scores| {
        let scores = if n[0] == 1 { ((scores / 1.5)?.tanh()? * 1.5)? } else { scores.clone() };
        candle_nn::ops::softmax(&scores.broadcast_add(&x[3])?, D::Minus1)
    });
    flash_attn, 4..=4, |d, s| keys(d, (2, 1), s),
        |x, n| x[0].flash_attn(&x[1], &x[2], 1.0 / (x[0].dim(D::Minus1)? as f64).sqrt(), n[0] == 1), {
        let swapped = x.iter().map(|x| x.transpose(1, 2)?.contiguous()).collect::<Result<Vec<_>, _>>()?;
        plain::attention(&swapped, softmax(n[0]))?.transpose(1, 2)
    };
    rope, 2..=4, |d, s| {
        let (rows, dim) = (s[s.len() - 2], s[s.len() - 1]);
        let offset = d.below(3);
        let tables = float(&[rows + offset, dim / 2]);
        (dim % 2 == 0).then(|| call(vec![tables; 2], vec![offset, d.below(2)])).flatten()
    }, |x, n| x[0].rope(&x[1].detach(), &x[2].detach(), n[0], pairs(n[1])),
        kernels::rope(&x[0], &x[1].detach(), &x[2].detach(), n[0], pairs(n[1]));
    rope_both, 2..=4, |d, s| {
        let (rows, dim) = (s[s.len() - 2], s[s.len() - 1]);
        let offset = d.below(3);
        let tables = float(&[rows + offset, dim / 2]);
        let others = vec![float(s), tables.clone(), tables];
        (dim % 2 == 0).then(|| call(others, vec![offset, d.below(2)])).flatten()
    }, |x, n| {
        let turned = x[0].rope_both(&x[1], &x[2].detach(), &x[3].detach(), n[0], pairs(n[1]));
        turned.and_then(|[q, k]| q.add(&k))
    }, {
        let turned = |x: &Tensor, tables: &[Tensor]| kernels::rope(x, &tables[0].detach(), &tables[1].detach(), n[0], pairs(n[1]));
        turned(&x[0], &x[2..])? + turned(&x[1], &x[2..])?
    };
};
