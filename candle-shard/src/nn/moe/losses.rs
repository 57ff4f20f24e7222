//! The auxiliary losses of a router.
use super::config::{MoEConfig, Scores};
use super::load::Load;
use super::router::RouterOutput;
use crate::{DTensor, Result};
use candle_core::Tensor;

/// Returns the sum of the auxiliary losses; `None` if there are none.
///
/// Their values are those of one device with all tokens. Counts are sums over all tokens, so each rank's gradient is
/// exact.
pub(super) fn of(config: &MoEConfig, routed: &RouterOutput, load: &Load) -> Result<Option<DTensor>> {
    let balance = (config.balance_weight != 0.0).then(|| balance(config, routed, load)).transpose()?;
    let z = (config.z_weight != 0.0).then(|| z(config, &routed.logits)).transpose()?;
    match (balance, z) {
        (Some(balance), Some(z)) => balance.add(&z).map(Some),
        (balance, z) => Ok(balance.or(z)),
    }
}

/// The number of tokens of `[.., n]`, at least 1.
fn tokens(x: &DTensor) -> f64 {
    x.dims()[..x.rank() - 1].iter().product::<usize>().max(1) as f64
}

/// The balance loss `w · E · Σ f·p` over experts (Fedus et al. 2021): `f` is the share of choices, `p` the mean score of an
/// expert. Sigmoid scores of a token are divided by their sum (DeepSeek-V3).
fn balance(config: &MoEConfig, RouterOutput { scores, .. }: &RouterOutput, load: &Load) -> Result<DTensor> {
    let last = scores.rank() - 1;
    let shares = match config.scores {
        Scores::Softmax => scores.clone(),
        Scores::Sigmoid => scores.div(scores.sum_keepdim(last)?.add(1e-20)?)?,
    };
    let tokens = tokens(scores);
    let factor = config.balance_weight * config.experts as f64 / (tokens * config.top_k as f64 * tokens);
    let counts = load.experts.iter().map(|&count| factor * count as f64);
    let counts = Tensor::from_iter(counts, scores.device())?.to_dtype(scores.dtype())?;
    shares.mul(&counts)?.sum_all()
}

/// The z loss `w · mean(log Σ exp(logits))²` (Zoph et al. 2022).
fn z(config: &MoEConfig, logits: &DTensor) -> Result<DTensor> {
    let last = logits.rank() - 1;
    logits.log_sum_exp(last)?.sqr()?.sum_all()?.affine(config.z_weight / tokens(logits), 0.0)
}
