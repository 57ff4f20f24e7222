//! GELU.

use candle_core::{DType, Device::Cpu, Result, Tensor};
use candle_shard::kernels::gelu_erf;

use crate::kernels::harness::*;

pub(crate) fn fused_gelu_erf(t: &[Tensor]) -> Result<Tensor> {
    gelu_erf(&t[0])
}

pub(crate) fn composed_gelu_erf(t: &[Tensor]) -> Result<Tensor> {
    // The backward of candle's `gelu_erf` knows 1/√(2π) to six digits only; that of `erf` is exact.
    (&t[0] * ((&t[0] / 2f64.sqrt())?.erf()? + 1.0)?)? * 0.5
}

#[test]
fn gelu_erf_equals_its_composed_form() {
    for dims in SHAPES {
        compare(&fused_gelu_erf, &composed_gelu_erf, &[(randn(dims) * 3.0).unwrap()]);
    }
    differences(&fused_gelu_erf, &[(randn(&[31]) * 3.0).unwrap()]);
}

#[test]
fn gelu_erf_keeps_relative_accuracy_in_the_tail() -> Result<()> {
    let x = Tensor::arange(-12f32, 12.0, &Cpu)?;
    let exact = gelu_erf(&x.to_dtype(DType::F64)?)?.to_vec1::<f64>()?;
    for (got, want) in gelu_erf(&x)?.to_vec1::<f32>()?.into_iter().zip(exact) {
        assert!((got as f64 - want).abs() <= 1e-6 * want.abs(), "{got} for {want}");
    }
    Ok(())
}
