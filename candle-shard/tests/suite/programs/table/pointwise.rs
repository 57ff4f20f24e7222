//! Functions of elements.
use super::{Entry, alike, apart, broadcast, broadcasting, call, float, none, same};
use crate::common::exact_gelu;
use candle_core::op::CmpOp;
use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{Activation, PReLU, ops};
use candle_shard::DTensor;
use candle_shard::random::{Distribution, Stream, sample_full};

pub(super) const UNARY: &[Entry] = same! {
    abs, 0..=4, none, |x, n| x[0].abs();
    affine, 0..=4, none, |x, n| x[0].affine(-0.7, 0.3);
    ceil, 0..=4, none, |x, n| x[0].affine(2.0, 0.0)?.ceil()?.mul(&x[0]);
    clamp, 0..=4, none, |x, n| x[0].clamp(-0.5, 0.7);
    contiguous, 0..=4, none, |x, n| x[0].contiguous();
    copy, 0..=4, none, |x, n| x[0].copy();
    force_contiguous, 0..=4, none, |x, n| x[0].force_contiguous();
    cos, 0..=4, none, |x, n| x[0].cos();
    detach, 0..=4, none, |x, n| x[0].detach().mul(&x[0]);
    elu, 0..=4, none, |x, n| x[0].elu(0.7);
    erf, 0..=4, none, |x, n| x[0].erf();
    exp, 0..=4, none, |x, n| x[0].tanh()?.exp();
    floor, 0..=4, none, |x, n| x[0].affine(2.0, 0.0)?.floor()?.mul(&x[0]);
    log, 0..=4, none, |x, n| x[0].sqr()?.affine(1.0, 0.5)?.log();
    neg, 0..=4, none, |x, n| x[0].neg();
    powf, 0..=4, none, |x, n| x[0].sqr()?.affine(1.0, 0.5)?.powf(1.7);
    recip, 0..=4, none, |x, n| x[0].sqr()?.affine(1.0, 0.5)?.recip();
    relu, 0..=4, none, |x, n| x[0].relu();
    round, 0..=4, none, |x, n| x[0].affine(3.0, 0.0)?.round()?.mul(&x[0]);
    round_to, 0..=4, none, |x, n| x[0].round_to(1)?.mul(&x[0]);
    sign, 0..=4, none, |x, n| x[0].sign()?.mul(&x[0]);
    silu, 0..=4, none, |x, n| x[0].silu();
    sin, 0..=4, none, |x, n| x[0].sin();
    sqr, 0..=4, none, |x, n| x[0].sqr();
    sqrt, 0..=4, none, |x, n| x[0].sqr()?.affine(1.0, 0.5)?.sqrt();
    tanh, 0..=4, none, |x, n| x[0].tanh();
    to_dtype, 0..=4, none, |x, n| x[0].affine(2.0, 0.0)?.to_dtype(DType::I64)?.to_dtype(DType::F64)?.mul(&x[0]);
};

pub(super) const APART: &[Entry] = apart! {
    activation, 0..=4, |d, _| call(vec![], vec![d.below(NAMED.len())]),
        |x, n| x[0].activation(NAMED[n[0] % NAMED.len()]), match NAMED[n[0] % NAMED.len()] {
            Activation::NewGelu | Activation::GeluPytorchTanh => exact_gelu(&x[0]),
            named => named.forward(&x[0]),
        };
    dropout, 0..=4, |d, _| call(vec![], vec![d.below(100)]), |x, n| x[0].dropout(0.4, Stream::new(n[0] as u64, "mask")), {
        let (mask, keeps) = (Stream::new(n[0] as u64, "mask"), Distribution::Bernoulli { p: 0.6 });
        &x[0] * sample_full(mask, keeps, x[0].dims(), x[0].dtype(), x[0].device())?.affine(1.0 / (1.0 - 0.4), 0.0)?
    };
    gelu, 0..=4, none, |x, n| x[0].gelu(), exact_gelu(&x[0]);
    gelu_erf, 0..=4, none, |x, n| x[0].gelu_erf(),
        (&x[0] * 0.5)? * (x[0].affine(std::f64::consts::FRAC_1_SQRT_2, 0.0)?.erf()? + 1.0)?;
    hard_sigmoid, 0..=4, none, |x, n| x[0].affine(4.0, 0.0)?.hard_sigmoid(), ops::hard_sigmoid(&(&x[0] * 4.0)?);
    hard_swish, 0..=4, none, |x, n| x[0].affine(4.0, 0.0)?.hard_swish(), Activation::HardSwish.forward(&(&x[0] * 4.0)?);
    leaky_relu, 0..=4, none, |x, n| x[0].leaky_relu(0.1), ops::leaky_relu(&x[0], 0.1);
    mish, 0..=4, none, |x, n| x[0].mish(), ops::mish(&x[0]);
    relu6, 0..=4, none, |x, n| x[0].affine(6.0, 0.0)?.relu6(), (&x[0] * 6.0)?.clamp(0f64, 6f64);
    rsqrt, 0..=4, none, |x, n| x[0].sqr()?.affine(1.0, 0.5)?.rsqrt(), (x[0].sqr()? + 0.5)?.sqrt()?.recip();
    selu, 0..=4, none, |x, n| x[0].selu(1.5, 1.25), {
        let below = (x[0].minimum(0f64)?.exp()? - 1.0)?;
        (x[0].relu()? + (below * 1.5)?)? * 1.25
    };
    sigmoid, 0..=4, none, |x, n| x[0].sigmoid(), (x[0].neg()?.exp()? + 1.0)?.recip();
    swiglu, 1..=4, |_, s| s.last().filter(|&&last| last % 2 == 0).and(call(vec![], vec![])),
        |x, n| x[0].swiglu(), ops::swiglu(&x[0]);
    prelu, 2..=4, |d, s| call(vec![float(&[if d.once_in(2) { 1 } else { s[1] }])], vec![]),
        |x, n| x[0].prelu(&x[1]), PReLU::new(x[1].clone(), x[1].elem_count() == 1).forward(&x[0]);
    replicated, 0..=4, none, |x, n| {
        let more = beside(x[0].dims(), x[0].device());
        x[0].mul(DTensor::replicated(&more, x[0].mesh())?)?.add(more)
    }, (&x[0] * beside(x[0].dims(), x[0].device()))? + beside(x[0].dims(), x[0].device());
    silu_gate, 1..=4, alike, |x, n| x[0].silu_gate(&x[1]), x[0].silu()? * &x[1];
    where_cond, 0..=4, |d, s| {
        let (a, b) = (broadcasting(d, s), broadcasting(d, s));
        call(vec![float(&a), float(&b)], vec![])
    }, |x, n| x[0].gt(0.0)?.where_cond(&x[1], &x[2]), {
        let mask = x[0].gt(0f64)?.to_dtype(DType::F64)?;
        mask.broadcast_mul(&x[1])?.broadcast_add(&(1.0 - &mask)?.broadcast_mul(&x[2])?)
    };
};

/// Numbers that every rank has.
fn beside(shape: &[usize], device: &Device) -> Tensor {
    test_utils::values(shape, 77, DType::F64).to_device(device).expect("a copy")
}

const NAMED: [Activation; 7] = [
    Activation::NewGelu,
    Activation::Relu2,
    Activation::Silu,
    Activation::Sigmoid,
    Activation::Swish,
    Activation::Elu(0.7),
    Activation::LeakyRelu(0.1),
];

pub(super) const BINARY: &[Entry] = same! {
    add, 0..=4, alike, |x, n| x[0].add(&x[1]);
    sub, 0..=4, alike, |x, n| x[0].sub(&x[1]);
    mul, 0..=4, alike, |x, n| x[0].mul(&x[1]);
    div, 0..=4, alike, |x, n| x[0].div(&x[1].sqr()?.affine(1.0, 0.5)?);
    pow, 0..=4, alike, |x, n| x[0].sqr()?.affine(1.0, 0.5)?.pow(&x[1]);
    maximum, 0..=4, alike, |x, n| x[0].maximum(&x[1]);
    minimum, 0..=4, alike, |x, n| x[0].minimum(&x[1]);
    eq, 0..=4, alike, |x, n| x[0].round()?.eq(&x[1].round()?)?.to_dtype(DType::F64)?.mul(&x[0]);
    ne, 0..=4, alike, |x, n| x[0].round()?.ne(&x[1].round()?)?.to_dtype(DType::F64)?.mul(&x[0]);
    lt, 0..=4, alike, |x, n| x[0].lt(&x[1])?.to_dtype(DType::F64)?.mul(&x[0]);
    le, 0..=4, alike, |x, n| x[0].le(&x[1])?.to_dtype(DType::F64)?.mul(&x[0]);
    gt, 0..=4, alike, |x, n| x[0].gt(&x[1])?.to_dtype(DType::F64)?.mul(&x[0]);
    ge, 0..=4, alike, |x, n| x[0].ge(&x[1])?.to_dtype(DType::F64)?.mul(&x[0]);
    cmp, 0..=4, alike, |x, n| x[0].cmp(&x[1], CmpOp::Lt)?.to_dtype(DType::F64)?.mul(&x[0]);
    broadcast_add, 0..=4, broadcast, |x, n| x[0].broadcast_add(&x[1]);
    broadcast_sub, 0..=4, broadcast, |x, n| x[0].broadcast_sub(&x[1]);
    broadcast_mul, 0..=4, broadcast, |x, n| x[0].broadcast_mul(&x[1]);
    broadcast_div, 0..=4, broadcast, |x, n| x[0].broadcast_div(&x[1].sqr()?.affine(1.0, 0.5)?);
    broadcast_pow, 0..=4, broadcast, |x, n| x[0].sqr()?.affine(1.0, 0.5)?.broadcast_pow(&x[1]);
    broadcast_maximum, 0..=4, broadcast, |x, n| x[0].broadcast_maximum(&x[1]);
    broadcast_minimum, 0..=4, broadcast, |x, n| x[0].broadcast_minimum(&x[1]);
    broadcast_eq, 0..=4, broadcast, |x, n| x[0].round()?.broadcast_eq(&x[1].round()?)?.to_dtype(DType::F64);
    broadcast_ne, 0..=4, broadcast, |x, n| x[0].round()?.broadcast_ne(&x[1].round()?)?.to_dtype(DType::F64);
    broadcast_lt, 0..=4, broadcast, |x, n| x[0].broadcast_lt(&x[1])?.to_dtype(DType::F64)?.broadcast_mul(&x[0]);
    broadcast_le, 0..=4, broadcast, |x, n| x[0].broadcast_le(&x[1])?.to_dtype(DType::F64)?.broadcast_mul(&x[1]);
    broadcast_gt, 0..=4, broadcast, |x, n| x[0].broadcast_gt(&x[1])?.to_dtype(DType::F64)?.broadcast_mul(&x[0]);
    broadcast_ge, 0..=4, broadcast, |x, n| x[0].broadcast_ge(&x[1])?.to_dtype(DType::F64)?.broadcast_mul(&x[1]);
};
