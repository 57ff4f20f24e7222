//! The router: which experts each token uses, and with what weights.
use super::config::{ExpertGroups, MoEConfig, Scores};
use crate::layout::{Replicate, Shard, axes_of};
use crate::nn::linear::init;
use crate::nn::{Init, MeshVarBuilder, Width};
use crate::{DTensor, Result, Spec};
use candle_core::{DType, Device, Tensor};
use candle_dist::empty;

/// The parameters of a router.
#[derive(Debug, Clone)]
pub(super) struct Router {
    /// `[experts, width]`.
    pub(super) weight: DTensor,
    /// `[experts]`, added to the logits.
    logit_bias: Option<DTensor>,
    /// `[experts]`, factors of the weights of choices.
    expert_scale: Option<DTensor>,
    /// `[experts]`, added to the scores for the choice alone.
    pub(super) bias: Option<DTensor>,
}

/// The router's result for the tokens `[.., width]`.
pub(super) struct RouterOutput {
    /// `[.., experts]`.
    pub(super) logits: DTensor,
    /// `[.., experts]`.
    pub(super) scores: DTensor,
    /// `[.., top_k]`: the weights of the chosen experts.
    pub(super) weights: DTensor,
    /// The experts that this rank's tokens chose, `top_k` for each.
    pub(super) chosen: Vec<u32>,
    /// The first of this rank's tokens with a score that is not a number.
    pub(super) invalid: Option<usize>,
}

impl Router {
    pub(super) fn new(config: &MoEConfig, vb: &MeshVarBuilder) -> Result<Self> {
        let width = config.by_width();
        let dims = [Width::from(config.experts), width.into()];
        let weight = vb.part(&dims, "weight".into(), init(width), Replicate, false)?;
        let logit_bias = || {
            let dims = [Width::from(config.experts)];
            vb.part(&dims, "logit_bias".into(), init(width), Replicate, false)
        };
        let logit_bias = config.logit_bias.then(logit_bias).transpose()?;
        let expert_scale = || {
            let dims = [Width::from(config.experts)];
            vb.part(&dims, "per_expert_scale".into(), Init::Const(1.0), Replicate, false)
        };
        let expert_scale = config.expert_scale.then(expert_scale).transpose()?;
        let bias = config.bias.then(|| vb.wide_buffer(config.experts, "bias", 0.0)).transpose()?;
        Ok(Self { weight, logit_bias, expert_scale, bias })
    }

    /// Chooses experts for each token. Scores are computed in f32 at least.
    pub(super) fn route(&self, config: &MoEConfig, x: &DTensor) -> Result<RouterOutput> {
        let dtype = if x.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let last = x.rank() - 1;
        let bias = self.logit_bias.as_ref().map(|bias| bias.to_dtype(dtype)).transpose()?;
        let logits = x.to_dtype(dtype)?.linear(&self.weight.to_dtype(dtype)?, bias.as_ref())?;
        let scores = match config.scores {
            Scores::Softmax => logits.softmax(last)?,
            Scores::Sigmoid => logits.sigmoid()?,
        };
        let (chosen, invalid) = agreed(&scores, self.choose(config, scores.to_local())?)?;
        let indexes = choices(scores.spec(), &chosen, config.top_k, scores.device())?;
        let mut weights = scores.gather(&indexes, last)?;
        if config.normalize {
            let sum = weights.sum_keepdim(last)?.add(config.normalize_epsilon)?;
            let least = config.normalize_least;
            weights = weights.div(if least == 0.0 { sum } else { sum.maximum(least)? })?;
        }
        if config.scale != 1.0 {
            weights = weights.affine(config.scale, 0.0)?;
        }
        if let Some(factors) = &self.expert_scale {
            let factors = scores.ones_like()?.mul(&factors.to_dtype(dtype)?)?;
            weights = weights.mul(&factors.gather(&indexes, last)?)?;
        }
        Ok(RouterOutput { logits, scores, weights, chosen, invalid })
    }

    fn choose(&self, config: &MoEConfig, scores: &Tensor) -> Result<(Vec<u32>, Option<usize>)> {
        let list =
            |x: &Tensor| empty::to_host(&x.detach())?.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
        let bias = self.bias.as_ref().map(|bias| list(bias.to_local())).transpose()?;
        let (scores, mut chosen, mut invalid) = (list(scores)?, Vec::new(), None);
        let mut values = vec![0.0; config.experts];
        for (token, scores) in scores.chunks_exact(config.experts).enumerate() {
            values.copy_from_slice(scores);
            for (value, bias) in values.iter_mut().zip(bias.iter().flatten()) {
                *value += bias;
            }
            if values.iter().any(|value| value.is_nan()) {
                invalid = invalid.or(Some(token));
            }
            if let Some(groups) = config.groups {
                leave_groups(&mut values, groups);
            }
            chosen.extend(best(&values, config.top_k).map(|expert| expert as u32));
        }
        Ok((chosen, invalid))
    }
}

/// Returns the choices of the first of the ranks that have the same tokens, and its first token without a score.
///
/// Ranks may round unlike, on unlike processors. Where two scores almost tie, each by itself could choose other experts: a
/// choice would be computed twice or not at all.
fn agreed(
    scores: &DTensor,
    (chosen, invalid): (Vec<u32>, Option<usize>),
) -> Result<(Vec<u32>, Option<usize>)> {
    let mesh = scores.mesh();
    let axes: Vec<usize> = (0..mesh.ndim())
        .filter(|&axis| mesh.shape()[axis] > 1 && scores.placements()[axis] == Replicate)
        .collect();
    if axes.is_empty() || scores.to_local().elem_count() == 0 {
        return Ok((chosen, invalid));
    }
    let told: Vec<u32> = std::iter::once(invalid.map_or(0, |token| token as u32 + 1)).chain(chosen).collect();
    let len = told.len();
    let told = Tensor::from_vec(told, len, &Device::Cpu)?;
    let mut told =
        scores.described(scores.group_of(&axes)?, axes_of(&axes)).broadcast(&told, 0)?.to_vec1::<u32>()?;
    let invalid = (told.remove(0) as usize).checked_sub(1);
    Ok((told, invalid))
}

/// Returns the indices of the `count` largest values, the largest first; of equal ones the first.
fn best(values: &[f64], count: usize) -> impl Iterator<Item = usize> + use<> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    let larger = |&a: &usize, &b: &usize| values[b].total_cmp(&values[a]).then(a.cmp(&b));
    if count < order.len() {
        order.select_nth_unstable_by(count, larger);
        order.truncate(count);
    }
    order.sort_unstable_by(larger);
    order.into_iter()
}

/// Sets the values outside of the best groups to the lowest one.
fn leave_groups(values: &mut [f64], ExpertGroups { count, chosen, best: summed }: ExpertGroups) {
    let size = values.len() / count;
    let worth = |group: &[f64]| best(group, summed.min(size)).map(|i| group[i]).sum::<f64>();
    let worths: Vec<f64> = values.chunks_exact(size).map(worth).collect();
    let mut stays = vec![false; count];
    best(&worths, chosen).for_each(|group| stays[group] = true);
    for (values, _) in values.chunks_exact_mut(size).zip(stays).filter(|(_, stays)| !stays) {
        values.fill(f64::NEG_INFINITY);
    }
}

/// Returns the choices of this rank's tokens as a tensor `[.., top_k]` that lies as the scores do.
fn choices(scores: &Spec, chosen: &[u32], top_k: usize, device: &Device) -> Result<DTensor> {
    let last = scores.dims().len() - 1;
    let mut shape = scores.dims().to_vec();
    shape[last] = top_k;
    let mut spec = Spec::new(scores.mesh(), scores.placements(), shape, DType::U32)?;
    for axis in (0..scores.placements().len()).filter(|&axis| scores.placements()[axis] != Shard(last)) {
        spec = spec.with_sizes(axis, scores.sizes(axis).cloned())?;
    }
    let local = Tensor::from_slice(chosen, spec.local_shape().as_slice(), device)?;
    DTensor::from_local_with_spec(local, spec)
}
