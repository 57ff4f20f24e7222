use candle_core::{CpuStorage, CustomOp1, DType, Device, Error, Layout, Result, Shape, Tensor, bail};
use candle_dist_base::{ReduceOp, edges, empty};

use super::{
    TensorReader, compute_dtype,
    convert::to_dtype,
    elements,
    fused::{
        self,
        cross_entropy::{JoinPieces, LossWeights},
    },
    real::Real,
    rows::{by_blocks, max, new_by_blocks, sum, sum_zip},
};

/// Returns the negative log likelihood of each row's target under the softmax of its logits.
///
/// `logits` is `[n, c]`, `targets` is `[n]` of u32 or i64; the result is `[n]`, in nats. Its mean is the usual loss.
/// Fails if shapes, dtypes or devices do not match, and on a target that is not in `0..c`; on other devices than the
/// CPU that check waits for the device.
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// use candle_core::{Device::Cpu, Tensor};
/// let logits = Tensor::new(&[[0f64, 0.], [1e4, 0.]], &Cpu)?;
/// let loss = candle_dist_kernels::cross_entropy(&logits, &Tensor::new(&[1u32, 1], &Cpu)?)?;
/// assert_eq!(loss.to_vec1::<f64>()?, [2f64.ln(), 1e4]);
/// # Ok(())
/// # }
/// ```
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    compute_dtype("cross_entropy", logits)?;
    let [rows, classes] = *logits.dims() else {
        bail!("cross_entropy: expected logits of shape [n, c], got {:?}", logits.shape());
    };
    if targets.dims() != [rows] {
        bail!(
            "cross_entropy: logits {:?} need targets of shape [{rows}], got {:?}",
            logits.shape(),
            targets.shape()
        );
    }
    if !matches!(targets.dtype(), DType::U32 | DType::I64) {
        return Err(Error::UnsupportedDTypeForOp(targets.dtype(), "cross_entropy targets").bt());
    }
    if !logits.device().same_device(targets.device()) {
        let (lhs, rhs) = (logits.device().location(), targets.device().location());
        return Err(Error::DeviceMismatchBinaryOp { lhs, rhs, op: "cross_entropy" }.bt());
    }
    let goal = |(row, target): (usize, i64)| match usize::try_from(target) {
        Ok(class) if class < classes => Ok(Goal { class: Some(class), peak: 1.0, spread: 0.0 }),
        _ => {
            bail!("cross_entropy: row {row} has target {target}, outside the {classes} classes 0..{classes}")
        }
    };
    let rows =
        targets.to_dtype(DType::I64)?.to_vec1()?.into_iter().enumerate().map(goal).collect::<Result<_>>()?;
    let goals = Goals { rows, spread: Vec::new(), spread_total: 0.0 };
    weighted_cross_entropy(logits, goals, &|t, _| Ok(t.clone()))
        .and_then(|loss| to_dtype(&loss, logits.dtype()))
}

/// The weights in the loss of one row.
pub struct Goal {
    /// The target's index among the local classes, if it is local.
    pub class: Option<usize>,
    /// The weight of the target's negative log likelihood, even if its class is not local.
    pub peak: f64,
    /// The factor of the weights of all classes; 0 disables them.
    pub spread: f64,
}

/// The weights in the losses of all rows.
pub struct Goals {
    /// The goal of each row.
    pub rows: Vec<Goal>,
    /// A weight per local class, or empty if all are 0.
    pub spread: Vec<f64>,
    /// The sum of these weights over all classes, local or not.
    pub spread_total: f64,
}

/// Returns for each row the sum of the negative log likelihoods of the local classes, weighted by `goals`.
///
/// `logits` is `[n, c]` with a piece of the classes; the result is `[n]`, in f32 or f64. Its sum over all pieces is the
/// loss. `join` reduces `[n]` over the pieces. The gradient is that of the sum over the pieces.
pub fn weighted_cross_entropy(logits: &Tensor, goals: Goals, join: &JoinPieces<'_>) -> Result<Tensor> {
    let dtype = compute_dtype("cross_entropy", logits)?;
    if fused::would_compute(&[logits]) {
        if logits.elem_count() == 0 {
            return fused::cross_entropy::of_nothing(logits, join);
        }
        let of_rows = |number: &dyn Fn(&Goal) -> f64| goals.rows.iter().map(number).collect();
        let weights = LossWeights {
            targets: goals.rows.iter().map(|goal| goal.class).collect(),
            peaks: of_rows(&|goal| goal.peak),
            shares: of_rows(&|goal| goal.spread),
            spread: &goals.spread,
            total: goals.spread_total,
        };
        return fused::cross_entropy::weighted(logits, &weights, join);
    }
    let x = empty::compute(logits, |logits| to_dtype(logits, dtype))?.contiguous()?;
    if !x.device().is_cpu() {
        return composed(&x, &goals, join);
    }
    let (here, partial) = match x.dtype() {
        DType::F64 => normalizer::<f64>(&x)?,
        _ => normalizer::<f32>(&x)?,
    };
    let top = join(&here, ReduceOp::Max)?;
    let norm = join(&(partial * (here - &top)?.exp()?)?, ReduceOp::Sum)?;
    edges::apply1(&x, CrossEntropyOp { goals, top, norm })
}

/// Returns the largest logit of each row, and the sum of the exponentials of all differences to it.
///
/// The sum is 0 for a row without a finite logit, so that it does not affect pieces that have one.
fn normalizer<T: Real>(x: &Tensor) -> Result<(Tensor, Tensor)> {
    let (rows, classes) = x.dims2()?;
    let x = TensorReader::new(x);
    let xs = x.elements::<T>()?;
    let none = T::from_f64(f64::NEG_INFINITY);
    let mut out = vec![(none, T::zero()); rows];
    by_blocks(
        &mut out,
        1,
        classes,
        #[inline(always)]
        |first, out| {
            for (i, out) in out.iter_mut().enumerate() {
                let x = &xs[(first + i) * classes..][..classes];
                let top = if x.is_empty() { none } else { max(x) };
                if top != none {
                    *out = (top, sum(x, |v| (v - top).exp_neg(T::zero())));
                }
            }
        },
    );
    let (top, norm): (Vec<T>, Vec<T>) = out.into_iter().unzip();
    Ok((Tensor::from_vec(top, rows, &Device::Cpu)?, Tensor::from_vec(norm, rows, &Device::Cpu)?))
}

/// Like [`weighted_cross_entropy`] of f32 or f64 with candle's own operations, as off the CPU. What comes from the host has the
/// size of a row or of a column.
pub fn composed(x: &Tensor, goals: &Goals, join: &JoinPieces<'_>) -> Result<Tensor> {
    let (rows, classes) = x.dims2()?;
    if rows * classes == 0 {
        // Other pieces have classes and wait for this one, in the backward pass too.
        let none = empty::compute(x, |x| x.sum(1))?;
        join(&empty::compute(&none, |none| none.zeros_like()? + f64::NEG_INFINITY)?, ReduceOp::Max)?;
        let norm = join(&none, ReduceOp::Sum)?;
        return match rows {
            0 => Tensor::cat(&[norm, none], 0), // candle's other ops drop the graph of tensors without elements
            _ => none.zeros_like()?.to_dtype(DType::U8)?.where_cond(&norm, &none),
        };
    }
    let top = join(&x.max(1)?.detach(), ReduceOp::Max)?.unsqueeze(1)?;
    let shifted = x.broadcast_sub(&top)?;
    let norm = join(&shifted.exp()?.sum(1)?, ReduceOp::Sum)?.unsqueeze(1)?;
    let device = x.device();
    let of_rows = |value: &dyn Fn(&Goal) -> f64| {
        Tensor::from_iter(goals.rows.iter().map(value), device)?.to_dtype(x.dtype())?.unsqueeze(1)
    };
    let none = norm.zeros_like()?;
    let log_norm = norm.log()?;
    // Terms without weight are masked, not multiplied by zero: they may be infinite.
    let weighed = |terms: &Tensor, weights: &Tensor| weights.ne(0.0)?.where_cond(&(terms * weights)?, &none);
    let classes_here =
        Tensor::from_iter(goals.rows.iter().map(|goal| goal.class.unwrap_or(0) as u32), device)?;
    let peaks = of_rows(&|goal| if goal.class.is_some() { goal.peak } else { 0.0 })?;
    let picked = (&log_norm - shifted.gather(&classes_here.unsqueeze(1)?, 1)?)?;
    let mut loss = weighed(&picked, &peaks)?;
    if !goals.spread.is_empty() {
        let weights = Tensor::from_slice(&goals.spread, (1, classes), device)?.to_dtype(x.dtype())?;
        let counts = weights.ne(0.0)?.broadcast_as((rows, classes))?;
        let shifted = counts.where_cond(&shifted, &shifted.zeros_like()?)?;
        let total = goals.spread.iter().sum::<f64>();
        let spread = ((log_norm * total)? - shifted.broadcast_mul(&weights)?.sum_keepdim(1)?)?;
        loss = (loss + weighed(&spread, &of_rows(&|goal| goal.spread)?)?)?;
    }
    loss.squeeze(1)
}

struct CrossEntropyOp {
    goals: Goals,
    /// The largest logit of each row, and the sum of the exponentials of the differences to it, over all classes.
    top: Tensor,
    norm: Tensor,
}

impl CrossEntropyOp {
    fn forward<T: Real>(&self, s: &CpuStorage, l: &Layout) -> Result<(CpuStorage, Shape)> {
        let (x, (rows, classes)) = (elements::<T>(s, l)?, l.shape().dims2()?);
        let (top, norm) = (TensorReader::new(&self.top), TensorReader::new(&self.norm));
        let (tops, norms) = (top.elements::<T>()?, norm.elements::<T>()?);
        let spread: Vec<T> = self.goals.spread.iter().map(|&w| T::from_f64(w)).collect();
        let (out, _) = new_by_blocks(
            rows,
            1,
            spread.len(),
            #[inline(always)]
            |first, out| {
                for (i, out) in out.iter_mut().enumerate() {
                    let (row, goal) = (first + i, &self.goals.rows[first + i]);
                    let x = &x[row * classes..][..classes];
                    let (top, log_norm) = (tops[row], norms[row].ln());
                    if let Some(class) = goal.class {
                        *out = T::from_f64(goal.peak) * (log_norm - (x[class] - top));
                    }
                    if goal.spread != 0.0 {
                        let terms = sum_zip(x, &spread, |x, weight| weight * (log_norm - (x - top)));
                        *out += T::from_f64(goal.spread) * terms;
                    }
                }
            },
        );
        Ok((T::to_cpu_storage_owned(out), Shape::from(rows)))
    }

    fn backward<T: Real>(&self, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
        let (_, classes) = x.dims2()?;
        let [x, grad, top, norm] = [x, grad, &self.top, &self.norm].map(TensorReader::new);
        let (xs, gs) = (x.elements::<T>()?, grad.elements::<T>()?);
        let (tops, norms) = (top.elements::<T>()?, norm.elements::<T>()?);
        let Goals { rows, spread, spread_total } = &self.goals;
        let spread: Vec<T> = spread.iter().map(|&w| T::from_f64(w)).collect();
        let (out, _) = new_by_blocks(
            xs.len(),
            classes,
            classes,
            #[inline(always)]
            |first, out| {
                for (i, out) in out.chunks_exact_mut(classes).enumerate() {
                    let (row, goal) = (first + i, &rows[first + i]);
                    let total = goal.peak + goal.spread * spread_total;
                    if total == 0.0 {
                        continue; // the row is ignored, whatever its logits are
                    }
                    let (grad, top) = (gs[row], tops[row]);
                    let scale = grad * T::from_f64(total) / norms[row];
                    for (out, &x) in out.iter_mut().zip(&xs[row * classes..]) {
                        *out = (x - top).exp_neg(T::zero()) * scale;
                    }
                    let share = grad * T::from_f64(goal.spread);
                    for (out, &weight) in out.iter_mut().zip(&spread) {
                        *out -= share * weight;
                    }
                    if let Some(class) = goal.class {
                        out[class] -= grad * T::from_f64(goal.peak);
                    }
                }
            },
        );
        x.like(out)
    }
}

impl CustomOp1 for CrossEntropyOp {
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

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device::Cpu, Var};

    #[test]
    fn the_composed_loss_equals_the_fused_one() -> Result<()> {
        let x = Var::from_tensor(&Tensor::randn(0f64, 3.0, (4, 3), &Cpu)?)?;
        let goals = || {
            let row = |class, peak, spread| Goal { class, peak, spread };
            let rows = vec![
                row(Some(2), 0.7, 1.0),
                row(None, 0.0, 0.0),
                row(Some(0), 1.3, 1.0),
                row(Some(1), 1.0, 0.0),
            ];
            Goals { rows, spread: vec![0.1, 0.0, 0.3], spread_total: 0.4 }
        };
        let weights = Tensor::new(&[1.5f64, -2.0, 0.3, 1.0], &Cpu)?;
        let alone = |t: &Tensor, _: ReduceOp| Ok(t.clone());
        let pair = [weighted_cross_entropy(&x, goals(), &alone)?, composed(&x, &goals(), &alone)?];
        let largest = |a: &Tensor, b: &Tensor| (a - b)?.abs()?.max_all()?.to_scalar::<f64>();
        assert!(largest(&pair[0], &pair[1])? < 1e-14);
        let grads = [(&pair[0] * &weights)?.backward()?, (&pair[1] * &weights)?.backward()?];
        let [a, b] = grads.each_ref().map(|g| g.get(&x).unwrap());
        assert!(largest(a, b)? < 1e-14);
        Ok(())
    }

    /// Kernels join what has no graph. A join in the graph of one piece would wait for the others in the backward pass.
    #[test]
    fn a_piece_without_classes_joins_outside_of_the_graph_where_kernels_compute() -> Result<()> {
        let goals = || {
            let rows = (0..2).map(|_| Goal { class: None, peak: 1.0, spread: 0.0 }).collect();
            Goals { rows, spread: Vec::new(), spread_total: 0.0 }
        };
        for (dtype, wide) in [(DType::F64, DType::F64), (DType::BF16, DType::F32)] {
            let x = Var::from_tensor(&Tensor::zeros((2, 0), dtype, &Cpu)?)?;
            let joined = std::cell::RefCell::new(Vec::new());
            let join = |t: &Tensor, op| {
                joined.borrow_mut().push((op, t.dims().to_vec(), t.dtype(), t.track_op()));
                Ok(t.clone())
            };
            let y = fused::cross_entropy::of_nothing(&x, &join)?;
            let want = [ReduceOp::Max, ReduceOp::Sum].map(|op| (op, vec![2], wide, false));
            assert_eq!(joined.take(), want);
            let kernels = crate::parts::with_kernels_on_host;
            let by_op = kernels(std::sync::Arc::new(|_| bail!("nothing is launched")), || {
                weighted_cross_entropy(&x, goals(), &join)
            })?;
            assert_eq!(joined.take(), want);
            for y in [y, by_op] {
                assert_eq!((y.dims(), y.dtype()), (&[2][..], wide));
                let grads = y.backward()?;
                assert_eq!(grads.get(&x).unwrap().dims(), [2, 0]);
            }
        }
        Ok(())
    }

    #[test]
    fn a_piece_without_classes_joins_like_the_others() -> Result<()> {
        let elsewhere = Var::from_tensor(&Tensor::new(&[2f64, 3.0], &Cpu)?)?;
        let x = Var::from_tensor(&Tensor::zeros((2, 0), DType::F64, &Cpu)?)?;
        let rows = (0..2).map(|_| Goal { class: None, peak: 1.0, spread: 0.0 }).collect();
        let goals = Goals { rows, spread: Vec::new(), spread_total: 0.0 };
        let joined = std::cell::RefCell::new(Vec::new());
        let join = |t: &Tensor, op| {
            joined.borrow_mut().push(op);
            if op == ReduceOp::Sum { t + elsewhere.as_tensor() } else { Ok(t.clone()) }
        };
        let y = composed(&x, &goals, &join)?;
        assert_eq!(y.to_vec1::<f64>()?, [0.0, 0.0]);
        assert_eq!(joined.take(), [ReduceOp::Max, ReduceOp::Sum]);
        let grads = y.backward()?;
        assert_eq!(grads.get(&elsewhere).unwrap().to_vec1::<f64>()?, [0.0, 0.0]);
        assert_eq!(grads.get(&x).unwrap().dims(), [2, 0]);
        Ok(())
    }
}
