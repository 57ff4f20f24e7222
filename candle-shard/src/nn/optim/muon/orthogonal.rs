//! Matrices brought near to orthogonal ones.
use super::ParamsMuon;
use candle_core::{D, DType, Result, Tensor};

/// The matrix `U·S'·Vᵀ` for `x = U·S·Vᵀ`, where the numbers of `S'` are near to 1: Newton and Schulz's iteration.
///
/// `x` has the dtype of `params`, and so has the result.
pub(super) fn orthogonalize(x: &Tensor, params: &ParamsMuon) -> Result<Tensor> {
    let [a, b, c] = params.ns_coefficients;
    let dtype = x.dtype();
    // candle's CPU has no products of bf16: each result is rounded, as PyTorch's is.
    let is_rounded = dtype == DType::BF16 && x.device().is_cpu();
    let round = |x: Tensor| match is_rounded {
        true => x.to_dtype(DType::BF16)?.to_dtype(DType::F32),
        false => Ok(x),
    };
    let is_tall = x.dim(0)? > x.dim(1)?;
    let mut x = if is_tall { x.t()? } else { x.clone() };
    if is_rounded {
        x = x.to_dtype(DType::F32)?;
    }
    let wide = if dtype == DType::BF16 { DType::F32 } else { dtype };
    let norm = round(x.to_dtype(wide)?.sqr()?.sum_keepdim(D::Minus1)?.sum_keepdim(0)?.sqrt()?)?;
    x = round(x.broadcast_div(&norm.maximum(params.eps)?.to_dtype(x.dtype())?)?)?;
    for _ in 0..params.ns_steps {
        let gram = round(x.matmul(&x.t()?)?)?;
        let polynomial = round(((&gram * b)? + (gram.matmul(&gram)? * c)?)?)?;
        x = round(((&x * a)? + polynomial.matmul(&x)?)?)?;
    }
    let x = if is_tall { x.t()? } else { x };
    x.to_dtype(dtype)?.contiguous()
}
