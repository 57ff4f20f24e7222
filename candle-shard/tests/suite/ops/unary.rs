use crate::common::{exact_gelu, mesh};
use crate::ops::sweep::{Case, Kind, sweep};
use Kind::{Float, Positive};
use candle_core::{DType, Device, Tensor};
use candle_nn::{Activation, Module, PReLU, ops};
use candle_shard::random::{Distribution, Stream, sample_full};
use candle_shard::{DTensor, Result, Shard, kernels};
use itertools::Itertools;
use test_utils::on_ranks;

type Unary =
    (&'static str, Kind, fn(&DTensor) -> Result<DTensor>, fn(&Tensor) -> candle_core::Result<Tensor>);

const UNARY: [Unary; 37] = [
    ("neg", Float, |x| x.neg(), |x| x.neg()),
    ("affine", Float, |x| x.affine(1.7, 0.3), |x| x.affine(1.7, 0.3)),
    ("scale", Float, |x| x.affine(-0.4, 0.0), |x| x.affine(-0.4, 0.0)),
    ("nothing of it", Float, |x| x.affine(0.0, 2.0)?.mul(x), |x| x.affine(0.0, 2.0)? * x),
    ("relu", Float, DTensor::relu, |x| x.relu()),
    ("relu6", Float, |x| x.affine(6.0, 0.0)?.relu6(), |x| Activation::Relu6.forward(&(x * 6.0)?)),
    ("gelu_erf", Float, DTensor::gelu_erf, kernels::gelu_erf),
    ("gelu", Float, DTensor::gelu, exact_gelu),
    ("silu", Float, DTensor::silu, |x| x.silu()),
    ("mish", Float, DTensor::mish, ops::mish),
    ("sigmoid", Float, DTensor::sigmoid, |x| (x.neg()?.exp()? + 1.0)?.recip()),
    ("hard_sigmoid", Float, |x| x.affine(4.0, 0.0)?.hard_sigmoid(), |x| ops::hard_sigmoid(&(x * 4.0)?)),
    (
        "hard_swish",
        Float,
        |x| x.affine(4.0, 0.0)?.hard_swish(),
        |x| Activation::HardSwish.forward(&(x * 4.0)?),
    ),
    ("elu", Float, |x| x.elu(0.7), |x| x.elu(0.7)),
    ("leaky_relu", Float, |x| x.leaky_relu(0.1), |x| ops::leaky_relu(x, 0.1)),
    ("tanh", Float, DTensor::tanh, |x| x.tanh()),
    ("erf", Float, DTensor::erf, |x| x.erf()),
    ("exp", Float, DTensor::exp, |x| x.exp()),
    ("log", Positive, DTensor::log, |x| x.log()),
    ("sqrt", Positive, DTensor::sqrt, |x| x.sqrt()),
    ("rsqrt", Positive, DTensor::rsqrt, |x| x.sqrt()?.recip()),
    ("sqr", Float, DTensor::sqr, |x| x.sqr()),
    ("powf", Positive, |x| x.powf(1.7), |x| x.powf(1.7)),
    ("abs", Float, DTensor::abs, |x| x.abs()),
    ("sin", Float, DTensor::sin, |x| x.sin()),
    ("cos", Float, DTensor::cos, |x| x.cos()),
    ("recip", Positive, DTensor::recip, |x| x.recip()),
    ("floor", Float, |x| x.floor()?.mul(x), |x| x.floor()? * x),
    ("ceil", Float, |x| x.ceil()?.mul(x), |x| x.ceil()? * x),
    ("round", Float, |x| x.round()?.mul(x), |x| x.round()? * x),
    ("round_to", Float, |x| x.round_to(1)?.mul(x), |x| x.round_to(1)? * x),
    ("sign", Float, |x| x.sign()?.mul(x), |x| x.sign()? * x),
    ("only a floor", Float, DTensor::floor, |x| x.floor()),
    ("clamp", Float, |x| x.clamp(-0.5, 0.7), |x| x.clamp(-0.5, 0.7)),
    ("number minus x", Float, |x| 2.0 - x, |x| 2.0 - x),
    ("number by x", Positive, |x| 2.0 / x, |x| 2.0 / x),
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
    sweep("unary", unary(&[&[4, 6], &[5, 3], &[1, 7], &[0, 3]]));
}

#[test]
fn other_dtypes_between() {
    let wider = Case::new(
        "through f64",
        &[(&[5, 3], Float)],
        |x| x[0].to_dtype(DType::F64)?.sin()?.to_dtype(x[0].dtype()),
        |x| x[0].to_dtype(DType::F64)?.sin()?.to_dtype(x[0].dtype()),
    );
    // Whole numbers end the graph, on ranks without elements too.
    let whole = |shape| {
        Case::new(
            "through i64",
            &[(shape, Float), (shape, Float)],
            |x| x[0].to_dtype(DType::I64)?.to_dtype(x[1].dtype())?.mul(&x[1]),
            |x| x[0].to_dtype(DType::I64)?.to_dtype(x[1].dtype())? * &x[1],
        )
    };
    // candle's own conversion of 8-bit floats to f64 would not end, in the backward pass too.
    let narrow = Case::new(
        "through f8",
        &[(&[5, 3], Float)],
        |x| x[0].to_dtype(DType::F8E4M3)?.to_dtype(DType::F64)?.to_dtype(x[0].dtype()),
        |x| x[0].to_dtype(DType::F32)?.to_dtype(DType::F8E4M3)?.to_dtype(DType::F32)?.to_dtype(x[0].dtype()),
    );
    sweep("dtypes", vec![wider, narrow, whole(&[1, 3]), whole(&[4, 6])]);
}

#[test]
fn whole_numbers_have_negatives_and_absolute_values() {
    let case = |shape: &'static [usize]| {
        let plain = |x: &[Tensor]| {
            let x = x[0].to_dtype(DType::I64)?.to_dtype(DType::F64)?;
            x.neg()? + x.abs()? * 10.0
        };
        let here = |x: &[DTensor]| {
            let x = x[0].to_dtype(DType::I64)?;
            x.neg()?.add(x.abs()?.mul(10.0))
        };
        Case::new("-x + 10|x|", &[(shape, Kind::Whole)], here, plain)
    };
    let unsigned = Case::new("abs of u32", &[(&[4, 6], Kind::Ids(9))], |x| x[0].abs(), |x| Ok(x[0].clone()));
    sweep("whole numbers", vec![case(&[4, 6]), case(&[5, 3]), case(&[1, 3]), unsigned]);
    on_ranks(2, "unsigned", |ctx| -> Result<()> {
        let x = DTensor::ones(4, DType::U32, &Device::Cpu, &mesh(ctx, &[2])?, &[Shard(0)])?;
        assert!(x.neg().unwrap_err().to_string().contains("no negative numbers"));
        Ok(())
    });
}

#[test]
fn activations_by_name() {
    const NAMED: [Activation; 15] = [
        Activation::Gelu,
        Activation::NewGelu,
        Activation::Relu,
        Activation::Relu2,
        Activation::Relu6,
        Activation::Silu,
        Activation::Sigmoid,
        Activation::HardSigmoid,
        Activation::Swiglu,
        Activation::Swish,
        Activation::Mish,
        Activation::HardSwish,
        Activation::Elu(0.7),
        Activation::LeakyRelu(0.1),
        Activation::GeluPytorchTanh,
    ];
    let shapes: [&[usize]; 3] = [&[4, 6], &[5, 2], &[1, 4]];
    let mut cases = Vec::new();
    for (name, shape) in NAMED.into_iter().cartesian_product(shapes) {
        let plain = move |x: &[Tensor]| match name {
            Activation::Gelu => kernels::gelu_erf(&x[0]), // candle's has a gradient of 0 at x = 0
            Activation::NewGelu | Activation::GeluPytorchTanh => exact_gelu(&x[0]),
            name => name.forward(&x[0]),
        };
        cases.push(Case::new(&format!("{name:?}"), &[(shape, Float)], move |x| x[0].activation(name), plain));
    }
    for shape in shapes {
        cases.push(Case::new("swiglu", &[(shape, Float)], |x| x[0].swiglu(), |x| ops::swiglu(&x[0])));
        cases.push(Case::new(
            "selu",
            &[(shape, Float)],
            |x| x[0].selu(1.6, 1.1),
            |x| {
                let below = (x[0].minimum(0f64)?.exp()? - 1.0)?; // candle's own is of single precision
                (x[0].relu()? + (below * f64::from(1.6f32))?)? * f64::from(1.1f32)
            },
        ));
    }
    let weighted: [[&[usize]; 2]; 5] =
        [[&[4, 6], &[6]], [&[5, 3], &[1]], [&[5, 3], &[5, 3]], [&[2, 3, 2], &[3]], [&[1, 7], &[]]];
    for [shape, weight] in weighted {
        cases.push(Case::new(
            "prelu",
            &[(shape, Float), (weight, Float)],
            |x| x[0].prelu(&x[1]),
            |x| PReLU::new(x[1].clone(), x[1].elem_count() == 1).forward(&x[0]),
        ));
    }
    sweep("activations", cases);
}
