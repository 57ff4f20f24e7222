//! A layer under a plan: linear features with a soft threshold.
use crate::op::soft_threshold;
use candle_shard::nn::{Init, MeshVarBuilder};
use candle_shard::parallel::{LayerKind, ModuleStyle};
use candle_shard::random::Distribution;
use candle_shard::{DTensor, Result};

/// `soft_threshold(x · weightᵀ + bias, by)` with `weight` `[out, in]`; under a plan colwise or replicated.
#[derive(Debug, Clone)]
pub struct SparseLinear {
    weight: DTensor,
    bias: DTensor,
    by: f64,
    style: ModuleStyle,
}

impl SparseLinear {
    /// Builds a layer at the builder's path with the parameters `weight` and `bias`.
    ///
    /// # Errors
    /// If the plan has a style here that is not for linear layers.
    pub fn new(in_dim: usize, out_dim: usize, by: f64, vb: &MeshVarBuilder) -> Result<Self> {
        let style = vb.style();
        // The style decides the placement of the parameters, and whether their gradients are summed later.
        let layout = style.layout(LayerKind::Linear)?;
        let bound = 1.0 / (in_dim as f64).sqrt();
        let even = Init::Random(Distribution::Uniform { lo: -bound, up: bound });
        let weight = vb.get((out_dim, in_dim), "weight", even, layout.weight, layout.varying)?;
        let bias = vb.get(out_dim, "bias", Init::Const(0.0), layout.bias, layout.varying_bias)?;
        Ok(Self { weight, bias, by, style })
    }

    /// Returns the features `[.., out]` of `[.., in]`.
    ///
    /// # Errors
    /// If the shapes do not agree.
    pub fn forward(&self, x: &DTensor) -> Result<DTensor> {
        let [x] = self.style.inputs([x])?;
        // Partial sums of a rowwise weight are reduced before the bias and the threshold, which are not linear.
        let y = soft_threshold(&x.linear(&self.weight, None)?.add(&self.bias)?, self.by)?;
        let [y] = self.style.outputs([&y])?;
        Ok(y)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device, Tensor};
    use candle_dist::comm;
    use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
    use candle_shard::{Replicate, nn::Linear};
    use test_utils::{distance, on_ranks, values};

    /// Returns the loss and all whole gradients, in the order of the parameters' names, and the collectives of the
    /// forward pass.
    fn train(world: usize) -> (Vec<Tensor>, usize) {
        let ranks = on_ranks(world, "layer", move |ctx| -> Result<(Vec<Tensor>, usize)> {
            let mesh = ctx.mesh(&[("tp", world)])?;
            let plan = Plan::new("tp")
                .with("up", ColwiseParallel::default())
                .with("down", RowwiseParallel::default());
            let vb = MeshVarBuilder::fresh(7, &mesh, plan, DType::F64, &Device::Cpu)?;
            let up = SparseLinear::new(6, 10, 0.1, &vb.pp("up"))?;
            let down = Linear::new(10, 3, false, &vb.pp("down"))?;
            let parameters = vb.finish()?;
            let x = DTensor::distribute(&values(&[5, 6], 1, DType::F64), &mesh, &[Replicate])?;
            let (y, counts) = comm::record(|| down.forward(&up.forward(&x)?));
            let loss = y?.sqr()?.mean_all()?;
            let grads = parameters.backward(&loss)?;
            let mut whole = vec![loss.full_tensor()?.detach()];
            for tensor in [&up.weight, &up.bias, down.weight()] {
                let grad = grads
                    .get(tensor.to_local())
                    .map_or_else(|| tensor.to_local().zeros_like(), |g| Ok(g.clone()))?;
                whole.push(
                    DTensor::from_local_with_spec(grad.detach(), tensor.spec().clone())?.full_tensor()?,
                );
            }
            Ok((whole, counts.total()))
        });
        ranks.into_iter().next().unwrap_or_default()
    }

    #[test]
    fn losses_and_gradients_are_those_of_one_rank_with_one_all_reduce() {
        let (one, _) = train(1);
        for world in [2, 3, 4] {
            let (made, collectives) = train(world);
            for (got, want) in made.iter().zip(&one) {
                assert!(distance(got, want) < 1e-12, "{got} for {want} on {world} ranks");
            }
            assert_eq!(collectives, 1, "the shards of the features stay, on {world} ranks");
        }
        assert!(
            one.len() == 4
                && distance(&one[1], &one[1].zeros_like().unwrap_or_else(|e| panic!("{e}"))) > 1e-3
        );
    }
}
