use crate::ops::sweep::{Case, Input, Kind::Float, sweep, sweep_in};
use candle_core::{D, DType, Device, Tensor};
use candle_shard::kernels;
use itertools::Itertools;

const SHAPES: [&[usize]; 5] = [&[4, 6], &[5, 3], &[1, 7], &[2, 3, 5], &[3]];

#[test]
fn softmax_over_the_last_dim() {
    let case = |shape| {
        let softmax = |x: &[Tensor]| candle_nn::ops::softmax(&x[0], D::Minus1);
        Case::new("softmax_last_dim", &[(shape, Float)], |x| x[0].softmax_last_dim(), softmax)
    };
    sweep("softmax", SHAPES.map(case).to_vec());
}

#[test]
fn softmax_and_its_kin_over_any_dim() {
    let mut cases = Vec::new();
    let shapes: [&[usize]; 4] = [&[4, 6], &[5, 3], &[1, 7], &[2, 3, 5]];
    for shape in shapes {
        let x: [Input; 1] = [(shape, Float)];
        for dim in 0..shape.len() {
            cases.extend([
                Case::new(
                    &format!("softmax {dim}"),
                    &x,
                    move |x| x[0].softmax(dim),
                    move |x| candle_nn::ops::softmax(&x[0], dim),
                ),
                Case::new(
                    &format!("log_softmax {dim}"),
                    &x,
                    move |x| x[0].log_softmax(dim),
                    move |x| candle_nn::ops::log_softmax(&x[0], dim),
                ),
                Case::new(
                    &format!("log_sum_exp {dim}"),
                    &x,
                    move |x| x[0].log_sum_exp(dim),
                    move |x| x[0].log_sum_exp(dim),
                ),
            ]);
        }
    }
    let x: [Input; 1] = [(&[3, 2, 5], Float)];
    cases.extend([
        Case::new("log_sum_exp (0, 2)", &x, |x| x[0].log_sum_exp((0, 2)), |x| x[0].log_sum_exp((0, 2))),
        Case::new("softmax of none", &[(&[0, 3], Float)], |x| x[0].softmax(1), |x| x[0].sqr()?.sqrt()),
        Case::new(
            "log_softmax of none",
            &[(&[0, 3], Float)],
            |x| x[0].log_softmax(0),
            |x| x[0].sqr()?.sqrt(),
        ),
    ]);
    sweep("softmax of any dim", cases);
}

/// In f64 only: single precision does not tell the exponents of large numbers well enough.
#[test]
fn softmax_of_large_numbers() {
    let shapes: [&[usize]; 2] = [&[4, 6], &[5, 3]];
    let case = |shape| {
        let plain = |x: &[Tensor]| candle_nn::ops::softmax(&(&x[0] * 1e3)?, 1);
        Case::new("large", &[(shape, Float)], |x| (&x[0] * 1e3)?.softmax(1), plain)
    };
    sweep_in(&[DType::F64], "softmax of large numbers", shapes.map(case).to_vec());
}

#[test]
fn causal_softmax_over_keys() {
    let shapes: [&[usize]; 5] = [&[4, 4], &[3, 5], &[5, 2], &[2, 3, 4], &[1, 2, 3, 3]];
    let case = |shape| {
        let plain = |x: &[Tensor]| kernels::causal_softmax(&x[0], 0.7);
        Case::new("causal_softmax", &[(shape, Float)], |x| x[0].causal_softmax(0.7), plain)
    };
    sweep("causal_softmax", shapes.map(case).to_vec());
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
                    let centered = x[0].broadcast_sub(&x[0].mean_keepdim(D::Minus1)?)?;
                    let stdev = (centered.sqr()?.mean_keepdim(D::Minus1)? + 1e-3)?.sqrt()?;
                    centered.broadcast_div(&stdev)?.broadcast_mul(&x[1])?.broadcast_add(&x[2])
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
            Case::new(
                "add_rms_norm",
                &[(shape, Float), (shape, Float), (width, Float)],
                |x| {
                    let [sum, normed] = x[0].add_rms_norm(&x[1], &x[2], 1e-3)?;
                    sum.affine(0.5, 0.0)?.add(&normed)
                },
                |x| {
                    let sum = (&x[0] + &x[1])?;
                    let size = (sum.sqr()?.mean_keepdim(D::Minus1)? + 1e-3)?.sqrt()?;
                    (&sum * 0.5)? + sum.broadcast_div(&size)?.broadcast_mul(&x[2])?
                },
            ),
        ]);
    }
    sweep("norms", cases);
}

/// A sum of 16-bit floats in their own dtype stops growing after some hundred elements.
#[test]
fn long_rows_of_16_bits_add_up() {
    use candle_shard::{DTensor, Reduction, Replicate, Result, Shard};
    for (dtype, at) in [DType::BF16, DType::F16].into_iter().cartesian_product([Shard(1), Replicate]) {
        test_utils::on_ranks(2, "16 bits", move |ctx| -> Result<()> {
            let mesh = crate::common::mesh(ctx, &[2])?;
            let zeros = DTensor::zeros((1, 8192), dtype, &Device::Cpu, &mesh, &[at])?;
            let one = |x: Result<DTensor>| x?.to_dtype(DType::F32)?.max_all()?.to_scalar::<f32>();
            let (log_n, what) = (8192f32.ln(), format!("{} as {at}", dtype.as_str()));
            assert_eq!(one(zeros.softmax(1))? * 8192.0, 1.0, "{what}");
            assert_eq!(one(zeros.t()?.softmax(0))? * 8192.0, 1.0, "{what}");
            assert!((one(zeros.log_softmax(1))? + log_n).abs() < 0.05, "{what}");
            assert!((one(zeros.log_sum_exp(1))? - log_n).abs() < 0.05, "{what}");
            let ones = zeros.ones_like()?;
            assert_eq!(one(ones.sum(1))?, 8192.0, "{what}");
            assert_eq!(one(ones.affine(16.0, 0.0)?.mean_all())?, 16.0, "{what}"); // the sum is no f16
            assert!((one(ones.norm())? / 8192f32.sqrt() - 1.0).abs() < 0.01, "{what}");
            assert_eq!(one(zeros.mse_loss(&zeros.ones_like()?, Reduction::Mean))?, 1.0, "{what}");
            Ok(())
        });
    }
}
