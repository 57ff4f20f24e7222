//! Layer and RMS normalization.

use candle_core::{DType, Device::Cpu, Result, Tensor};
use candle_shard::kernels::{layer_norm, rms_norm};

use crate::kernels::harness::*;

/// Exact in f32, so that both forms add the same number, and large enough to condition rows of two near values.
const EPS: f64 = 1.0 / 16.0;

pub(crate) fn fused_layer_norm(t: &[Tensor]) -> Result<Tensor> {
    layer_norm(&t[0], &t[1], &t[2], EPS)
}

pub(crate) fn composed_layer_norm(t: &[Tensor]) -> Result<Tensor> {
    candle_nn::ops::layer_norm_slow(&t[0], &t[1], &t[2], EPS as f32)
}

pub(crate) fn fused_rms_norm(t: &[Tensor]) -> Result<Tensor> {
    rms_norm(&t[0], &t[1], EPS)
}

pub(crate) fn composed_rms_norm(t: &[Tensor]) -> Result<Tensor> {
    candle_nn::ops::rms_norm_slow(&t[0], &t[1], EPS as f32)
}

#[test]
fn layer_norm_equals_its_composed_form() {
    for dims in SHAPES {
        let k = *dims.last().unwrap();
        compare(&fused_layer_norm, &composed_layer_norm, &[randn(dims), randn(&[k]), randn(&[k])]);
    }
    differences(&fused_layer_norm, &[randn(&[3, 5]), randn(&[5]), randn(&[5])]);
}

#[test]
fn layer_norm_keeps_its_accuracy_far_from_zero() {
    let x = (randn(&[6, 64]) + 300.0).unwrap().to_dtype(DType::F32).unwrap();
    let ones = Tensor::ones(64, DType::F32, &Cpu).unwrap();
    let zeros = Tensor::zeros(64, DType::F32, &Cpu).unwrap();
    let exact = [&x, &ones, &zeros].map(|t| t.to_dtype(DType::F64).unwrap());
    let want = run(&composed_layer_norm, &exact, View::Plain).unwrap();
    // The mean itself is rounded to 300 · 2⁻²⁴ ≈ 2e-5.
    assert_close(&run(&fused_layer_norm, &[x, ones, zeros], View::Plain).unwrap(), &want, 1e-4, "far");
}

#[test]
fn rms_norm_equals_its_composed_form() {
    for dims in SHAPES {
        compare(&fused_rms_norm, &composed_rms_norm, &[randn(dims), randn(&[*dims.last().unwrap()])]);
    }
    differences(&fused_rms_norm, &[randn(&[3, 5]), randn(&[5])]);
}
