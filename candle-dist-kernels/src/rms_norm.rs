use candle_core::{D, Result, Shape, Tensor};
use candle_dist_base::{edges, empty};

use super::{
    check_vector, compute_dtype,
    float_op::{FloatNode, FloatOp},
    fused,
    real::Real,
    rows::{add_assign, new_by_blocks, sum, sum_zip},
};

/// Root mean square normalization over the last dim: `x / √(mean(x²) + eps) · weight`.
///
/// `x` is `[.., k]`, `weight` is `[k]` of the same dtype; the result has the shape of `x`. Fails if shapes, dtypes or
/// devices do not match. Source: Zhang and Sennrich, <https://arxiv.org/abs/1910.07467>.
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// use candle_core::{Device::Cpu, Tensor};
/// let (x, weight) = (Tensor::new(&[[2f64, -2.], [4., 4.]], &Cpu)?, Tensor::new(&[1f64, 10.], &Cpu)?);
/// let y = candle_dist_kernels::rms_norm(&x, &weight, 0.0)?;
/// assert_eq!(y.to_vec2::<f64>()?, [[1., -10.], [1., 10.]]);
/// # Ok(())
/// # }
/// ```
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    compute_dtype("rms_norm", x)?;
    check_vector("rms_norm", x, "weight", weight, x.dim(D::Minus1)?)?;
    if fused::computes(&[x, weight]) {
        return fused::norm::norm(x, weight, None, eps);
    }
    if !x.device().is_cpu() {
        return composed(x, weight, eps);
    }
    edges::apply2(&edges::contiguous(x)?, &weight.contiguous()?, FloatNode(RmsNormOp { eps }))
}

/// The same from candle's operations. candle-nn's `rms_norm_slow` rounds `eps` to f32, and rounds before the weight.
pub(super) fn composed(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    if x.elem_count() == 0 {
        return empty::zeros_of(&[x, weight], x.shape(), x.dtype());
    }
    let (dtype, wide) = (x.dtype(), compute_dtype("rms_norm", x)?);
    let (x, weight) = (x.to_dtype(wide)?, weight.to_dtype(wide)?);
    let mean = (x.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?;
    x.broadcast_div(&mean)?.broadcast_mul(&weight)?.to_dtype(dtype)
}

struct RmsNormOp {
    eps: f64,
}

impl RmsNormOp {
    /// Returns the inverse of a row's root mean square.
    #[inline(always)]
    fn scale<T: Real>(&self, row: &[T]) -> T {
        let mean = sum(row, |v| v * v) / T::from_f64(row.len() as f64);
        T::one() / (mean + T::from_f64(self.eps)).sqrt()
    }
}

impl FloatOp<2> for RmsNormOp {
    const NAME: &'static str = "rms_norm";

    fn forward<T: Real>(&self, [x, weight]: [&[T]; 2], shapes: [&Shape; 2]) -> Result<(Vec<T>, Shape)> {
        let len = weight.len();
        let (out, _) = new_by_blocks(
            x.len(),
            len,
            len,
            #[inline(always)]
            |first, out| {
                for (out, x) in out.chunks_exact_mut(len).zip(x[first * len..].chunks_exact(len)) {
                    let scale = self.scale(x);
                    for ((out, &x), &weight) in out.iter_mut().zip(x).zip(weight) {
                        *out = x * scale * weight;
                    }
                }
            },
        );
        Ok((out, shapes[0].clone()))
    }

    fn backward<T: Real>(
        &self,
        [xs, ws]: [&[T]; 2],
        _: [&Shape; 2],
        _: [bool; 2],
        gs: &[T],
    ) -> Result<[Option<Vec<T>>; 2]> {
        let len = ws.len();
        let (dx, parts) = new_by_blocks(
            xs.len(),
            len,
            len,
            #[inline(always)]
            |first, dx| {
                let mut dw = vec![T::zero(); len];
                let inputs = xs[first * len..].chunks_exact(len).zip(gs[first * len..].chunks_exact(len));
                for (dx, (x, g)) in dx.chunks_exact_mut(len).zip(inputs) {
                    let scale = self.scale(x);
                    for ((dx, &g), &w) in dx.iter_mut().zip(g).zip(ws) {
                        *dx = g * w;
                    }
                    for ((dw, &g), &x) in dw.iter_mut().zip(g).zip(x) {
                        *dw += g * (x * scale);
                    }
                    let slope = sum_zip(dx, x, |d, x| d * x) * scale * scale / T::from_f64(len as f64);
                    for (dx, &x) in dx.iter_mut().zip(x) {
                        *dx = (*dx - x * slope) * scale;
                    }
                }
                dw
            },
        );
        let mut dw = vec![T::zero(); len];
        for part in parts {
            add_assign(&mut dw, &part);
        }
        Ok([Some(dx), Some(dw)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::waves::waves;
    use candle_core::DType;

    #[test]
    fn the_composed_form_equals_the_fused_one() -> Result<()> {
        for (dtype, allowed) in [(DType::F64, 1e-14), (DType::F32, 1e-6), (DType::BF16, 0.0)] {
            let (x, weight) = ((waves(&[3, 4, 5], dtype).as_tensor() * 1e-3)?, waves(&[5], dtype));
            // f32 does not have this number.
            let [got, want] = [composed, rms_norm].map(|norm| norm(&x, &weight, 1e-5)?.to_dtype(DType::F64));
            let diff = (got? - want?)?.abs()?.max_all()?.to_scalar::<f64>()?;
            assert!(diff <= allowed, "{dtype:?}: {diff}");
        }
        Ok(())
    }
}
