//! Fused ops over the last dim, which is whole: softmax and the norms. Leading dims may be sharded.
use super::pointwise::broadcast_rows;
use crate::layout::{Replicate, Shard};
use crate::rules::{self, ShardingRule, ShardingRules, Signature};
use crate::{DTensor, Error, Result, kernels};
use smallvec::SmallVec;

/// Rows that shard a leading dim of the first input; further inputs are replicated.
pub(super) fn rows(leading: usize, others: usize) -> ShardingRules {
    (0..leading)
        .map(|d| ShardingRule {
            out: Shard(d),
            ins: std::iter::once(Shard(d)).chain((0..others).map(|_| Replicate)).collect(),
        })
        .collect()
}

impl DTensor {
    /// The softmax over a last dim that is whole.
    #[track_caller]
    pub(super) fn softmax_of_rows(&self) -> Result<Self> {
        let signature = || Ok(Signature::new(rows(self.rank() - 1, 0), self.dims(), self.dtype()));
        rules::run("softmax_last_dim", &[], &[self], signature, |x, _| Ok(kernels::softmax(x[0].to_local())?))
    }

    /// The softmax over the keys of scaled attention scores `[.., queries, keys]`, with later keys masked.
    ///
    /// Query `i` sees key `j` if `j <= i + keys - queries`.
    #[track_caller]
    pub fn causal_softmax(&self, scale: f64) -> Result<Self> {
        let signature = || {
            self.check_rows("causal_softmax", 2)?;
            // The index of a query decides which keys it sees, so the query dim stays whole too.
            Ok(Signature::new(rows(self.rank() - 2, 0), self.dims(), self.dtype()))
        };
        rules::run("causal_softmax", &[], &[self], signature, |x, _| {
            Ok(kernels::causal_softmax(x[0].to_local(), scale)?)
        })
    }

    /// The softmax over the last dim of `x · scale + mask`. The mask broadcasts in all dims but the last.
    ///
    /// A row that is masked entirely becomes zeros.
    #[track_caller]
    pub fn masked_softmax(&self, mask: &Self, scale: f64) -> Result<Self> {
        let signature = || {
            self.check_rows("masked_softmax", 1)?;
            let (x, m) = (self.dims(), mask.dims());
            let lead = x.len().checked_sub(m.len());
            let fits = lead.is_some_and(|lead| m.iter().zip(&x[lead..]).all(|(m, x)| m == x || *m == 1));
            if !fits || m.last() != x.last() || mask.dtype() != self.dtype() {
                let reason = format!(
                    "a mask {} for scores {}: expected its dtype, and its shape",
                    mask.spec(),
                    self.spec()
                );
                return Error::op("masked_softmax", format!("{reason} or 1 in all dims but the last"));
            }
            let mut rows = broadcast_rows(x, &[x, m]);
            rows.truncate(self.rank() - 1);
            Ok(Signature::new(rows, x, self.dtype()))
        };
        rules::run("masked_softmax", &[], &[self, mask], signature, |x, _| {
            Ok(kernels::masked_softmax(x[0].to_local(), x[1].to_local(), scale)?)
        })
    }

    /// Layer norm over the last dim: `(x - mean) / sqrt(var + eps) · weight + bias` (Ba et al. 2016).
    #[track_caller]
    pub fn layer_norm(&self, weight: &Self, bias: &Self, eps: f64) -> Result<Self> {
        let signature = || self.norm_signature("layer_norm", &[weight, bias]);
        rules::run("layer_norm", &[], &[self, weight, bias], signature, |x, _| {
            Ok(kernels::layer_norm(x[0].to_local(), x[1].to_local(), x[2].to_local(), eps)?)
        })
    }

    /// RMS norm over the last dim: `x / sqrt(mean(x²) + eps) · weight` (Zhang & Sennrich 2019).
    #[track_caller]
    pub fn rms_norm(&self, weight: &Self, eps: f64) -> Result<Self> {
        let signature = || self.norm_signature("rms_norm", &[weight]);
        rules::run("rms_norm", &[], &[self, weight], signature, |x, _| {
            Ok(kernels::rms_norm(x[0].to_local(), x[1].to_local(), eps)?)
        })
    }

    /// The sum of two tensors of one shape, and the [RMS norm](Self::rms_norm) of the sum over the last dim: a residual connection
    /// before a norm, in one launch on a GPU.
    #[track_caller]
    pub fn add_rms_norm(&self, more: &Self, weight: &Self, eps: f64) -> Result<[Self; 2]> {
        let signature = || {
            let signature = self.norm_signature("add_rms_norm", &[weight])?;
            if more.dims() != self.dims() || more.dtype() != self.dtype() {
                let reason = format!("{} and {}: expected one shape and one dtype", self.spec(), more.spec());
                return Error::op("add_rms_norm", reason);
            }
            let rows =
                signature.rows.iter().map(|row| ShardingRule::new(row.out, &[row.out, row.out, Replicate]));
            Ok(Signature::new(rows.collect(), self.dims(), self.dtype()).and(self.dims(), self.dtype()))
        };
        let made = rules::run_all("add_rms_norm", &[], &[self, more, weight], &signature, &|x, _| {
            let [x, more, weight] = [&x[0], &x[1], &x[2]].map(DTensor::to_local);
            Ok(SmallVec::from_vec(kernels::add_rms_norm(x, more, weight, eps)?.into()))
        })?;
        let [sum, normed] = <[Self; 2]>::try_from(made.into_vec())
            .or_else(|_| Error::op("add_rms_norm", "another number of results than two".to_string()))?;
        Ok([sum, normed])
    }

    #[track_caller]
    pub(super) fn check_rows(&self, op: &'static str, rank: usize) -> Result<()> {
        if self.rank() < rank {
            return Error::op(op, format!("{} has too few dims; expected at least {rank}", self.spec()));
        }
        self.check_float(op)
    }

    #[track_caller]
    fn norm_signature(&self, op: &'static str, parameters: &[&Self]) -> Result<Signature> {
        self.check_rows(op, 1)?;
        let width = &self.dims()[self.rank() - 1..];
        if let Some(p) = parameters.iter().find(|p| p.dims() != width || p.dtype() != self.dtype()) {
            let reason = format!(
                "a parameter {} for an input {}: expected {width:?} of its dtype",
                p.spec(),
                self.spec()
            );
            return Error::op(op, reason);
        }
        Ok(Signature::new(rows(self.rank() - 1, parameters.len()), self.dims(), self.dtype()))
    }
}
