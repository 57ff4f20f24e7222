//! Running sums. Each rank sums its shard of a sharded dim, from the totals of the shards before it on.
use crate::layout::{Partial, Placement, Replicate, Shard};
use crate::redistribute::{Target, Targets};
use crate::rules::{self, OpSpec, ShardingRule, ShardingRules, Signature};
use crate::strict::inherent;
use crate::{DTensor, Result, kernels};
use candle_core::shape::Dim;
use candle_core::{Shape, Tensor};
use candle_dist::ReduceOp;
use smallvec::smallvec;

const SUM: Placement = Placement::PARTIAL_SUM;

impl DTensor {
    /// The cumulative sum along a dim.
    ///
    /// A sharded dim costs one reduce_scatter of one number per rank and row, and one all_gather of them in the
    /// backward pass.
    #[track_caller]
    pub fn cumsum(&self, dim: impl Dim) -> Result<Self> {
        self.check_float("cumsum")?;
        let dim = dim.to_index(&Shape::from(self.dims()), "cumsum")?;
        if self.sharded_axes(dim).next().is_none() {
            let signature = || {
                let mut rows = self.kept_rows(&[dim]);
                rows.push(ShardingRule::new(SUM, &[SUM]));
                Ok(Signature::new(rows, self.dims(), self.dtype()))
            };
            return rules::run("cumsum", &[dim], &[self], signature, |x, _| {
                Ok(running_sum(x[0].to_local(), dim)?)
            });
        }
        let linear = |p| if matches!(p, Partial(op) if op != ReduceOp::Sum) { Replicate } else { p };
        let x = rules::lay_out("cumsum", self, linear)?;
        let starts = x.sums_before(dim)?;
        // All of this is linear, so every axis stays as it is.
        let op_spec = || Ok(OpSpec::in_place(&[&x, &starts], smallvec![x.shared_spec().clone()]));
        let mut made = rules::run_with("cumsum", &[dim], &[&x, &starts], &op_spec, &|x, _| {
            Ok(smallvec![running_sum(x[0].to_local(), dim)?.broadcast_add(x[1].to_local())?])
        })?;
        Ok(made.remove(0))
    }

    /// The logarithm of the cumulative sum of the exponentials along a dim.
    ///
    /// A sharded dim costs one all_gather of one number per rank and row, and one reduce_scatter of them in the backward
    /// pass. Elements of -∞ add nothing.
    #[track_caller]
    pub fn logcumsumexp(&self, dim: impl Dim) -> Result<Self> {
        self.check_float("logcumsumexp")?;
        let dim = dim.to_index(&Shape::from(self.dims()), "logcumsumexp")?;
        if self.sharded_axes(dim).next().is_none() {
            let signature = || Ok(Signature::new(self.kept_rows(&[dim]), self.dims(), self.dtype()));
            return rules::run("logcumsumexp", &[dim], &[self], signature, |x, _| {
                Ok(running_log_sum(x[0].to_local(), dim)?)
            });
        }
        self.settled(&[dim])?.in_full_precision(|x| {
            let (pieces, at) = x.piece(dim);
            let totals = x.log_sums_of_shards(dim, pieces)?;
            // The totals are gathered, and all else stays as it is.
            let stay = |x: &Self, to: &dyn Fn(Placement) -> Placement| -> Targets {
                let target = |(axis, &now): (usize, &Placement)| {
                    let placement = to(now);
                    let sizes = x.spec().sizes(axis).filter(|_| placement == now).cloned();
                    Target { placement, sizes }
                };
                x.placements().iter().enumerate().map(target).collect()
            };
            let op_spec = || {
                let whole = |now| if now == Shard(dim) { Replicate } else { now };
                let (kept, gathered) = (stay(x, &|now| now), stay(&totals, &whole));
                let out = [(x.dims().into(), x.dtype())];
                OpSpec::laid(&[x, &totals], [kept.clone(), gathered], &kept, &out)
            };
            let mut made = inherent(|| {
                rules::run_with("logcumsumexp", &[dim], &[x, &totals], &op_spec, &|x, _| {
                    let (x, totals) = (x[0].to_local(), x[1].to_local());
                    let both = Tensor::cat(&[&totals.narrow(dim, 0, at)?, x], dim)?;
                    Ok(smallvec![running_log_sum(&both, dim)?.narrow(dim, at, x.dim(dim)?)?])
                })
            })?;
            Ok(made.remove(0))
        })
    }

    /// The logarithm of the sum of the exponentials of each shard of a sharded dim, as a tensor with one element per shard.
    #[track_caller]
    fn log_sums_of_shards(&self, dim: usize, pieces: usize) -> Result<Self> {
        let signature = || {
            let mut shape = self.dims().to_vec();
            shape[dim] = pieces;
            let mut rows = self.kept_rows(&[dim]);
            rows.push(ShardingRule::new(Shard(dim), &[Shard(dim)]));
            Ok(Signature::new(rows, &shape, self.dtype()).resized(dim))
        };
        rules::run("log_sums_of_shards", &[dim], &[self], signature, |x, out| {
            let local = x[0].to_local();
            Ok(match local.dim(dim)? {
                0 => rules::neutral(x, &out.local_shape(), out.dtype())?.affine(1.0, f64::NEG_INFINITY)?,
                size => running_log_sum(local, dim)?.narrow(dim, size - 1, 1)?,
            })
        })
    }

    /// The number of shards of a sharded dim, and which of them this rank has.
    fn piece(&self, dim: usize) -> (usize, usize) {
        let mesh = self.mesh();
        self.sharded_axes(dim).fold((1, 0), |(pieces, at), axis| {
            let n = mesh.shape()[axis];
            (pieces * n, at * n + mesh.coordinate()[axis])
        })
    }

    /// The sum of the shards before each shard of a sharded dim, as a tensor with one element per shard.
    #[track_caller]
    fn sums_before(&self, dim: usize) -> Result<Self> {
        let (axes, (pieces, at)) = (self.sharded_axes(dim).collect::<Vec<_>>(), self.piece(dim));
        let signature = || {
            let mut shape = self.dims().to_vec();
            shape[dim] = pieces;
            let mut rows: ShardingRules = self.kept_rows(&[dim]);
            rows.extend([ShardingRule::new(SUM, &[Shard(dim)]), ShardingRule::new(SUM, &[SUM])]);
            Ok(Signature::new(rows, &shape, self.dtype()))
        };
        // Each rank adds its own sum to all later shards.
        let sums = rules::run("sums_before", &[dim], &[self], signature, |x, out| {
            let own = x[0].to_local().sum_keepdim(dim)?.broadcast_as(out.local_shape().as_slice())?;
            let mut column = vec![1; out.dims().len()];
            column[dim] = pieces;
            let after = Tensor::from_iter((0..pieces).map(|piece| u8::from(piece > at)), own.device())?;
            let after = after.reshape(column)?.broadcast_as(own.shape())?;
            Ok(after.where_cond(&own, &own.zeros_like()?)?)
        })?;
        sums.placed(|axis, p| if axes.contains(&axis) { Shard(dim) } else { p })
    }
}

fn running_sum(x: &Tensor, dim: usize) -> candle_core::Result<Tensor> {
    let last = x.rank() - 1;
    x.transpose(dim, last)?.contiguous()?.cumsum(last)?.transpose(dim, last)
}

fn running_log_sum(x: &Tensor, dim: usize) -> candle_core::Result<Tensor> {
    let last = x.rank() - 1;
    kernels::logcumsumexp(&x.transpose(dim, last)?)?.transpose(dim, last)
}
