use candle_core::{CpuStorage, CustomOp1, DType, Error, Layout, Result, Shape, Tensor, bail};

use super::{
    Reading, compute_dtype, elements,
    real::Real,
    rows::{by_blocks, max, sum},
};

/// The negative log likelihood of each row's target under the softmax of its logits.
///
/// `logits` is `[n, c]`, `targets` is `[n]` of u32 or i64; the result is `[n]`, in nats. Take its mean for the usual
/// loss. Fails where shapes, dtypes or devices do not agree, and on a target that is not in `0..c`; off the CPU that
/// check waits for the device.
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// use candle_core::{Device::Cpu, Tensor};
/// let logits = Tensor::new(&[[0f64, 0.], [1e4, 0.]], &Cpu)?;
/// let loss = candle_shard::kernels::cross_entropy(&logits, &Tensor::new(&[1u32, 1], &Cpu)?)?;
/// assert_eq!(loss.to_vec1::<f64>()?, [2f64.ln(), 1e4]);
/// # Ok(())
/// # }
/// ```
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let dtype = compute_dtype("cross_entropy", logits)?;
    let [rows, classes] = *logits.dims() else {
        bail!("cross_entropy: expected logits of shape [n, c], got {:?}", logits.shape());
    };
    if targets.dims() != [rows] {
        bail!("cross_entropy: logits {:?} need targets of shape [{rows}], got {:?}", logits.shape(), targets.shape());
    }
    if !matches!(targets.dtype(), DType::U32 | DType::I64) {
        return Err(Error::UnsupportedDTypeForOp(targets.dtype(), "cross_entropy targets").bt());
    }
    if !logits.device().same_device(targets.device()) {
        let (lhs, rhs) = (logits.device().location(), targets.device().location());
        return Err(Error::DeviceMismatchBinaryOp { lhs, rhs, op: "cross_entropy" }.bt());
    }
    let checked = checked_targets(targets, classes)?;
    if !logits.device().is_cpu() {
        return candle_nn::ops::log_softmax(logits, 1)?.gather(&targets.unsqueeze(1)?, 1)?.squeeze(1)?.neg();
    }
    logits.to_dtype(dtype)?.contiguous()?.apply_op1(CrossEntropy { targets: checked })?.to_dtype(logits.dtype())
}

fn checked_targets(targets: &Tensor, classes: usize) -> Result<Vec<usize>> {
    let check = |(row, target): (usize, i64)| match usize::try_from(target) {
        Ok(class) if class < classes => Ok(class),
        _ => bail!("cross_entropy: row {row} has target {target}, outside the {classes} classes 0..{classes}"),
    };
    targets.to_dtype(DType::I64)?.to_vec1()?.into_iter().enumerate().map(check).collect()
}

struct CrossEntropy {
    /// The class of each row, below the number of classes.
    targets: Vec<usize>,
}

impl CrossEntropy {
    fn forward<T: Real>(&self, s: &CpuStorage, l: &Layout) -> Result<(CpuStorage, Shape)> {
        let (x, (_, classes)) = (elements::<T>(s, l)?, l.shape().dims2()?);
        let mut out = vec![T::zero(); self.targets.len()];
        by_blocks(
            &mut out,
            1,
            classes,
            #[inline(always)]
            |first, out| {
                let inputs = x[first * classes..].chunks_exact(classes).zip(&self.targets[first..]);
                for (out, (x, &target)) in out.iter_mut().zip(inputs) {
                    let top = max(x);
                    *out = sum(x, |v| (v - top).exp_neg(T::zero())).ln() - (x[target] - top);
                }
            },
        );
        let rows = out.len();
        Ok((T::to_cpu_storage_owned(out), Shape::from(rows)))
    }

    fn backward<T: Real>(&self, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
        let (_, classes) = x.dims2()?;
        let (x, grad) = (Reading::new(x), Reading::new(grad));
        let (xs, gs) = (x.elements::<T>()?, grad.elements::<T>()?);
        let mut out = vec![T::zero(); xs.len()];
        by_blocks(
            &mut out,
            classes,
            classes,
            #[inline(always)]
            |first, out| {
                let rows = out.chunks_exact_mut(classes).zip(xs[first * classes..].chunks_exact(classes));
                for ((out, x), (&grad, &target)) in rows.zip(gs[first..].iter().zip(&self.targets[first..])) {
                    let top = max(x);
                    for (out, &x) in out.iter_mut().zip(x) {
                        *out = (x - top).exp_neg(T::zero());
                    }
                    let scale = grad / sum(out, |v| v);
                    for out in out.iter_mut() {
                        *out *= scale;
                    }
                    out[target] -= grad;
                }
            },
        );
        x.like(out)
    }
}

impl CustomOp1 for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross_entropy"
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> Result<(CpuStorage, Shape)> {
        match s {
            CpuStorage::F64(_) => self.forward::<f64>(s, l),
            _ => self.forward::<f32>(s, l),
        }
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let grad = grad.contiguous()?;
        match x.dtype() {
            DType::F64 => self.backward::<f64>(x, &grad),
            _ => self.backward::<f32>(x, &grad),
        }
        .map(Some)
    }
}
