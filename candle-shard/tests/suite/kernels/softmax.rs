//! Softmax, plain and causal.

use candle_core::{D, Device::Cpu, Result, Tensor, Var};
use candle_shard::kernels::{causal_softmax, masked_softmax, softmax};

use crate::kernels::harness::*;

pub(crate) fn fused_softmax(t: &[Tensor]) -> Result<Tensor> {
    softmax(&t[0])
}

pub(crate) fn composed_softmax(t: &[Tensor]) -> Result<Tensor> {
    candle_nn::ops::softmax(&t[0], D::Minus1)
}

const SCALE: f64 = 0.375;

pub(crate) fn fused_causal(t: &[Tensor]) -> Result<Tensor> {
    causal_softmax(&t[0], SCALE)
}

pub(crate) fn composed_causal(t: &[Tensor]) -> Result<Tensor> {
    let (q, k) = (t[0].dim(D::Minus2)?, t[0].dim(D::Minus1)?);
    let hidden = |i: usize, j: usize| {
        if j + q > i + k { f64::NEG_INFINITY } else { 0.0 }
    };
    let mask = Tensor::from_iter((0..q).flat_map(|i| (0..k).map(move |j| hidden(i, j))), &Cpu)?;
    candle_nn::ops::softmax(&(&t[0] * SCALE)?.broadcast_add(&mask.reshape((q, k))?)?, D::Minus1)
}

pub(crate) fn fused_masked(t: &[Tensor]) -> Result<Tensor> {
    masked_softmax(&t[0], &t[1], SCALE)
}

pub(crate) fn composed_masked(t: &[Tensor]) -> Result<Tensor> {
    candle_nn::ops::softmax(&(&t[0] * SCALE)?.broadcast_add(&t[1])?, D::Minus1)
}

#[test]
fn softmax_equals_its_composed_form() {
    for dims in SHAPES {
        compare(&fused_softmax, &composed_softmax, &[randn(dims)]);
        compare(&fused_softmax, &composed_softmax, &[(randn(dims) * 1e4).unwrap()]);
    }
    differences(&fused_softmax, &[randn(&[3, 5])]);
}

#[test]
fn causal_softmax_equals_its_composed_form() {
    for dims in [&[1, 1][..], &[7, 7], &[3, 8], &[2, 3, 17, 17], &[2, 1, 40], &[8, 150, 150]] {
        compare(&fused_causal, &composed_causal, &[randn(dims)]);
        compare(&fused_causal, &composed_causal, &[(randn(dims) * 1e4).unwrap()]);
    }
    differences(&fused_causal, &[randn(&[2, 3, 5])]);
}

#[test]
fn hidden_keys_are_exactly_zero_and_never_read() -> Result<()> {
    let hidden = Tensor::from_iter((0..9).map(|i| if i % 3 > i / 3 { f32::NAN } else { 1.0 }), &Cpu)?;
    let scores = Var::from_tensor(&hidden.reshape((3, 3))?)?;
    let y = causal_softmax(&scores, -2.0)?;
    let third = 1.0 / 3.0;
    assert_eq!(y.to_vec2::<f32>()?, [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [third, third, third]]);
    let grad = y.sqr()?.sum_all()?.backward()?.remove(&scores).unwrap();
    assert!(grad.abs()?.max_all()?.to_scalar::<f32>()? < 1e-6);
    Ok(())
}

#[test]
fn a_query_without_a_visible_key_gives_zeros() -> Result<()> {
    let scores = Var::from_tensor(&randn(&[4, 2]))?;
    let y = causal_softmax(&scores, 1.0)?;
    assert_eq!(y.narrow(0, 0, 3)?.to_vec2::<f64>()?, [[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]);
    let grad = y.narrow(1, 0, 1)?.sum_all()?.backward()?.remove(&scores).unwrap().to_vec2::<f64>()?;
    assert_eq!(grad[..3], [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]);
    assert!(grad[3][0] > 0.0 && (grad[3][0] + grad[3][1]).abs() < 1e-15);
    Ok(())
}

#[test]
fn masked_softmax_equals_its_composed_form() {
    let pairs: [[&[usize]; 2]; 7] = [
        [&[5], &[5]],
        [&[3, 7], &[1, 7]],
        [&[2, 3, 17], &[3, 17]],
        [&[2, 3, 5, 4], &[2, 1, 5, 4]],
        [&[2, 3, 5, 4], &[1, 3, 1, 4]],
        [&[2, 1, 3], &[2, 1, 3]],
        [&[8, 150, 150], &[150, 150]],
    ];
    for [x, mask] in pairs {
        compare(&fused_masked, &composed_masked, &[randn(x), randn(mask)]);
    }
    differences(&fused_masked, &[randn(&[2, 3, 5]), randn(&[3, 5])]);
}

#[test]
fn masked_keys_have_no_weight_and_rows_without_keys_are_zeros() -> Result<()> {
    let none = f64::NEG_INFINITY;
    let (scores, mask) =
        (Var::from_tensor(&randn(&[2, 3]))?, Tensor::new(&[[0.0, none, 0.0], [none; 3]], &Cpu)?);
    let y = masked_softmax(&scores, &mask, 1.0)?;
    let values = y.to_vec2::<f64>()?;
    assert_eq!((values[0][1], &values[1][..]), (0.0, &[0.0; 3][..]));
    let grad = y.sqr()?.sum_all()?.backward()?.remove(&scores).unwrap().to_vec2::<f64>()?;
    assert!(grad[0][0] != 0.0 && (grad[0][0] + grad[0][2]).abs() < 1e-15);
    assert_eq!((grad[0][1], &grad[1][..]), (0.0, &[0.0; 3][..]));
    Ok(())
}
