use candle_core::{CpuStorage, CustomOp1, D, DType, Layout, Result, Shape, Tensor, bail};
use candle_dist_base::edges;

use super::{
    TensorReader, compute_dtype,
    convert::to_dtype,
    elements, fused,
    real::Real,
    rows::{max, min, new_by_blocks, sum, sum_zip},
};

/// The softmax over the last dim.
///
/// `x` is `[.., k]`; the result has the same shape. Fails on a scalar and on dtypes other than floats.
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// let x = candle_core::Tensor::new(&[[1e4f32, 1e4], [0., -1e4]], &candle_core::Device::Cpu)?;
/// let y = candle_dist_kernels::softmax(&x)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[0.5, 0.5], [1.0, 0.0]]);
/// # Ok(())
/// # }
/// ```
pub fn softmax(x: &Tensor) -> Result<Tensor> {
    let dtype = compute_dtype("softmax", x)?;
    x.dim(D::Minus1)?;
    if fused::computes(&[x]) {
        return fused::softmax::softmax("softmax", x, 1.0, None, None);
    }
    if !x.device().is_cpu() {
        // candle refuses the maximum of nothing.
        return if x.elem_count() == 0 { Ok(x.clone()) } else { candle_nn::ops::softmax(x, D::Minus1) };
    }
    let wide = to_dtype(x, dtype)?.contiguous()?;
    to_dtype(&edges::apply1(&wide, Softmax { scale: 1.0, queries: None })?, x.dtype())
}

/// The softmax of `x · scale` over the keys that each query sees.
///
/// `x` contains attention scores `[.., q, k]`; the result has the same shape. The last query sees all keys, each query
/// before it one key less: key `j` is visible to query `i` iff `j ≤ i + (k - q)`. Hidden entries are exactly 0 and are
/// not read; a query without a visible key (`k < q`) has a row of zeros. Fails on fewer than two dims and on dtypes
/// other than floats.
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// let x = candle_core::Tensor::zeros((2, 2), candle_core::DType::F32, &candle_core::Device::Cpu)?;
/// let y = candle_dist_kernels::causal_softmax(&x, 0.125)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[1.0, 0.0], [0.5, 0.5]]);
/// # Ok(())
/// # }
/// ```
pub fn causal_softmax(x: &Tensor, scale: f64) -> Result<Tensor> {
    let dtype = compute_dtype("causal_softmax", x)?;
    let [.., queries, _] = *x.dims() else {
        bail!("causal_softmax: expected scores of shape [.., q, k], got {:?}", x.shape());
    };
    if fused::computes(&[x]) {
        return fused::softmax::softmax("softmax", x, scale, Some(queries), None);
    }
    if !x.device().is_cpu() {
        return composed_causal(x, scale);
    }
    let wide = to_dtype(x, dtype)?.contiguous()?;
    to_dtype(&edges::apply1(&wide, Softmax { scale, queries: Some(queries) })?, x.dtype())
}

fn composed_causal(x: &Tensor, scale: f64) -> Result<Tensor> {
    let (queries, keys) = (x.dim(D::Minus2)?, x.dim(D::Minus1)?);
    if x.elem_count() == 0 {
        return Ok(x.clone());
    }
    // Query `i` sees key `j` iff `queries + j <= keys + i`.
    let from = |from: usize, count: usize| Tensor::arange(from as u32, (from + count) as u32, x.device());
    let seen = from(queries, keys)?.broadcast_le(&from(keys, queries)?.unsqueeze(1)?)?;
    softmax_of_seen(&(x * scale)?, &seen)
}

/// The softmax over the entries that `seen` (u8, broadcast to `x`) marks, composed; other entries are 0.
pub(super) fn softmax_of_seen(x: &Tensor, seen: &Tensor) -> Result<Tensor> {
    let mask = seen.broadcast_as(x.shape())?;
    // A finite value would win over scores that are all minus infinity. A row without a visible entry is NaN until it is masked.
    let hidden = Tensor::new(f32::NEG_INFINITY, x.device())?.to_dtype(x.dtype())?.broadcast_as(x.shape())?;
    let y = candle_nn::ops::softmax(&mask.where_cond(x, &hidden)?, D::Minus1)?;
    mask.where_cond(&y, &y.zeros_like()?)
}

/// Replaces a row by the softmax of `row · scale`.
#[inline(always)]
pub(super) fn soften<T: Real>(row: &mut [T], scale: T) {
    if row.is_empty() {
        return;
    }
    // Scaling after the subtraction keeps the small differences of large scores.
    let top = if scale < T::zero() { min(row) } else { max(row) };
    soften_from(row, top, scale);
}

/// Like [`soften`] for a non-empty row whose largest scaled element is `top · scale`.
#[inline(always)]
pub(super) fn soften_from<T: Real>(row: &mut [T], top: T, scale: T) {
    for v in row.iter_mut() {
        *v = ((*v - top) * scale).exp_neg(T::zero());
    }
    let norm = T::one() / sum(row, |v| v);
    for v in row.iter_mut() {
        *v *= norm;
    }
}

/// Replaces the gradient of the softmax `y` by the gradient of its input `row`, where `y = softmax(row · scale)`.
#[inline(always)]
pub(super) fn soften_backward<T: Real>(grad: &mut [T], y: &[T], scale: T) {
    let mean = sum_zip(y, grad, |y, grad| y * grad);
    for (grad, &y) in grad.iter_mut().zip(y) {
        *grad = scale * y * (*grad - mean);
    }
}

struct Softmax {
    scale: f64,
    /// Rows of one score matrix if the softmax is causal.
    queries: Option<usize>,
}

impl Softmax {
    /// Returns the number of leading elements, of `keys`, that a row sees.
    #[inline(always)]
    fn visible(&self, row: usize, keys: usize) -> usize {
        match self.queries {
            Some(queries) => (row % queries + 1 + keys).saturating_sub(queries),
            None => keys,
        }
    }

    fn forward<T: Real>(&self, s: &CpuStorage, l: &Layout) -> Result<(CpuStorage, Shape)> {
        let (x, keys) = (elements::<T>(s, l)?, l.dim(D::Minus1)?);
        let scale = T::from_f64(self.scale);
        let (out, _) = new_by_blocks(
            x.len(),
            keys,
            keys,
            #[inline(always)]
            |first, out| {
                let rows = out.chunks_exact_mut(keys).zip(x[first * keys..].chunks_exact(keys));
                for (i, (out, x)) in rows.enumerate() {
                    let out = &mut out[..self.visible(first + i, keys)];
                    out.copy_from_slice(&x[..out.len()]);
                    soften(out, scale);
                }
            },
        );
        Ok((T::to_cpu_storage_owned(out), l.shape().clone()))
    }

    fn backward<T: Real>(&self, y: &Tensor, grad: &Tensor) -> Result<Tensor> {
        let keys = y.dim(D::Minus1)?;
        let (y, grad) = (TensorReader::new(y), TensorReader::new(grad));
        let (ys, gs) = (y.elements::<T>()?, grad.elements::<T>()?);
        let scale = T::from_f64(self.scale);
        let (out, _) = new_by_blocks(
            ys.len(),
            keys,
            keys,
            #[inline(always)]
            |first, out| {
                let inputs = ys[first * keys..].chunks_exact(keys).zip(gs[first * keys..].chunks_exact(keys));
                for (i, (out, (y, grad))) in out.chunks_exact_mut(keys).zip(inputs).enumerate() {
                    let visible = self.visible(first + i, keys);
                    out[..visible].copy_from_slice(&grad[..visible]);
                    soften_backward(&mut out[..visible], &y[..visible], scale);
                }
            },
        );
        y.like(out)
    }
}

impl CustomOp1 for Softmax {
    fn name(&self) -> &'static str {
        "softmax"
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> Result<(CpuStorage, Shape)> {
        match s {
            CpuStorage::F64(_) => self.forward::<f64>(s, l),
            _ => self.forward::<f32>(s, l),
        }
    }

    fn bwd(&self, _: &Tensor, y: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let grad = grad.contiguous()?;
        match y.dtype() {
            DType::F64 => self.backward::<f64>(y, &grad),
            _ => self.backward::<f32>(y, &grad),
        }
        .map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_composed_causal_softmax_equals_the_fused_one() {
        for (queries, keys) in [(1, 1), (3, 3), (2, 5), (5, 2)] {
            let x = Tensor::randn(0f64, 3.0, (2, queries, keys), &candle_core::Device::Cpu).unwrap();
            let (a, b) = (composed_causal(&x, 0.7).unwrap(), causal_softmax(&x, 0.7).unwrap());
            let diff = (a - b).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f64>().unwrap();
            assert!(diff < 1e-15, "{queries} queries, {keys} keys: {diff}");
        }
    }
}
