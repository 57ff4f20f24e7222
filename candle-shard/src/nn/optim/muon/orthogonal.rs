//! Approximate orthogonalization of matrices.
use super::ParamsMuon;
use crate::kernels;
use candle_core::{D, DType, Result, Tensor};

/// Returns `U·S'·Vᵀ` for `x = U·S·Vᵀ`, with the values of `S'` near 1, by the Newton-Schulz iteration.
///
/// `x` and the result have the dtype of `params`.
pub(super) fn orthogonalize(x: &Tensor, params: &ParamsMuon) -> Result<Tensor> {
    let [a, b, c] = params.ns_coefficients;
    let dtype = x.dtype();
    // candle's CPU backend has no bf16 products: each result is rounded, as in PyTorch.
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
    x = round(x.broadcast_div(&kernels::at_least(&norm, params.eps)?.to_dtype(x.dtype())?)?)?;
    for _ in 0..params.ns_steps {
        let gram = round(x.matmul(&x.t()?)?)?;
        let polynomial = round(((&gram * b)? + (gram.matmul(&gram)? * c)?)?)?;
        x = round(((&x * a)? + polynomial.matmul(&x)?)?)?;
    }
    let x = if is_tall { x.t()? } else { x };
    x.to_dtype(dtype)?.contiguous()
}
