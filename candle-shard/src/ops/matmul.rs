//! Matrix products. Sharded batch dims, rows or columns stay sharded; a sharded inner dim gives partial sums.
use super::pointwise::{broadcast, broadcast_rows};
use crate::layout::{Placement, Replicate, Shard};
use crate::rules::{self, ShardingRule, ShardingRules, Signature};
use crate::{DTensor, Error, Result};
use candle_core::Tensor;
use smallvec::SmallVec;

const SUM: Placement = Placement::PARTIAL_SUM;

impl DTensor {
    /// The matrix product `[.., m, k] × [.., k, n] -> [.., m, n]`. Batch dims broadcast.
    #[track_caller]
    pub fn matmul(&self, rhs: &Self) -> Result<Self> {
        rules::run(
            "matmul",
            &[],
            &[self, rhs],
            || self.matmul_signature(rhs),
            |x, _| local_matmul(x[0].to_local(), x[1].to_local()),
        )
    }

    /// The dot product of two vectors `[n]`, a scalar.
    #[track_caller]
    pub fn dot(&self, rhs: &Self) -> Result<Self> {
        if self.rank() != 1 || self.dims() != rhs.dims() {
            return Error::op("dot", format!("{} · {}: expected two [n]", self.spec(), rhs.spec()));
        }
        self.mul(rhs)?.sum_all()
    }

    /// The product of a matrix and a vector: `[m, n]` with `[n]` gives `[m]`.
    #[track_caller]
    pub fn mv(&self, rhs: &Self) -> Result<Self> {
        if self.rank() != 2 || rhs.dims() != &self.dims()[1..] {
            return Error::op("mv", format!("{} × {}: expected [m, n] × [n]", self.spec(), rhs.spec()));
        }
        self.matmul(&rhs.unsqueeze(1)?)?.squeeze(1)
    }

    #[track_caller]
    fn matmul_signature(&self, rhs: &Self) -> Result<Signature> {
        let (a, b) = (self.dims(), rhs.dims());
        if a.len() < 2 || b.len() < 2 || a[a.len() - 1] != b[b.len() - 2] || self.dtype() != rhs.dtype() {
            let reason =
                format!("{} × {}: expected [.., m, k] × [.., k, n] of one dtype", self.spec(), rhs.spec());
            return Error::op("matmul", reason);
        }
        self.check_float("matmul")?;
        let (rows_a, cols_b) = (a.len() - 2, b.len() - 1);
        let (batch_a, batch_b) = (&a[..rows_a], &b[..b.len() - 2]);
        let mut shape = broadcast("matmul", batch_a, batch_b)?;
        let batch = shape.len();
        let mut rows: ShardingRules = broadcast_rows(&shape, &[batch_a, batch_b]);
        rows.extend([
            ShardingRule::new(Shard(batch), &[Shard(rows_a), Replicate]),
            ShardingRule::new(Shard(batch + 1), &[Replicate, Shard(cols_b)]),
            ShardingRule::new(SUM, &[Shard(rows_a + 1), Shard(cols_b - 1)]),
            ShardingRule::new(SUM, &[SUM, Replicate]),
            ShardingRule::new(SUM, &[Replicate, SUM]),
        ]);
        shape.extend([a[rows_a], b[cols_b]]);
        Ok(Signature::new(rows, &shape, self.dtype()))
    }

    /// The affine map `x · weightᵀ + bias`: `[.., k]` with `[n, k]` and `[n]` gives `[.., n]`.
    #[track_caller]
    pub fn linear(&self, weight: &Self, bias: Option<&Self>) -> Result<Self> {
        let inputs: SmallVec<[&Self; 3]> = [self, weight].into_iter().chain(bias).collect();
        rules::run(
            "linear",
            &[],
            &inputs,
            || self.linear_signature(weight, bias),
            |x, _| {
                let bias = x.get(2).map(DTensor::to_local);
                Ok(crate::kernels::linear(x[0].to_local(), x[1].to_local(), bias)?)
            },
        )
    }

    #[track_caller]
    fn linear_signature(&self, weight: &Self, bias: Option<&Self>) -> Result<Signature> {
        let (x, w) = (self.dims(), weight.dims());
        let fits = |b: &DTensor| b.dims() == &w[..1] && b.dtype() == self.dtype();
        let ok =
            w.len() == 2 && x.last() == w.get(1) && weight.dtype() == self.dtype() && bias.is_none_or(fits);
        if !ok {
            let bias = bias.map_or("no bias".to_string(), |b| format!("bias {}", b.spec()));
            let reason = format!(
                "input {} with weight {} and {bias}: expected [.., k] with [n, k] and [n] of one dtype",
                self.spec(),
                weight.spec()
            );
            return Error::op("linear", reason);
        }
        self.check_float("linear")?;
        let last = x.len() - 1;
        let row = |out, x, w, b| match bias {
            Some(_) => ShardingRule::new(out, &[x, w, b]),
            None => ShardingRule::new(out, &[x, w]),
        };
        let mut rows: ShardingRules =
            (0..last).map(|d| row(Shard(d), Shard(d), Replicate, Replicate)).collect();
        rows.push(row(Shard(last), Replicate, Shard(0), Shard(0)));
        rows.push(row(SUM, Shard(last), Shard(1), SUM));
        rows.push(row(SUM, SUM, Replicate, SUM));
        let mut shape = x.to_vec();
        shape[last] = w[0];
        Ok(Signature::new(rows, &shape, self.dtype()))
    }
}

/// candle's matmul for any views. A matrix or its transpose is passed as it is, every other view as a dense copy.
fn local_matmul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let dense = |t: &Tensor| {
        let transposed = t.layout().transpose(t.rank() - 2, t.rank() - 1).is_ok_and(|l| l.is_contiguous());
        if t.is_contiguous() || transposed { Ok(t.clone()) } else { t.contiguous() }
    };
    Ok(dense(a)?.broadcast_matmul(&dense(b)?)?)
}
