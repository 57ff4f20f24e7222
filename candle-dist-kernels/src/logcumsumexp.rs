use super::{TensorReader, compute_dtype, convert::to_dtype, elements, real::Real, rows::new_by_blocks};
use candle_core::{CpuStorage, CustomOp1, D, DType, Layout, Result, Shape, Tensor};
use candle_dist_base::edges;

/// The logarithms of the running sums of the exponentials along the last dim.
///
/// `x` is `[.., k]`; the result has the same shape. Elements of -∞ add nothing, and their gradient is 0. Fails on a
/// scalar and on dtypes other than floats.
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// let x = candle_core::Tensor::new(&[[f64::NEG_INFINITY, 1e4, 1e4, 0.0]], &candle_core::Device::Cpu)?;
/// let y = candle_dist_kernels::logcumsumexp(&x)?;
/// assert_eq!(y.to_vec2::<f64>()?, [[f64::NEG_INFINITY, 1e4, 1e4 + 2f64.ln(), 1e4 + 2f64.ln()]]);
/// # Ok(())
/// # }
/// ```
pub fn logcumsumexp(x: &Tensor) -> Result<Tensor> {
    let dtype = compute_dtype("logcumsumexp", x)?;
    x.dim(D::Minus1)?;
    let wide = to_dtype(x, dtype)?.contiguous()?;
    let made = match x.device().is_cpu() {
        true => edges::apply1(&wide, LogCumSumExp)?,
        false => composed(&wide)?,
    };
    to_dtype(&made, x.dtype())
}

/// The same by candle's operations, in a number of steps that is the logarithm of the length.
fn composed(x: &Tensor) -> Result<Tensor> {
    let (k, mut y, mut by) = (x.dim(D::Minus1)?, x.clone(), 1);
    while by < k && x.elem_count() > 0 {
        let (head, tail) = (y.narrow(D::Minus1, 0, by)?, y.narrow(D::Minus1, by, k - by)?);
        let tail = log_add_exp(&tail, &y.narrow(D::Minus1, 0, k - by)?)?;
        y = Tensor::cat(&[head, tail], D::Minus1)?;
        by *= 2;
    }
    Ok(y)
}

/// `ln(eᵃ + eᵇ)`. Where both are -∞, what is not taken stays finite, and its gradients are zeros.
fn log_add_exp(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let top = a.maximum(b)?.detach();
    let none = top.eq(f64::NEG_INFINITY)?;
    let finite = none.where_cond(&top.zeros_like()?, &top)?;
    let sum = ((a - &finite)?.exp()? + (b - &finite)?.exp()?)?;
    none.where_cond(&top, &(none.where_cond(&sum.ones_like()?, &sum)?.log()? + finite)?)
}

/// Replaces a row by the logarithms of the running sums of its exponentials.
#[inline(always)]
fn accumulate<T: Real>(row: &mut [T]) {
    // The sum so far is `sum · e^top`.
    let (mut top, mut sum) = (T::from_f64(f64::NEG_INFINITY), T::zero());
    for v in row {
        if *v > top {
            sum = sum * (top - *v).exp_neg(T::zero()) + T::one();
            top = *v;
        } else if *v == top {
            sum += T::one();
        } else {
            sum += (*v - top).exp_neg(T::zero());
        }
        *v = top + sum.ln();
    }
}

/// Replaces the gradient of `y`, which [`accumulate`] made of `x`, by that of `x`.
#[inline(always)]
fn accumulate_backward<T: Real>(grad: &mut [T], x: &[T], y: &[T]) {
    let none = T::from_f64(f64::NEG_INFINITY);
    let share = |part: T, whole: T| if whole == none { T::zero() } else { (part - whole).exp_neg(T::zero()) };
    // The gradient of `y[i]` by way of all sums from `i` on. Each share is at most 1, so nothing overflows.
    let (mut total, mut after) = (T::zero(), none);
    for ((grad, &x), &y) in grad.iter_mut().zip(x).zip(y).rev() {
        total = *grad + total * share(y, after);
        *grad = total * share(x, y);
        after = y;
    }
}

struct LogCumSumExp;

impl LogCumSumExp {
    fn forward<T: Real>(&self, s: &CpuStorage, l: &Layout) -> Result<(CpuStorage, Shape)> {
        let (x, k) = (elements::<T>(s, l)?, l.dim(D::Minus1)?);
        let (out, _) = new_by_blocks(
            x.len(),
            k,
            k,
            #[inline(always)]
            |first, out| {
                out.copy_from_slice(&x[first * k..][..out.len()]);
                out.chunks_exact_mut(k).for_each(accumulate);
            },
        );
        Ok((T::to_cpu_storage_owned(out), l.shape().clone()))
    }

    fn backward<T: Real>(&self, x: &Tensor, y: &Tensor, grad: &Tensor) -> Result<Tensor> {
        let k = y.dim(D::Minus1)?;
        let [x, y, grad] = [x, y, grad].map(TensorReader::new);
        let (xs, ys, gs) = (x.elements::<T>()?, y.elements::<T>()?, grad.elements::<T>()?);
        let (out, _) = new_by_blocks(
            ys.len(),
            k,
            k,
            #[inline(always)]
            |first, out| {
                out.copy_from_slice(&gs[first * k..][..out.len()]);
                let inputs = xs[first * k..].chunks_exact(k).zip(ys[first * k..].chunks_exact(k));
                for (grad, (x, y)) in out.chunks_exact_mut(k).zip(inputs) {
                    accumulate_backward(grad, x, y);
                }
            },
        );
        y.like(out)
    }
}

impl CustomOp1 for LogCumSumExp {
    fn name(&self) -> &'static str {
        "logcumsumexp"
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> Result<(CpuStorage, Shape)> {
        match s {
            CpuStorage::F64(_) => self.forward::<f64>(s, l),
            _ => self.forward::<f32>(s, l),
        }
    }

    fn bwd(&self, x: &Tensor, y: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let grad = grad.contiguous()?;
        match y.dtype() {
            DType::F64 => self.backward::<f64>(x, y, &grad),
            _ => self.backward::<f32>(x, y, &grad),
        }
        .map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device::Cpu, Var};

    #[test]
    fn both_forms_agree_also_where_there_is_nothing_to_sum() -> Result<()> {
        let none = f64::NEG_INFINITY;
        let rows: [&[f64]; 5] = [
            &[0.3],
            &[none, none, 1.0, none, -2.0, 3.0],
            &[1e3, -1e3, 999.0],
            &[none, none],
            &[-800.0, 0.0, 1.0],
        ];
        for row in rows {
            let weights = Tensor::arange(1.0, row.len() as f64 + 1.0, &Cpu)?.neg()?.cos()?;
            let results = [logcumsumexp, composed].map(|form| -> Result<(Vec<f64>, Vec<f64>)> {
                let x = Var::new(row, &Cpu)?;
                let y = form(&x)?;
                // Whole results of -∞ have no loss, but their gradients must not become NaN.
                let seen = y.gt(none)?;
                let loss = (seen.where_cond(&y, &y.zeros_like()?)? * &weights)?.sum_all()?;
                let grad =
                    loss.backward()?.get(&x).map_or_else(|| x.zeros_like(), |grad| Ok(grad.clone()))?;
                Ok((y.to_vec1()?, grad.to_vec1()?))
            });
            let [fused, composed] = results;
            let (fused, composed) = (fused?, composed?);
            let equal = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| a == b || (a - b).abs() < 1e-12);
            assert!(
                equal(&fused.0, &composed.0) && equal(&fused.1, &composed.1),
                "{row:?}: {fused:?} {composed:?}"
            );
            assert!(fused.1.iter().all(|grad| grad.is_finite()), "{row:?}: {fused:?}");
        }
        Ok(())
    }
}
