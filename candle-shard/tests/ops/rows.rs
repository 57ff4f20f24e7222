use crate::sweep::{Case, Input, Kind::Float, sweep};
use candle_core::{D, DType, Tensor};
use candle_shard::kernels;

const SHAPES: [&[usize]; 5] = [&[4, 6], &[5, 3], &[1, 7], &[2, 3, 5], &[3]];

#[test]
fn softmax_over_the_last_dim() {
    let case = |shape| {
        let softmax = |x: &[Tensor]| candle_nn::ops::softmax(&x[0], D::Minus1);
        Case::new("softmax_last_dim", &[(shape, Float)], |x| x[0].softmax_last_dim(), softmax)
    };
    sweep("softmax", DType::F64, SHAPES.map(case).to_vec());
}

#[test]
fn causal_softmax_over_keys() {
    let shapes: [&[usize]; 5] = [&[4, 4], &[3, 5], &[5, 2], &[2, 3, 4], &[1, 2, 3, 3]];
    let case = |shape| {
        let plain = |x: &[Tensor]| kernels::causal_softmax(&x[0], 0.7);
        Case::new("causal_softmax", &[(shape, Float)], |x| x[0].causal_softmax(0.7), plain)
    };
    sweep("causal_softmax", DType::F64, shapes.map(case).to_vec());
}

#[test]
fn norms() {
    let mut cases = Vec::new();
    for (shape, width) in SHAPES.into_iter().zip([&[6][..], &[3], &[7], &[5], &[3]]) {
        let inputs: [Input; 3] = [(shape, Float), (width, Float), (width, Float)];
        cases.extend([
            Case::new(
                "layer_norm",
                &inputs,
                |x| x[0].layer_norm(&x[1], &x[2], 1e-3),
                |x| {
                    let centred = x[0].broadcast_sub(&x[0].mean_keepdim(D::Minus1)?)?;
                    let stdev = (centred.sqr()?.mean_keepdim(D::Minus1)? + 1e-3)?.sqrt()?;
                    centred.broadcast_div(&stdev)?.broadcast_mul(&x[1])?.broadcast_add(&x[2])
                },
            ),
            Case::new(
                "rms_norm",
                &inputs[..2],
                |x| x[0].rms_norm(&x[1], 1e-3),
                |x| {
                    let size = (x[0].sqr()?.mean_keepdim(D::Minus1)? + 1e-3)?.sqrt()?;
                    x[0].broadcast_div(&size)?.broadcast_mul(&x[1])
                },
            ),
        ]);
    }
    sweep("norms", DType::F64, cases);
}
