use candle_core::{CpuStorage, CustomOp2, D, DType, Layout, Result, Shape, Tensor, bail};
use candle_dist_base::{edges, empty};

use super::{
    TensorReader, check_dtype, compute_dtype,
    convert::to_dtype,
    elements, fused,
    real::Real,
    rows::{max, new_by_blocks},
    softmax::{soften_backward, soften_from},
};

/// The softmax over the last dim of `x · scale + mask`.
///
/// `x` contains attention scores `[.., k]`. `mask` has its dtype and is added with its dims broadcast to those of `x`,
/// except that its last dim must be `k`; -∞ hides an entry. The result has the shape of `x`. A fully hidden row is
/// zeros. Fails if shapes or dtypes do not match and on dtypes other than floats.
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// use candle_core::{Device::Cpu, Tensor};
/// let x = Tensor::new(&[[8f64, 8., 9.], [1., 2., 3.]], &Cpu)?;
/// let mask = Tensor::new(&[0f64, 0., f64::NEG_INFINITY], &Cpu)?;
/// let y = candle_dist_kernels::masked_softmax(&x, &mask, 0.0)?;
/// assert_eq!(y.to_vec2::<f64>()?, [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]);
/// # Ok(())
/// # }
/// ```
pub fn masked_softmax(x: &Tensor, mask: &Tensor, scale: f64) -> Result<Tensor> {
    let dtype = compute_dtype("masked_softmax", x)?;
    check_dtype("masked_softmax", x, mask)?;
    let Some(rows) = mask_rows(x.dims(), mask.dims()) else {
        bail!("masked_softmax: a mask {:?} does not broadcast to scores {:?}", mask.shape(), x.shape());
    };
    if let Some(rows) = fused::softmax::mask_rows(x.dims(), mask.dims())
        && !mask.track_op()
        && fused::computes(&[x, mask])
    {
        return fused::softmax::softmax("masked_softmax", x, scale, None, Some((mask, rows)));
    }
    if !x.device().is_cpu() {
        return composed(x, mask, scale);
    }
    let [x_, mask] = [x, mask].map(|t| to_dtype(t, dtype)?.contiguous());
    to_dtype(&edges::apply2(&x_?, &mask?, MaskedSoftmax { scale, rows })?, x.dtype())
}

/// Returns the row of the mask for each row of the scores.
fn mask_rows(x: &[usize], mask: &[usize]) -> Option<Vec<usize>> {
    let ((last, lead), (mask_last, mask_lead)) = (x.split_last()?, mask.split_last()?);
    let extra = lead.len().checked_sub(mask_lead.len())?;
    let fits = last == mask_last && mask_lead.iter().zip(&lead[extra..]).all(|(m, n)| m == n || *m == 1);
    let mut rows = vec![0];
    for (d, &n) in lead.iter().enumerate() {
        let size = d.checked_sub(extra).map_or(1, |d| mask_lead[d]);
        let at = |row: usize, i: usize| if size == 1 { row } else { row * size + i };
        rows = rows.iter().flat_map(|&row| (0..n).map(move |i| at(row, i))).collect();
    }
    fits.then_some(rows)
}

pub(super) fn composed(x: &Tensor, mask: &Tensor, scale: f64) -> Result<Tensor> {
    if x.elem_count() == 0 {
        return empty::zeros_of(&[x, mask], x.shape(), x.dtype());
    }
    let scores = (x * scale)?.broadcast_add(mask)?;
    let hidden = scores.max_keepdim(D::Minus1)?.eq(f64::NEG_INFINITY)?.broadcast_as(scores.shape())?;
    let zeros = scores.zeros_like()?;
    // Replacing a fully hidden row by zeros keeps NaN out of both passes.
    let y = candle_nn::ops::softmax(&hidden.where_cond(&zeros, &scores)?, D::Minus1)?;
    hidden.where_cond(&zeros, &y)
}

struct MaskedSoftmax {
    scale: f64,
    rows: Vec<usize>,
}

impl MaskedSoftmax {
    fn forward<T: Real>(&self, x: &[T], mask: &[T], keys: usize) -> CpuStorage {
        let (scale, none) = (T::from_f64(self.scale), T::from_f64(f64::NEG_INFINITY));
        let (out, _) = new_by_blocks(
            x.len(),
            keys,
            keys,
            #[inline(always)]
            |first, out| {
                let rows = out.chunks_exact_mut(keys).zip(x[first * keys..].chunks_exact(keys));
                for ((out, x), &row) in rows.zip(&self.rows[first..]) {
                    for ((out, &x), &mask) in out.iter_mut().zip(x).zip(&mask[row * keys..]) {
                        *out = x * scale + mask;
                    }
                    let top = max(out);
                    if top == none {
                        out.fill(T::zero());
                        continue;
                    }
                    soften_from(out, top, T::one());
                }
            },
        );
        T::to_cpu_storage_owned(out)
    }

    /// Returns the gradients of the scores, and of the mask if it is tracked.
    fn backward<T: Real>(
        &self,
        mask: &Tensor,
        y: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (keys, for_mask) = (y.dim(D::Minus1)?, mask.track_op());
        let [y, grad, mask] = [y, grad, mask].map(TensorReader::new);
        let (ys, gs) = (y.elements::<T>()?, grad.elements::<T>()?);
        let (mut out, _) = new_by_blocks(
            ys.len(),
            keys,
            keys,
            #[inline(always)]
            |first, out| {
                let inputs = ys[first * keys..].chunks_exact(keys).zip(gs[first * keys..].chunks_exact(keys));
                for (out, (y, grad)) in out.chunks_exact_mut(keys).zip(inputs) {
                    out.copy_from_slice(grad);
                    soften_backward(out, y, T::one());
                }
            },
        );
        let mut dmask = None;
        if for_mask {
            let mut sums = vec![T::zero(); mask.elements::<T>()?.len()];
            for (out, &row) in out.chunks_exact(keys.max(1)).zip(&self.rows) {
                super::rows::add_assign(&mut sums[row * keys..][..keys], out);
            }
            dmask = Some(mask.like(sums)?);
        }
        let scale = T::from_f64(self.scale);
        out.iter_mut().for_each(|v| *v *= scale);
        Ok((Some(y.like(out)?), dmask))
    }
}

impl CustomOp2 for MaskedSoftmax {
    fn name(&self) -> &'static str {
        "masked_softmax"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_l: &Layout,
        mask: &CpuStorage,
        mask_l: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let keys = x_l.dim(D::Minus1)?;
        let out = match x {
            CpuStorage::F64(_) => self.forward::<f64>(elements(x, x_l)?, elements(mask, mask_l)?, keys),
            _ => self.forward::<f32>(elements(x, x_l)?, elements(mask, mask_l)?, keys),
        };
        Ok((out, x_l.shape().clone()))
    }

    fn bwd(
        &self,
        _: &Tensor,
        mask: &Tensor,
        y: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let grad = grad.contiguous()?;
        match y.dtype() {
            DType::F64 => self.backward::<f64>(mask, y, &grad),
            _ => self.backward::<f32>(mask, y, &grad),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device::Cpu;

    #[test]
    fn the_composed_form_equals_the_fused_one() -> Result<()> {
        let x = Tensor::randn(0f64, 1.0, (2, 3, 4), &Cpu)?;
        let hidden = |i: usize| if i < 4 || i.is_multiple_of(5) { f64::NEG_INFINITY } else { i as f64 * 0.3 };
        let mask = Tensor::from_iter((0..12).map(hidden), &Cpu)?.reshape((3, 4))?;
        let diff = (composed(&x, &mask, 0.7)? - masked_softmax(&x, &mask, 0.7)?)?;
        assert!(diff.abs()?.max_all()?.to_scalar::<f64>()? < 1e-14);
        Ok(())
    }

    #[test]
    fn rows_of_scores_find_their_rows_of_the_mask() {
        assert_eq!(mask_rows(&[2, 3, 5], &[5]), Some(vec![0; 6]));
        assert_eq!(mask_rows(&[2, 3, 5], &[3, 5]), Some(vec![0, 1, 2, 0, 1, 2]));
        assert_eq!(mask_rows(&[2, 3, 5], &[2, 1, 5]), Some(vec![0, 0, 0, 1, 1, 1]));
        assert_eq!(mask_rows(&[2, 3, 5], &[2, 5]), None);
        assert_eq!(mask_rows(&[2, 3, 5], &[3, 1]), None);
        assert_eq!(mask_rows(&[3, 5], &[1, 3, 5]), None);
    }
}
