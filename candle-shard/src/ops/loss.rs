//! Losses between two tensors of one shape. Means are over all elements on all ranks.
use super::neutral;
use crate::kernels;
use crate::layout::{Placement, Shard};
use crate::rules::{self, ShardingRule, ShardingRules, Signature};
use crate::strict::inherent;
use crate::{DTensor, Error, Result};
use candle_core::{DType, Tensor};

/// How the losses of the elements are reduced.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Reduction {
    /// The mean over all elements that count, on all ranks.
    #[default]
    Mean,
    /// The sum.
    Sum,
    /// Not at all: one loss for each element, or for each target.
    None,
}

impl DTensor {
    /// The squared error `(x - target)²`.
    #[track_caller]
    pub fn mse_loss(&self, target: &Self, reduction: Reduction) -> Result<Self> {
        self.elementwise_loss("mse_loss", target, reduction, &|x, target| (x - target)?.sqr())
    }

    /// The absolute error `|x - target|`. Its gradient is 0 where the two are equal.
    #[track_caller]
    pub fn l1_loss(&self, target: &Self, reduction: Reduction) -> Result<Self> {
        self.elementwise_loss("l1_loss", target, reduction, &|x, target| {
            let error = (x - target)?;
            let sign = error.sign()?.detach();
            error * sign
        })
    }

    /// Half the squared error up to `delta` and linear beyond (Huber 1964).
    ///
    /// # Errors
    /// If `delta` is not positive.
    #[track_caller]
    pub fn huber_loss(&self, target: &Self, delta: f64, reduction: Reduction) -> Result<Self> {
        if delta.is_nan() || delta <= 0.0 {
            return Error::op("huber_loss", format!("delta {delta}: expected a positive number"));
        }
        self.elementwise_loss("huber_loss", target, reduction, &|x, target| {
            // With c the error cut to ±delta the loss is c·error - c²/2, and c is its slope.
            let error = (x - target)?;
            let slope = kernels::clamp(&error, -delta, delta)?.detach();
            (&error * &slope)? - (slope.sqr()? * 0.5)?
        })
    }

    /// The binary cross entropy of these logits against probabilities `target`.
    #[track_caller]
    pub fn bce_with_logits_loss(&self, target: &Self, reduction: Reduction) -> Result<Self> {
        self.elementwise_loss("bce_with_logits_loss", target, reduction, &|x, target| {
            // ln(1 + eˣ) = top + ln(e^-top + e^(x - top)) for any top, whose slope is therefore 0.
            let top = x.relu()?.detach();
            let log_norm = ((x - &top)?.exp()? + top.neg()?.exp()?)?.log()?;
            (log_norm + top)? - (x * target)?
        })
    }

    /// Reduces an elementwise `loss`.
    #[track_caller]
    fn elementwise_loss(
        &self,
        op: &'static str,
        target: &Self,
        reduction: Reduction,
        loss: &dyn Fn(&Tensor, &Tensor) -> candle_core::Result<Tensor>,
    ) -> Result<Self> {
        let signature = || {
            self.check_float(op)?;
            if self.dims() != target.dims() || self.dtype() != target.dtype() {
                let reason =
                    format!("{} against {}: expected one shape and dtype", self.spec(), target.spec());
                return Error::op(op, reason);
            }
            let row = |d| {
                let out = if reduction == Reduction::None { Shard(d) } else { Placement::PARTIAL_SUM };
                ShardingRule::new(out, &[Shard(d), Shard(d)])
            };
            let dims = if reduction == Reduction::None { self.dims() } else { &[] };
            Ok(Signature::new(
                (0..self.rank()).map(row).collect::<ShardingRules>(),
                dims,
                loss_dtype(self.dtype()),
            ))
        };
        let made = rules::run(op, &[reduction as usize], &[self, target], signature, |x, out| {
            let local = x[0].to_local();
            if local.elem_count() == 0 {
                let dims = if reduction == Reduction::None { local.dims() } else { &[] };
                return neutral(x, dims, out.dtype());
            }
            let [x, target] = [&x[0], &x[1]].map(|x| x.to_local().to_dtype(out.dtype()));
            let losses = loss(&x?, &target?)?;
            Ok(if reduction == Reduction::None { losses } else { losses.sum_all()? })
        })?;
        let loss = match reduction {
            Reduction::Sum | Reduction::None => made,
            Reduction::Mean => made.affine(1.0 / self.elem_count() as f64, 0.0)?,
        };
        inherent(|| loss.to_dtype(self.dtype()))
    }
}

/// The dtype in which losses are summed.
pub(super) fn loss_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}
