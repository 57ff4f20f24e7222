use crate::sweep::{Case, Input, Kind, sweep};
use Kind::{Float, Positive};
use candle_core::{DType, Tensor};
use candle_shard::random::{Distribution, Stream, sample_full};
use candle_shard::{DTensor, Result, kernels};

const SHAPES: [&[usize]; 5] = [&[4, 6], &[5, 3], &[1, 7], &[2, 1, 3], &[0, 3]];

type Unary = (&'static str, Kind, fn(&DTensor) -> Result<DTensor>, fn(&Tensor) -> candle_core::Result<Tensor>);

const UNARY: [Unary; 19] = [
    ("neg", Float, |x| x.neg(), |x| x.neg()),
    ("affine", Float, |x| x.affine(1.7, 0.3), |x| x.affine(1.7, 0.3)),
    ("scale", Float, |x| x.affine(-0.4, 0.0), |x| x.affine(-0.4, 0.0)),
    ("operator scale", Float, |x| x * 3.0, |x| x * 3.0),
    ("operator shift", Float, |x| x + 0.5, |x| x + 0.5),
    ("relu", Float, DTensor::relu, |x| x.relu()),
    ("gelu", Float, DTensor::gelu, kernels::gelu),
    ("silu", Float, DTensor::silu, |x| x.silu()),
    ("sigmoid", Float, DTensor::sigmoid, |x| (x.neg()?.exp()? + 1.0)?.recip()),
    ("tanh", Float, DTensor::tanh, |x| x.tanh()),
    ("exp", Float, DTensor::exp, |x| x.exp()),
    ("log", Positive, DTensor::log, |x| x.log()),
    ("sqrt", Positive, DTensor::sqrt, |x| x.sqrt()),
    ("sqr", Float, DTensor::sqr, |x| x.sqr()),
    ("abs", Float, DTensor::abs, |x| x.abs()),
    ("sin", Float, DTensor::sin, |x| x.sin()),
    ("cos", Float, DTensor::cos, |x| x.cos()),
    ("recip", Positive, DTensor::recip, |x| x.recip()),
    (
        "dropout",
        Float,
        |x| x.dropout(0.4, Stream::new(3, "mask")),
        |x| {
            let keep = sample_full(
                Stream::new(3, "mask"),
                Distribution::Bernoulli { p: 0.6 },
                x.dims(),
                x.dtype(),
                x.device(),
            )?;
            x * keep.affine(1.0 / (1.0 - 0.4), 0.0)?
        },
    ),
];

fn unary(shapes: &[&'static [usize]]) -> Vec<Case> {
    let case = |&(name, kind, distributed, plain): &Unary, shape: &'static [usize]| {
        Case::new(name, &[(shape, kind)], move |x| distributed(&x[0]), move |x| plain(&x[0]))
    };
    UNARY.iter().flat_map(|op| shapes.iter().map(move |shape| case(op, shape))).collect()
}

#[test]
fn unary_ops() {
    sweep("unary", DType::F64, unary(&SHAPES));
}

#[test]
fn unary_ops_in_single_precision() {
    let wider = Case::new(
        "wider and back",
        &[(&[5, 3], Float)],
        |x| x[0].to_dtype(DType::F64)?.sin()?.to_dtype(DType::F32),
        |x| x[0].to_dtype(DType::F64)?.sin()?.to_dtype(DType::F32),
    );
    sweep("unary f32", DType::F32, [unary(&[&[5, 3]]), vec![wider]].concat());
}

const PAIRS: [[&[usize]; 2]; 13] = [
    [&[0, 3], &[3]],
    [&[1, 3], &[0, 1]],
    [&[4, 6], &[4, 6]],
    [&[5, 3], &[5, 3]],
    [&[1, 7], &[1, 7]],
    [&[4, 6], &[1, 6]],
    [&[5, 1], &[5, 3]],
    [&[5, 3], &[3]],
    [&[2], &[3, 2]],
    [&[5, 1], &[1, 3]],
    [&[4, 3], &[]],
    [&[], &[1, 2]],
    [&[2, 1, 3], &[4, 1]],
];

#[test]
fn binary_ops_with_broadcasting() {
    let mut cases = Vec::new();
    for [a, b] in PAIRS {
        let inputs: [Input; 2] = [(a, Float), (b, Positive)];
        cases.extend([
            Case::new("add", &inputs, |x| x[0].add(&x[1]), |x| x[0].broadcast_add(&x[1])),
            Case::new("sub", &inputs, |x| x[0].sub(&x[1]), |x| x[0].broadcast_sub(&x[1])),
            Case::new("mul", &inputs, |x| x[0].mul(&x[1]), |x| x[0].broadcast_mul(&x[1])),
            Case::new("div", &inputs, |x| x[0].div(&x[1]), |x| x[0].broadcast_div(&x[1])),
        ]);
    }
    sweep("binary", DType::F64, cases);
}

#[test]
fn operators_and_shared_inputs() {
    let inputs: [Input; 2] = [(&[5, 3], Float), (&[5, 3], Positive)];
    let cases = vec![
        Case::new(
            "operators",
            &inputs,
            |x| &(&(&x[0] + &x[1])? * &x[0])? / &(&x[1] - &(&x[0] * 0.1)?)?,
            |x| ((&x[0] + &x[1])? * &x[0])? / (&x[1] - (&x[0] * 0.1)?)?,
        ),
        Case::new("square of itself", &inputs[..1], |x| &x[0] * &x[0], |x| &x[0] * &x[0]),
        Case::new("twice itself", &inputs[..1], |x| &x[0] + &x[0], |x| &x[0] + &x[0]),
        Case::new("detached", &inputs, |x| x[0].mul(&x[0].detach())?.add(&x[1]), |x| (&x[0] * x[0].detach())? + &x[1]),
    ];
    sweep("operators", DType::F64, cases);
}
