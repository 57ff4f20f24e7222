use candle_core::{D, Result, Shape, Tensor};
use candle_dist_base::{edges, empty};

use super::{
    check_vector, compute_dtype,
    float_op::{FloatNode, FloatOp},
    fused,
    real::Real,
    rows::{add_assign, new_by_blocks, sum, sum_zip},
};

/// Layer normalization over the last dim: `(x - mean) / √(variance + eps) · weight + bias`.
///
/// `x` is `[.., k]`, `weight` and `bias` are `[k]`, all of the same dtype; the result has the shape of `x`. The
/// variance is the biased one. Fails if shapes, dtypes or devices do not match. Source: Ba, Kiros and Hinton,
/// <https://arxiv.org/abs/1607.06450>.
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// use candle_core::{Device::Cpu, Tensor};
/// let x = Tensor::new(&[[1f64, 3.], [8., 4.]], &Cpu)?;
/// let (weight, bias) = (Tensor::new(&[1f64, 2.], &Cpu)?, Tensor::new(&[0f64, 10.], &Cpu)?);
/// let y = candle_dist_kernels::layer_norm(&x, &weight, &bias, 0.0)?;
/// assert_eq!(y.to_vec2::<f64>()?, [[-1., 12.], [1., 8.]]);
/// # Ok(())
/// # }
/// ```
pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
    compute_dtype("layer_norm", x)?;
    let len = x.dim(D::Minus1)?;
    check_vector("layer_norm", x, "weight", weight, len)?;
    check_vector("layer_norm", x, "bias", bias, len)?;
    if fused::computes(&[x, weight, bias]) {
        return fused::norm::norm(x, weight, Some(bias), eps);
    }
    if !x.device().is_cpu() {
        return composed(x, weight, bias, eps);
    }
    let [x, weight, bias] = [x, weight, bias].map(edges::contiguous);
    edges::apply3(&x?, &weight?, &bias?, FloatNode(LayerNormOp { eps }))
}

/// The same from candle's operations. candle-nn's `layer_norm_slow` rounds `eps` to f32, and rounds before the weight.
pub(super) fn composed(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
    if x.elem_count() == 0 {
        return empty::zeros_of(&[x, weight, bias], x.shape(), x.dtype());
    }
    let (dtype, wide) = (x.dtype(), compute_dtype("layer_norm", x)?);
    let [x, weight, bias] = [x, weight, bias].map(|t| t.to_dtype(wide));
    let (x, weight, bias) = (x?, weight?, bias?);
    let x = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
    let deviation = (x.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?;
    x.broadcast_div(&deviation)?.broadcast_mul(&weight)?.broadcast_add(&bias)?.to_dtype(dtype)
}

struct LayerNormOp {
    eps: f64,
}

impl LayerNormOp {
    /// Returns the mean of a row and the inverse of its standard deviation.
    #[inline(always)]
    fn moments<T: Real>(&self, row: &[T]) -> (T, T) {
        let len = T::from_f64(row.len() as f64);
        let mean = sum(row, |v| v) / len;
        let variance = sum(row, |v| (v - mean) * (v - mean)) / len;
        (mean, T::one() / (variance + T::from_f64(self.eps)).sqrt())
    }
}

impl FloatOp<3> for LayerNormOp {
    const NAME: &'static str = "layer_norm";

    fn forward<T: Real>(&self, [x, weight, bias]: [&[T]; 3], shapes: [&Shape; 3]) -> Result<(Vec<T>, Shape)> {
        let len = weight.len();
        let (out, _) = new_by_blocks(
            x.len(),
            len,
            len,
            #[inline(always)]
            |first, out| {
                for (out, x) in out.chunks_exact_mut(len).zip(x[first * len..].chunks_exact(len)) {
                    let (mean, scale) = self.moments(x);
                    for (((out, &x), &weight), &bias) in out.iter_mut().zip(x).zip(weight).zip(bias) {
                        *out = (x - mean) * scale * weight + bias;
                    }
                }
            },
        );
        Ok((out, shapes[0].clone()))
    }

    fn backward<T: Real>(
        &self,
        [xs, ws, _]: [&[T]; 3],
        _: [&Shape; 3],
        _: [bool; 3],
        gs: &[T],
    ) -> Result<[Option<Vec<T>>; 3]> {
        let len = ws.len();
        let count = T::from_f64(len as f64);
        let (dx, parts) = new_by_blocks(
            xs.len(),
            len,
            len,
            #[inline(always)]
            |first, dx| {
                let mut sums = vec![T::zero(); 2 * len];
                let (dw, db) = sums.split_at_mut(len);
                let inputs = xs[first * len..].chunks_exact(len).zip(gs[first * len..].chunks_exact(len));
                for (dx, (x, g)) in dx.chunks_exact_mut(len).zip(inputs) {
                    let (mean, scale) = self.moments(x);
                    for ((dx, &g), &w) in dx.iter_mut().zip(g).zip(ws) {
                        *dx = g * w;
                    }
                    for ((dw, &g), &x) in dw.iter_mut().zip(g).zip(x) {
                        *dw += g * ((x - mean) * scale);
                    }
                    add_assign(db, g);
                    let shift = sum(dx, |d| d) / count;
                    let slope = sum_zip(dx, x, |d, x| d * (x - mean)) * scale * scale / count;
                    for (dx, &x) in dx.iter_mut().zip(x) {
                        *dx = (*dx - shift - (x - mean) * slope) * scale;
                    }
                }
                sums
            },
        );
        let mut sums = vec![T::zero(); 2 * len];
        for part in parts {
            add_assign(&mut sums, &part);
        }
        let db = sums.split_off(len);
        Ok([Some(dx), Some(sums), Some(db)])
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
            let (x, vectors) = ((waves(&[3, 4, 5], dtype).as_tensor() * 1e-3)?, waves(&[2, 5], dtype));
            let (weight, bias) = (vectors.get(0)?, vectors.get(1)?);
            // f32 does not have this number.
            let [got, want] =
                [composed, layer_norm].map(|norm| norm(&x, &weight, &bias, 1e-5)?.to_dtype(DType::F64));
            let diff = (got? - want?)?.abs()?.max_all()?.to_scalar::<f64>()?;
            assert!(diff <= allowed, "{dtype:?}: {diff}");
        }
        Ok(())
    }
}
