//! How evenly a mixture chooses its experts, which is a part of the loss that it learns by.
//!
//! The loss is that of transformers: the number of experts, times the sum over experts of the share of tokens that choose one and of its
//! mean score (Fedus et al. 2021, arXiv:2101.03961). Shares and means are over the tokens of all layers with experts, so
//! layers pass sums on, and the end of the model makes the loss of them.

use candle_core::{DType, Tensor};
use candle_dist::{ProcessGroup, ReduceOp, empty};
use candle_shard::nn::{Init, MeshVarBuilder};
use candle_shard::{DTensor, Placements, Replicate, Result};

use crate::config::experts::Experts;

/// The router of a layer, which its experts have too.
#[derive(Debug)]
pub(crate) struct DecoderRouter {
    /// `[experts, width]`.
    weight: DTensor,
    /// `[experts]`.
    bias: Option<DTensor>,
    /// The experts of a token.
    chosen: usize,
}

impl DecoderRouter {
    /// Opens the router of the experts that were built at the builder's path.
    pub(crate) fn new(width: usize, experts: &Experts, vb: &MeshVarBuilder) -> Result<Self> {
        let vb = vb.again().pp("router");
        let weight = vb.get((experts.count, width), "weight", Init::Const(0.0), Replicate, false)?;
        let bias = || vb.get(experts.count, "logit_bias", Init::Const(0.0), Replicate, false);
        Ok(Self { weight, bias: experts.logit_bias.then(bias).transpose()?, chosen: experts.chosen })
    }

    /// Sums `[2, experts]` over the tokens `[batch, tokens, width]` of all ranks: the scores of each expert, and how often it is
    /// chosen. Only scores have gradients.
    pub(crate) fn sums(&self, x: &DTensor) -> Result<DTensor> {
        let bias = self.bias.as_ref().map(|bias| bias.to_dtype(DType::F32)).transpose()?;
        let weight = self.weight.to_dtype(DType::F32)?;
        let scores = x.to_dtype(DType::F32)?.linear(&weight, bias.as_ref())?.softmax(2)?;
        let local = scores.to_local().detach();
        let choices =
            choices(&empty::to_host(&local)?.flatten_all()?.to_vec1()?, self.weight.dims()[0], self.chosen);
        let choices = Tensor::from_vec(choices, local.shape(), local.device())?;
        let choices = DTensor::from_local_with_spec(choices, scores.spec().clone())?;
        let sums = DTensor::stack(&[scores, choices], 0)?.sum(&[1usize, 2][..])?;
        sums.redistribute(&Placements::from_elem(Replicate, sums.mesh().ndim()))
    }
}

/// Returns 1 for each expert that a token chooses and 0 for the others: `experts` numbers for each token. Of equal scores it
/// chooses the first.
fn choices(scores: &[f32], experts: usize, chosen: usize) -> Vec<f32> {
    let of_token = |scores: &[f32]| {
        let mut order: Vec<usize> = (0..experts).collect();
        order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
        let mut choices = vec![0.0; experts];
        order.iter().take(chosen).for_each(|&expert| choices[expert] = 1.0);
        choices
    };
    scores.chunks_exact(experts).flat_map(of_token).collect()
}

/// Returns the loss of the sums `[2, experts]` over `rows` rows of scores, times `factor`.
///
/// How often experts are chosen is counted over all `replicas`, if there are some outside of the mesh. So the mean of the replicas'
/// losses is that of one device with all tokens.
pub(crate) fn loss(
    sums: &DTensor,
    rows: usize,
    factor: f64,
    replicas: Option<&ProcessGroup>,
) -> Result<DTensor> {
    let experts = sums.dims()[1];
    let choices = sums.to_local().detach().narrow(0, 1, 1)?;
    let counted = Tensor::full(rows as f32, (1, 1), choices.device())?;
    let mut told = Tensor::cat(&[choices, counted], 1)?;
    if let Some(replicas) = replicas {
        told = replicas.all_reduce(&told, ReduceOp::Sum)?;
    }
    let shares = told.narrow(1, 0, experts)?.broadcast_div(&told.narrow(1, experts, 1)?)?;
    let everywhere = Placements::from_elem(Replicate, sums.mesh().ndim());
    let shares = DTensor::from_local(shares, sums.mesh(), &everywhere, (1, experts))?;
    let scores = sums.narrow(0, 0, 1)?.affine(factor * experts as f64 / rows as f64, 0.0)?;
    scores.mul(&shares)?.sum_all()
}

#[cfg(test)]
mod tests {
    use super::choices;

    #[test]
    fn each_token_chooses_its_best_experts_and_of_equal_ones_the_first() {
        let scores = [0.1, 0.4, 0.2, 0.3, 0.25, 0.25, 0.25, 0.25];
        assert_eq!(choices(&scores, 4, 2), [0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0]);
    }
}
