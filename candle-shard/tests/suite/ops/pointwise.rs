use crate::ops::sweep::{Case, Input, Kind, sweep};
use Kind::{Float, Ids, Positive, Whole};
use candle_core::{DType, Tensor};
use candle_shard::DTensor;

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
    sweep("binary", cases);
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
        Case::new(
            "detached",
            &inputs,
            |x| x[0].mul(x[0].detach())?.add(&x[1]),
            |x| (&x[0] * x[0].detach())? + &x[1],
        ),
    ];
    sweep("operators", cases);
}

#[test]
fn extremes_of_two_and_powers() {
    let mut cases = Vec::new();
    for [a, b] in PAIRS {
        // Whole numbers are often equal, and equal ones share the gradient.
        let whole: [Input; 2] = [(a, Whole), (b, Whole)];
        let positive: [Input; 2] = [(a, Positive), (b, Float)];
        cases.extend([
            Case::new("maximum", &whole, |x| x[0].maximum(&x[1]), |x| x[0].broadcast_maximum(&x[1])),
            Case::new("minimum", &whole, |x| x[0].minimum(&x[1]), |x| x[0].broadcast_minimum(&x[1])),
            Case::new("pow", &positive, |x| x[0].pow(&x[1]), |x| x[0].broadcast_pow(&x[1])),
        ]);
    }
    cases.push(Case::new(
        "maximum of 0",
        &[(&[5, 3], Whole)],
        |x| x[0].maximum(0u32),
        |x| x[0].maximum(0f64),
    ));
    sweep("extremes of two", cases);
}

type Compare = (
    &'static str,
    fn(&DTensor, &DTensor) -> candle_shard::Result<DTensor>,
    fn(&Tensor, &Tensor) -> candle_core::Result<Tensor>,
);

const COMPARE: [Compare; 6] = [
    ("eq", |a, b| a.eq(b), |a, b| a.broadcast_eq(b)),
    ("ne", |a, b| a.ne(b), |a, b| a.broadcast_ne(b)),
    ("lt", |a, b| a.lt(b), |a, b| a.broadcast_lt(b)),
    ("le", |a, b| a.le(b), |a, b| a.broadcast_le(b)),
    ("gt", |a, b| a.gt(b), |a, b| a.broadcast_gt(b)),
    ("ge", |a, b| a.ge(b), |a, b| a.broadcast_ge(b)),
];

#[test]
fn comparisons() {
    let mut cases = Vec::new();
    for [a, b] in [PAIRS[0], PAIRS[3], PAIRS[6], PAIRS[9], PAIRS[10]] {
        for (name, distributed, plain) in COMPARE {
            cases.push(Case::new(
                name,
                &[(a, Whole), (b, Whole)],
                move |x| distributed(&x[0], &x[1])?.to_dtype(x[0].dtype())?.mul(&x[0]),
                move |x| plain(&x[0], &x[1])?.to_dtype(x[0].dtype())?.broadcast_mul(&x[0]),
            ));
        }
    }
    cases.push(Case::new("of ids and a number", &[(&[5, 3], Ids(4))], |x| x[0].gt(1u32), |x| x[0].gt(1u32)));
    sweep("compare", cases);
}

#[test]
fn choices() {
    let shapes: [[&[usize]; 3]; 5] = [
        [&[5, 3], &[5, 3], &[5, 3]],
        [&[4, 1], &[4, 6], &[6]],
        [&[1, 7], &[], &[3, 1]],
        [&[2], &[0, 2], &[1, 1]],
        [&[2, 3], &[1, 3], &[2, 1]],
    ];
    let case = |[cond, a, b]: [&'static [usize]; 3]| {
        let plain = |x: &[Tensor]| {
            let mask = x[0].ne(0u32)?.to_dtype(x[1].dtype())?;
            mask.broadcast_mul(&x[1])?.broadcast_add(&(1.0 - &mask)?.broadcast_mul(&x[2])?)
        };
        Case::new(
            "where_cond",
            &[(cond, Ids(2)), (a, Float), (b, Float)],
            |x| x[0].where_cond(&x[1], &x[2]),
            plain,
        )
    };
    let masked = Case::new(
        "masked",
        &[(&[5, 3], Ids(2)), (&[5, 3], Float)],
        |x| x[0].where_cond(0.0, &x[1]),
        |x| x[0].where_cond(&x[1].zeros_like()?, &x[1]),
    );
    let clipped = Case::new(
        "clipped",
        &[(&[5, 3], Float)],
        |x| x[0].gt(0.0)?.where_cond(&x[0], x[0].sqr()),
        |x| x[0].gt(0f64)?.where_cond(&x[0], &x[0].sqr()?),
    );
    let mut cases = shapes.map(case).to_vec();
    cases.extend([masked, clipped]);
    sweep("choices", cases);
}

/// The operators in all forms in which candle has them, and with plain tensors and results beside.
#[test]
fn every_form_of_the_operators() {
    fn plain(dtype: DType) -> Tensor {
        crate::common::values(&[3], 77, dtype)
    }
    let x: [Input; 2] = [(&[5, 3], Float), (&[5, 3], Positive)];
    let cases = vec![
        Case::new(
            "values and results",
            &x,
            |x| (x[0].clone() + x[1].clone()) - (&x[0] * x[1].sqr() / &(x[1].clone() * 2.0)?)?,
            |x| (x[0].clone() + x[1].clone()) - (&x[0] * x[1].sqr()? / (x[1].clone() * 2.0)?)?,
        ),
        Case::new(
            "numbers",
            &x,
            |x| (1.0 + &x[0])? + (2.0 * x[1].clone()) - ((x[0].clone() - 0.5)? / 4.0)?,
            |x| (1.0 + &x[0])? + (2.0 * x[1].clone()) - ((x[0].clone() - 0.5)? / 4.0)?,
        ),
        Case::new(
            "plain tensors",
            &x,
            |x| {
                let plain = plain(x[0].dtype());
                ((&plain * &x[0])? + plain.clone())? / (plain - x[1].clone())?
            },
            |x| {
                let plain = plain(x[0].dtype());
                plain.broadcast_mul(&x[0])?.broadcast_add(&plain)?.broadcast_div(&plain.broadcast_sub(&x[1])?)
            },
        ),
        Case::new(
            "plain tensors as operands",
            &x,
            |x| x[0].maximum(plain(x[0].dtype()))?.mul(plain(x[0].dtype()).sqr()?),
            |x| x[0].broadcast_maximum(&plain(x[0].dtype()))?.broadcast_mul(&plain(x[0].dtype()).sqr()?),
        ),
    ];
    sweep("operator forms", cases);
}
