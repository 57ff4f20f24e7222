//! Cumulative sums. Each rank sums its shard of a sharded dim and adds the total of the shards before it.
use crate::layout::{Partial, Placement, Replicate, Shard};
use crate::rules::{self, OpSpec, ShardingRule, ShardingRules, Signature};
use crate::{DTensor, Result};
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

    /// The sum of the shards before each shard of a sharded dim, as a tensor with one element per shard.
    #[track_caller]
    fn sums_before(&self, dim: usize) -> Result<Self> {
        let (mesh, axes) = (self.mesh(), self.sharded_axes(dim).collect::<Vec<_>>());
        let place = |(pieces, at): (usize, usize), &axis: &usize| {
            let n = mesh.shape()[axis];
            (pieces * n, at * n + mesh.coordinate()[axis])
        };
        let (pieces, at) = axes.iter().fold((1, 0), place);
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
