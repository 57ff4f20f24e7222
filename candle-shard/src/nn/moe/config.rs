//! The options of the layer, and their checks.
use super::OP;
use crate::layout::{Sizes, chunk_sizes};
use crate::nn::place::AxisCut;
use crate::nn::{MeshVarBuilder, Width};
use crate::{Error, Result};
use candle_dist::DeviceMesh;

/// How a router turns logits into scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Scores {
    /// The softmax over all experts. If scores are [normalized](MoEConfig::normalize) without a constant, weights are the softmax over the
    /// logits of the chosen experts alone.
    #[default]
    Softmax,
    /// The logistic function of each logit.
    Sigmoid,
}

/// What an expert makes of the results `g` and `u` of its first two products.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum ExpertGate {
    /// `g · sigmoid(g) · u`.
    #[default]
    Silu,
    /// `g · sigmoid(alpha · g) · (u + 1)`, where `g` is at most the limit, and `u` from its negative to it, as in gpt-oss.
    Clamped {
        /// The factor of `g` in the logistic function, which is positive.
        alpha: f64,
        /// The limit.
        limit: f64,
    },
    /// `gelu(g) · u`, where `gelu` is approximated by the hyperbolic tangent, as in Gemma 4.
    Gelu,
    /// `max(u, 0)²`, as in Nemotron 3. Experts then have no first product of the two, and no `gate_proj`.
    SquaredRelu,
}

impl ExpertGate {
    /// Returns whether experts have a gate beside their up.
    pub const fn has_gate(self) -> bool {
        !matches!(self, Self::SquaredRelu)
    }
}

/// A choice in two steps: first groups of experts, by the sum of their best scores, then experts in these groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertGroups {
    /// The number of groups, which divides the number of experts.
    pub count: usize,
    /// The number of groups whose experts a token may use.
    pub chosen: usize,
    /// How many of the best scores of a group are summed for its own: 2 in DeepSeek-V3, and 1 in DeepSeek-V2. A smaller group has all
    /// of its scores summed.
    pub best: usize,
}

/// The options of a [`MoE`](crate::nn::MoE) layer.
///
/// ```
/// use candle_shard::nn::{MoEConfig, Scores};
///
/// // 64 experts of width 128 on the ranks of the axis `ep`; each token uses 6.
/// let config = MoEConfig::new(512, 128, 64, 6).scores(Scores::Sigmoid).normalize(true).bias(true).expert_axis("ep");
/// # assert_eq!((config.experts, config.top_k), (64, 6));
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct MoEConfig {
    /// The width of tokens.
    pub width: usize,
    /// The width of the tokens that experts are chosen [by](crate::nn::MoE::forward_by), if it is another one.
    pub router_width: Option<usize>,
    /// The width between the two products of an expert.
    pub hidden: usize,
    /// The number of experts.
    pub experts: usize,
    /// The number of experts that each token uses.
    pub top_k: usize,
    /// How logits become scores.
    pub scores: Scores,
    /// Whether the scores of a token's experts are divided by their sum.
    pub normalize: bool,
    /// What is added to that sum, so that scores of zero do not divide by zero.
    pub normalize_epsilon: f64,
    /// What that sum is at least, as in ERNIE 4.5; 0 for no limit.
    pub normalize_least: f64,
    /// A factor of all experts' weights.
    pub scale: f64,
    /// Whether the weights of choices multiply what experts get, as in Llama 4, and not what they make.
    pub weigh_inputs: bool,
    /// Groups of experts that are chosen first.
    pub groups: Option<ExpertGroups>,
    /// Whether a bias, which [`MoE::update_bias`](crate::nn::MoE::update_bias) moves, balances the choice. It does not
    /// change the weights of experts, and gets no gradient. It has 32 bits at least.
    pub bias: bool,
    /// Whether logits have a bias, which is learned.
    pub logit_bias: bool,
    /// Whether each expert has a factor of its weights, which is learned (`per_expert_scale`).
    pub expert_scale: bool,
    /// Whether the products of an expert have biases. They are a part of its result, which the weights of choices multiply.
    pub expert_bias: bool,
    /// The activation of experts. Those that all tokens use have [`ExpertGate::Silu`].
    pub expert_gate: ExpertGate,
    /// The width of the experts that all tokens use; 0 for none.
    pub shared_hidden: usize,
    /// Whether what these experts make of a token is multiplied by a number from 0 to 1, the logistic function of a linear layer.
    pub shared_gate: bool,
    /// The factor of the auxiliary loss that balances the choice; 0 for none. In a pipeline the loss is that of a microbatch, so it
    /// depends on the number of microbatches.
    pub balance_weight: f64,
    /// The factor of the auxiliary loss that keeps logits small; 0 for none.
    pub z_weight: f64,
    /// The most tokens of an expert, as a multiple of the mean over all tokens and experts; further tokens are dropped.
    pub capacity_factor: Option<f64>,
    /// The mesh axis over which experts are distributed.
    pub expert_axis: Option<String>,
    /// The number of experts on each rank of that axis, if it is not the default one.
    pub expert_sizes: Option<Vec<usize>>,
    /// The mesh axis over which each expert is cut: tensor parallelism inside of experts.
    pub tensor_axis: Option<String>,
}

/// The most experts. Their numbers travel as floats.
const MOST_EXPERTS: usize = 1 << 20;

impl MoEConfig {
    /// Creates options of a layer with softmax scores, without shared experts, auxiliary losses, bias and capacity, whose
    /// experts are whole on each rank.
    pub fn new(width: usize, hidden: usize, experts: usize, top_k: usize) -> Self {
        Self {
            width,
            router_width: None,
            hidden,
            experts,
            top_k,
            scores: Scores::Softmax,
            normalize: false,
            normalize_epsilon: 1e-20,
            normalize_least: 0.0,
            scale: 1.0,
            weigh_inputs: false,
            groups: None,
            bias: false,
            logit_bias: false,
            expert_scale: false,
            expert_bias: false,
            expert_gate: ExpertGate::Silu,
            shared_hidden: 0,
            shared_gate: false,
            balance_weight: 0.0,
            z_weight: 0.0,
            capacity_factor: None,
            expert_axis: None,
            expert_sizes: None,
            tensor_axis: None,
        }
    }

    /// Sets the width of the tokens that experts are chosen by.
    pub fn router_width(self, router_width: impl Into<Option<usize>>) -> Self {
        Self { router_width: router_width.into(), ..self }
    }

    /// Returns the width of the tokens that experts are chosen by.
    pub(super) fn by_width(&self) -> usize {
        self.router_width.unwrap_or(self.width)
    }

    /// Sets how logits become scores.
    pub fn scores(self, scores: Scores) -> Self {
        Self { scores, ..self }
    }

    /// Sets whether the scores of a token's experts are divided by their sum.
    pub fn normalize(self, normalize: bool) -> Self {
        Self { normalize, ..self }
    }

    /// Sets what is added to that sum: 1e-20 if it is not set.
    pub fn normalize_epsilon(self, normalize_epsilon: f64) -> Self {
        Self { normalize_epsilon, ..self }
    }

    /// Sets what that sum is at least.
    pub fn normalize_least(self, normalize_least: f64) -> Self {
        Self { normalize_least, ..self }
    }

    /// Sets the factor of all experts' weights.
    pub fn scale(self, scale: f64) -> Self {
        Self { scale, ..self }
    }

    /// Sets whether the weights of choices multiply what experts get.
    pub fn weigh_inputs(self, weigh_inputs: bool) -> Self {
        Self { weigh_inputs, ..self }
    }

    /// Sets the groups of experts that are chosen first.
    pub fn groups(self, groups: impl Into<Option<ExpertGroups>>) -> Self {
        Self { groups: groups.into(), ..self }
    }

    /// Sets whether a bias balances the choice.
    pub fn bias(self, bias: bool) -> Self {
        Self { bias, ..self }
    }

    /// Sets whether logits have a bias.
    pub fn logit_bias(self, logit_bias: bool) -> Self {
        Self { logit_bias, ..self }
    }

    /// Sets whether each expert has a factor of its weights.
    pub fn expert_scale(self, expert_scale: bool) -> Self {
        Self { expert_scale, ..self }
    }

    /// Sets whether the products of an expert have biases.
    pub fn expert_bias(self, expert_bias: bool) -> Self {
        Self { expert_bias, ..self }
    }

    /// Sets the activation of experts.
    pub fn expert_gate(self, expert_gate: ExpertGate) -> Self {
        Self { expert_gate, ..self }
    }

    /// Sets the width of the experts that all tokens use.
    pub fn shared_hidden(self, shared_hidden: usize) -> Self {
        Self { shared_hidden, ..self }
    }

    /// Sets whether what these experts make of a token is multiplied by a gate.
    pub fn shared_gate(self, shared_gate: bool) -> Self {
        Self { shared_gate, ..self }
    }

    /// Sets the factor of the auxiliary loss that balances the choice.
    pub fn balance_weight(self, balance_weight: f64) -> Self {
        Self { balance_weight, ..self }
    }

    /// Sets the factor of the auxiliary loss that keeps logits small.
    pub fn z_weight(self, z_weight: f64) -> Self {
        Self { z_weight, ..self }
    }

    /// Sets the most tokens of an expert, as a multiple of the mean.
    pub fn capacity_factor(self, capacity_factor: impl Into<Option<f64>>) -> Self {
        Self { capacity_factor: capacity_factor.into(), ..self }
    }

    /// Sets the mesh axis over which experts are distributed.
    pub fn expert_axis(self, expert_axis: impl Into<String>) -> Self {
        Self { expert_axis: Some(expert_axis.into()), ..self }
    }

    /// Sets the number of experts on each rank of that axis.
    pub fn expert_sizes(self, expert_sizes: impl Into<Option<Vec<usize>>>) -> Self {
        Self { expert_sizes: expert_sizes.into(), ..self }
    }

    /// Sets the mesh axis over which each expert is cut.
    pub fn tensor_axis(self, tensor_axis: impl Into<String>) -> Self {
        Self { tensor_axis: Some(tensor_axis.into()), ..self }
    }

    /// Refuses options that fit no tokens.
    pub(super) fn check(&self) -> Result<()> {
        let &Self {
            width, hidden, experts, top_k, scale, normalize_epsilon, balance_weight, z_weight, ..
        } = self;
        let refuse = |reason: String| Error::op(OP, reason);
        if width == 0 || self.by_width() == 0 || hidden == 0 || experts == 0 || top_k == 0 {
            return refuse(format!(
                "width {width}, hidden {hidden}, {experts} experts, top {top_k}: expected at least 1 of each"
            ));
        }
        if experts > MOST_EXPERTS {
            return refuse(format!("{experts} experts: at most {MOST_EXPERTS} are possible"));
        }
        if top_k > experts {
            return refuse(format!("the top {top_k} of {experts} experts: choose at most {experts}"));
        }
        if let Some(ExpertGroups { count, chosen, best }) = self.groups {
            if count == 0 || !experts.is_multiple_of(count) || chosen == 0 || chosen > count {
                return refuse(format!(
                    "{chosen} of {count} groups of {experts} experts: expected groups of equal size, and from 1 to {count} \
                     chosen ones"
                ));
            }
            if best == 0 {
                return refuse("the best 0 scores of a group: sum at least 1".into());
            }
            let most = chosen * (experts / count);
            if top_k > most {
                return refuse(format!(
                    "the top {top_k} of the {most} experts in {chosen} of {count} groups: choose at most {most}, or more \
                     groups"
                ));
            }
        }
        if self.shared_gate && self.shared_hidden == 0 {
            return refuse("shared_gate without shared experts: give shared_hidden".into());
        }
        if let ExpertGate::Clamped { alpha, limit } = self.expert_gate
            && !(alpha.is_finite() && alpha > 0.0 && limit > 0.0)
        {
            return refuse(format!(
                "a clamped gate with alpha {alpha} and limit {limit}: expected positive numbers"
            ));
        }
        let factors = [
            ("scale", scale),
            ("normalize_epsilon", normalize_epsilon),
            ("normalize_least", self.normalize_least),
            ("balance_weight", balance_weight),
            ("z_weight", z_weight),
        ];
        if let Some((name, value)) = factors.into_iter().find(|(_, value)| !value.is_finite()) {
            return refuse(format!("{name} {value}: expected a finite number"));
        }
        match self.capacity_factor {
            Some(factor) if !(factor.is_finite() && factor > 0.0) => refuse(format!(
                "capacity_factor {factor}: expected a positive finite number, or None to keep all tokens"
            )),
            _ => Ok(()),
        }
    }

    /// Finds the axes of a mesh, and the number of experts on each rank of the expert axis.
    pub(super) fn axes(&self, mesh: &DeviceMesh) -> Result<MoEAxes> {
        let find = |name: &Option<String>| name.as_deref().map(|name| mesh.axis_index(name)).transpose();
        let (experts, tensor) = (find(&self.expert_axis)?, find(&self.tensor_axis)?);
        if let (Some(name), true) = (&self.expert_axis, experts == tensor) {
            return Error::op(
                OP,
                format!("experts are distributed and cut over one axis, {name:?}; use two"),
            );
        }
        let ranks = experts.map_or(1, |axis| mesh.shape()[axis]);
        let sizes = match &self.expert_sizes {
            None => chunk_sizes(self.experts, ranks).to_vec(),
            Some(sizes) if experts.is_none() => {
                return Error::op(
                    OP,
                    format!("expert_sizes {sizes:?} without an expert_axis; name the axis"),
                );
            }
            Some(sizes) => sizes.clone(),
        };
        let sum = sizes.iter().try_fold(0usize, |sum, &size| sum.checked_add(size));
        if sizes.len() != ranks || sum != Some(self.experts) {
            let count = self.experts;
            return Error::op(
                OP,
                format!(
                    "expert_sizes {sizes:?} for {count} experts on {ranks} ranks: give {ranks} sizes of sum {count}"
                ),
            );
        }
        Ok(MoEAxes { experts, tensor, sizes })
    }
}

/// The axes of a mesh that distribute and cut experts.
#[derive(Debug, Clone)]
pub(super) struct MoEAxes {
    /// The axis that distributes experts.
    pub(super) experts: Option<usize>,
    /// The axis that cuts each expert.
    pub(super) tensor: Option<usize>,
    /// The number of experts on each rank of the expert axis.
    pub(super) sizes: Vec<usize>,
}

impl MoEAxes {
    /// Returns how the tensor axis cuts the hidden dim `dim` of a weight: in the shares of the plan on its axis.
    pub(super) fn tensor_cut(
        &self,
        dim: usize,
        hidden: impl Into<Width>,
        vb: &MeshVarBuilder,
    ) -> Result<Option<AxisCut>> {
        let Some(axis) = self.tensor else { return Ok(None) };
        let is_planned = vb.plan().axis_index(vb.mesh())? == Some(axis) && vb.mesh().shape()[axis] > 1;
        let sizes =
            is_planned.then(|| vb.shard_sizes(hidden)).transpose()?.map(|sizes| sizes.as_slice().into());
        Ok(Some(AxisCut { axis, dim, sizes }))
    }

    /// Returns the number of experts on each rank, if it is not the default one.
    pub(super) fn explicit_sizes(&self) -> Option<Sizes> {
        let default = chunk_sizes(self.sizes.iter().sum(), self.sizes.len());
        (self.sizes[..] != default[..]).then(|| self.sizes[..].into())
    }

    /// Returns the rank of each expert.
    pub(super) fn ranks(&self) -> Vec<usize> {
        self.sizes.iter().enumerate().flat_map(|(rank, &size)| std::iter::repeat_n(rank, size)).collect()
    }
}
