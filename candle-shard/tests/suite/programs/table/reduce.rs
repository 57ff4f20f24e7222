//! Sums, extremes, softmax and products.
use super::{Call, Dice, Entry, apart, call, dim, float, none, same};
use crate::plain;
use candle_core::{D, DType, Tensor};
use candle_nn::ops;
use candle_shard::{DTensor, kernels};

/// A dim of more than one element.
fn wide_dim(dice: &mut Dice, shape: &[usize]) -> Option<Call> {
    let at = dice.below(shape.len());
    (shape[at] > 1).then(|| call(vec![], vec![at])).flatten()
}

/// A matrix, or a batch of them, that this one can be multiplied by.
fn factor(dice: &mut Dice, shape: &[usize]) -> Option<Call> {
    let (inner, columns) = (shape[shape.len() - 1], dice.size());
    let batch = &shape[..shape.len() - 2];
    let batch = if dice.once_in(2) { batch } else { &[] };
    call(vec![float(&[batch, &[inner, columns]].concat())], vec![])
}

/// The product over a dim, which stays, element by element.
fn product(x: &Tensor, dim: usize) -> candle_core::Result<Tensor> {
    (1..x.dim(dim)?).try_fold(x.narrow(dim, 0, 1)?, |product, at| product * x.narrow(dim, at, 1)?)
}

pub(super) const OPS: &[Entry] = same! {
    argmax, 1..=4, dim, |x, n| x[0].argmax(n[0])?.to_dtype(DType::F64);
    argmax_keepdim, 1..=4, dim, |x, n| x[0].argmax_keepdim(n[0])?.to_dtype(DType::F64)?.broadcast_mul(&x[0]);
    argmin, 1..=4, dim, |x, n| x[0].argmin(n[0])?.to_dtype(DType::F64);
    argmin_keepdim, 1..=4, dim, |x, n| x[0].argmin_keepdim(n[0])?.to_dtype(DType::F64)?.broadcast_mul(&x[0]);
    max, 1..=4, dim, |x, n| x[0].max(n[0]);
    max_keepdim, 1..=4, dim, |x, n| x[0].max_keepdim(n[0]);
    max_all, 0..=4, none, |x, n| x[0].max_all();
    min, 1..=4, dim, |x, n| x[0].min(n[0]);
    min_keepdim, 1..=4, dim, |x, n| x[0].min_keepdim(n[0]);
    min_all, 0..=4, none, |x, n| x[0].min_all();
    sum, 1..=4, dim, |x, n| x[0].sum(n[0]);
    sum_keepdim, 1..=4, dim, |x, n| x[0].sum_keepdim(n[0]);
    sum_all, 0..=4, none, |x, n| x[0].sum_all();
    mean, 1..=4, dim, |x, n| x[0].mean(n[0]);
    mean_keepdim, 1..=4, dim, |x, n| x[0].mean_keepdim(n[0]);
    mean_all, 0..=4, none, |x, n| x[0].mean_all();
    var, 1..=4, wide_dim, |x, n| x[0].var(n[0]);
    var_keepdim, 1..=4, wide_dim, |x, n| x[0].var_keepdim(n[0]);
    norm, 0..=4, none, |x, n| x[0].norm();
    log_sum_exp, 1..=4, dim, |x, n| x[0].log_sum_exp(n[0]);
    sort_last_dim, 1..=4, |d, _| call(vec![], vec![d.below(2)]), |x, n| x[0].sort_last_dim(n[0] == 0).map(|x| x.0);
    arg_sort_last_dim, 1..=4, |d, _| call(vec![], vec![d.below(2)]),
        |x, n| x[0].arg_sort_last_dim(n[0] == 0)?.to_dtype(DType::F64)?.mul(&x[0]);
    matmul, 2..=2, factor, |x, n| x[0].matmul(&x[1]);
    broadcast_matmul, 2..=4, factor, |x, n| x[0].broadcast_matmul(&x[1]);
    mv, 2..=2, |_, s| call(vec![float(&s[1..])], vec![]), |x, n| x[0].mv(&x[1]);
    dot, 1..=1, |_, s| call(vec![float(s)], vec![]), |x, n| x[0].dot(&x[1]);
};

pub(super) const APART: &[Entry] = apart! {
    all, 1..=4, dim, |x, n| x[0].clamp(0.0, 1.0)?.all(n[0])?.to_dtype(DType::F64),
        x[0].gt(0.0)?.min(n[0])?.to_dtype(DType::F64);
    all_keepdim, 1..=4, dim, |x, n| x[0].clamp(0.0, 1.0)?.all_keepdim(n[0])?.to_dtype(DType::F64)?.mul(&x[0]),
        x[0].gt(0.0)?.min_keepdim(n[0])?.to_dtype(DType::F64)?.broadcast_mul(&x[0]);
    all_all, 0..=4, none, |x, n| x[0].clamp(0.0, 1.0)?.all_all()?.to_dtype(DType::F64),
        x[0].gt(0.0)?.flatten_all()?.min(0)?.to_dtype(DType::F64);
    any, 1..=4, dim, |x, n| x[0].clamp(0.0, 1.0)?.any(n[0])?.to_dtype(DType::F64),
        x[0].gt(0.0)?.max(n[0])?.to_dtype(DType::F64);
    any_keepdim, 1..=4, dim, |x, n| x[0].clamp(0.0, 1.0)?.any_keepdim(n[0])?.to_dtype(DType::F64)?.mul(&x[0]),
        x[0].gt(0.0)?.max_keepdim(n[0])?.to_dtype(DType::F64)?.broadcast_mul(&x[0]);
    any_all, 0..=4, none, |x, n| x[0].clamp(0.0, 1.0)?.any_all()?.to_dtype(DType::F64),
        x[0].gt(0.0)?.flatten_all()?.max(0)?.to_dtype(DType::F64);
    prod, 1..=4, dim, |x, n| x[0].prod(n[0]), product(&x[0], n[0])?.squeeze(n[0]);
    prod_keepdim, 1..=4, dim, |x, n| x[0].prod_keepdim(n[0]), product(&x[0], n[0]);
    prod_all, 0..=4, none, |x, n| x[0].prod_all(), product(&x[0].flatten_all()?, 0)?.squeeze(0);
    std, 1..=4, wide_dim, |x, n| x[0].std(n[0]), x[0].var(n[0])?.sqrt();
    std_keepdim, 1..=4, wide_dim, |x, n| x[0].std_keepdim(n[0]), x[0].var_keepdim(n[0])?.sqrt();
    einsum, 2..=2, |d, s| call(vec![float(&[d.size(), s[1]])], vec![]),
        |x, n| DTensor::einsum("ij,kj->ki", &[&x[0], &x[1]]), x[1].matmul(&x[0].t()?);
    softmax, 1..=4, dim, |x, n| x[0].softmax(n[0]), ops::softmax(&x[0], n[0]);
    log_softmax, 1..=4, dim, |x, n| x[0].log_softmax(n[0]), ops::log_softmax(&x[0], n[0]);
    softmax_last_dim, 1..=4, none, |x, n| x[0].softmax_last_dim(), ops::softmax(&x[0], D::Minus1);
    causal_softmax, 2..=4, none, |x, n| x[0].causal_softmax(0.7), kernels::causal_softmax(&x[0], 0.7);
    masked_softmax, 1..=4, |d, s| {
        let mask = s.iter().enumerate().map(|(i, &n)| if i + 1 < s.len() && d.once_in(2) { 1 } else { n });
        let mask: Vec<usize> = mask.collect();
        call(vec![float(&mask[d.below(mask.len())..])], vec![])
    }, |x, n| x[0].masked_softmax(&x[1], 0.7), ops::softmax(&(&x[0] * 0.7)?.broadcast_add(&x[1])?, D::Minus1);
    cumsum, 1..=4, dim, |x, n| x[0].cumsum(n[0]), plain::cumsum(&x[0], n[0]);
    logcumsumexp, 1..=4, dim, |x, n| x[0].logcumsumexp(n[0]), plain::logcumsumexp(&x[0], n[0]);
    topk, 1..=4, |d, s| call(vec![], vec![1 + d.below(s[s.len() - 1])]), |x, n| Ok(x[0].topk(n[0])?.0), Ok(plain::topk(&x[0], n[0])?.0);
    layer_norm, 1..=4, |_, s| call(vec![float(&s[s.len() - 1..]); 2], vec![]),
        |x, n| x[0].layer_norm(&x[1], &x[2], 1e-1), plain::layer_norm(x, 1e-1);
    rms_norm, 1..=4, |_, s| call(vec![float(&s[s.len() - 1..])], vec![]),
        |x, n| x[0].rms_norm(&x[1], 1e-1), plain::rms_norm(x, 1e-1);
    add_rms_norm, 1..=4, |_, s| call(vec![float(s), float(&s[s.len() - 1..])], vec![]),
        |x, n| x[0].add_rms_norm(&x[1], &x[2], 1e-1).and_then(|[sum, normed]| sum.add(&normed)), {
            let sum = (&x[0] + &x[1])?;
            &sum + plain::rms_norm(&[sum.clone(), x[2].clone()], 1e-1)?
        };
    linear, 1..=4, |d, s| {
        let outs = d.size();
        let bias = float(&[outs]);
        call([vec![float(&[outs, s[s.len() - 1]])], vec![bias; d.below(2)]].concat(), vec![])
    }, |x, n| x[0].linear(&x[1], x.get(2)), match x[0].rank() {
        1 => plain::linear(&[&[x[0].unsqueeze(0)?], &x[1..]].concat())?.squeeze(0),
        _ => plain::linear(x),
    };
    on_whole, 0..=4, none, |x, n| DTensor::on_whole("tripled", &[&x[0]], (x[0].dims(), DType::F64), |x| &x[0] * 3.0), &x[0] * 3.0;
};
