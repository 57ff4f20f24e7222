//! Matrix products into new memory.
//!
#![doc = include_str!("README.md")]

mod columns;
mod matrix;
mod operands;
mod pair_operand;
#[cfg_attr(not(all(target_arch = "x86_64", feature = "avx512")), path = "no_pairs.rs")]
mod pairs;
mod panels;
mod weight_rows;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Layout, Result};
use gemm::Parallelism;
use half::{bf16, f16};

use super::element::Element;
use super::real::Real;
pub(super) use columns::by_columns;
use matrix::multiply;
pub(super) use matrix::{LeftOperand, Matrix};
pub(super) use operands::{ProductRows, RightOperand};
use weight_rows::is_faster;

/// Returns the product of `a [m, k]` and `b [k, n]` with any strides, in the compute dtype.
///
/// The bits of f32 and f64 are those of candle's product. candle fills the result with zeros before it computes it; this
/// does not. 16-bit operands are summed in f32. They are not widened as a whole: processors with AVX-512 multiply pairs of
/// bf16, which treats numbers below 2⁻¹²⁶ as zeros, and others widen panels.
pub(super) fn product(a: &CpuStorage, a_l: &Layout, b: &CpuStorage, b_l: &Layout) -> Result<CpuStorage> {
    let ((m, k), (_, n)) = (a_l.shape().dims2()?, b_l.shape().dims2()?);
    if m * k * n == 0 {
        return Ok(match a.dtype() {
            DType::F64 => CpuStorage::F64(vec![0.0; m * n]),
            _ => CpuStorage::F32(vec![0.0; m * n]),
        });
    }
    match (a, b) {
        // On other processors candle may be built with a faster library.
        (CpuStorage::F32(a), CpuStorage::F32(b)) if cfg!(target_arch = "x86_64") => {
            Ok(CpuStorage::F32(dense(a, a_l, b, b_l)?))
        }
        (CpuStorage::F64(a), CpuStorage::F64(b)) if cfg!(target_arch = "x86_64") => {
            Ok(CpuStorage::F64(dense(a, a_l, b, b_l)?))
        }
        (CpuStorage::BF16(a), CpuStorage::BF16(b)) => Ok(CpuStorage::F32(of_bf16(a, a_l, b, b_l)?)),
        (CpuStorage::F16(a), CpuStorage::F16(b)) => Ok(CpuStorage::F32(of_f16(a, a_l, b, b_l)?)),
        _ => a.matmul(b, (1, m, n, k), a_l, b_l),
    }
}

/// Like [`product`], with a result in the dtype of the operands.
pub(super) fn rounded_product(
    a: &CpuStorage,
    a_l: &Layout,
    b: &CpuStorage,
    b_l: &Layout,
) -> Result<CpuStorage> {
    let ((m, k), (_, n)) = (a_l.shape().dims2()?, b_l.shape().dims2()?);
    match (a, b) {
        (CpuStorage::BF16(_), CpuStorage::BF16(_)) if k * m * n == 0 => {
            Ok(CpuStorage::BF16(vec![bf16::ZERO; m * n]))
        }
        (CpuStorage::F16(_), CpuStorage::F16(_)) if k * m * n == 0 => {
            Ok(CpuStorage::F16(vec![f16::ZERO; m * n]))
        }
        (CpuStorage::BF16(a), CpuStorage::BF16(b)) => Ok(CpuStorage::BF16(of_bf16(a, a_l, b, b_l)?)),
        (CpuStorage::F16(a), CpuStorage::F16(b)) => Ok(CpuStorage::F16(of_f16(a, a_l, b, b_l)?)),
        _ => product(a, a_l, b, b_l),
    }
}

/// Like [`product`] of `x` and the transpose of `weight [n, k]`, whose bits need not be those of candle's product.
pub(super) fn product_with_weight(
    x: &CpuStorage,
    x_l: &Layout,
    weight: &CpuStorage,
    weight_l: &Layout,
) -> Result<CpuStorage> {
    let ((m, k), (n, _)) = (x_l.shape().dims2()?, weight_l.shape().dims2()?);
    let are_rows = x_l.stride()[1] == 1 && weight_l.stride()[1] == 1;
    let are_rows = are_rows && cfg!(target_arch = "x86_64") && m * n * k > 0;
    let stride = weight_l.stride()[0];
    match (x, weight) {
        (CpuStorage::F32(x), CpuStorage::F32(weight)) if are_rows && is_faster::<f32>(m, stride) => {
            Ok(CpuStorage::F32(weight_rows::product(Matrix::of(x, x_l)?, Matrix::of(weight, weight_l)?)?))
        }
        (CpuStorage::F64(x), CpuStorage::F64(weight)) if are_rows && is_faster::<f64>(m, stride) => {
            Ok(CpuStorage::F64(weight_rows::product(Matrix::of(x, x_l)?, Matrix::of(weight, weight_l)?)?))
        }
        _ => product(x, x_l, weight, &weight_l.transpose(0, 1)?),
    }
}

/// Returns the dense product of matrices that are not empty.
fn dense<T: Real>(a: &[T], a_l: &Layout, b: &[T], b_l: &Layout) -> Result<Vec<T>> {
    let threads = crate::parallel::threads();
    let parallelism = if threads > 1 { Parallelism::Rayon(threads) } else { Parallelism::None };
    multiply(Matrix::of(a, a_l)?, Matrix::of(b, b_l)?, parallelism)
}

fn of_bf16<O: Element<Real = f32>>(a: &[bf16], a_l: &Layout, b: &[bf16], b_l: &Layout) -> Result<Vec<O>> {
    let (a, b) = (Matrix::of(a, a_l)?, Matrix::of(b, b_l)?);
    #[cfg(all(target_arch = "x86_64", feature = "avx512"))]
    if let Some(pairs) = pairs::Pairs::new() {
        return pairs.product(a, b, None);
    }
    panels::product(a, b, None)
}

fn of_f16<O: Element<Real = f32>>(a: &[f16], a_l: &Layout, b: &[f16], b_l: &Layout) -> Result<Vec<O>> {
    panels::product(Matrix::of(a, a_l)?, Matrix::of(b, b_l)?, None)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests;
