//! The feed-forward network of a layer: one for all tokens, or experts of which each token uses some, perhaps beside one for all.

use candle_nn::Activation;
use candle_shard::nn::{Init, MeshVarBuilder, MoE, MoEConfig, Mode, Width};
use candle_shard::parallel::Shares;
use candle_shard::{DTensor, Error, Placements, Replicate, Result, Shard};

use crate::config::Config;
use crate::config::experts::Experts;
use crate::config::tensors::{BESIDE_DENSE, EXPERT_LATENTS};
use crate::norm::Norm;
use crate::projection::{Projection, granule, in_blocks, scaled};
use crate::{EXPERT_AXIS, LAYER_AXIS};

/// A feed-forward network.
#[derive(Debug)]
pub(crate) enum FeedForward {
    Dense(Box<Dense>),
    Experts(Box<Mixture>),
    Both(Box<DenseAndExperts>),
}

/// A network for all tokens, and experts beside it that have the states before the norm of that one.
#[derive(Debug)]
pub(crate) struct DenseAndExperts {
    dense: Dense,
    experts: MoE,
    /// Of what tokens choose experts by.
    scale: DTensor,
    eps: f64,
    /// Behind the network, before the experts, and behind these.
    norms: [Norm; 3],
}

/// Experts, and what all tokens use beside them.
#[derive(Debug)]
pub(crate) struct Mixture {
    experts: MoE,
    /// Before and behind experts of another width.
    latents: Option<[Projection; 2]>,
    shared: Option<Dense>,
    /// The layer `[1, hidden]` whose logistic function multiplies what `shared` makes.
    gate: Option<Projection>,
}

/// One network for all tokens.
#[derive(Debug)]
pub(crate) struct Dense {
    gate: Option<Projection>,
    up: Projection,
    down: Projection,
    activation: Activation,
    /// Of what the gate makes before its activation, and of the result.
    factors: [f64; 2],
}

/// The columns between which floats are cut, where they are not cut evenly: fast kernels take these at once.
const ALIGNED: usize = 8;

/// The dim of tokens in hidden states `[batch, tokens, hidden]`.
const TOKENS: usize = 1;

impl FeedForward {
    /// The network of this layer, whose path the builder has. Without experts it makes up for the `loads` of ranks before it, if there are
    /// some.
    pub(crate) fn new(
        config: &Config,
        layer: usize,
        loads: &[usize],
        of_layer: &MeshVarBuilder,
    ) -> Result<Self> {
        let vb = &of_layer.pp("mlp");
        let Some(experts) = config.parts.experts(layer) else {
            return Ok(Self::Dense(Box::new(Dense::beside(loads, config, config.inner_of(layer), vb)?)));
        };
        if experts.beside_dense {
            let inner = config.inner_of(layer);
            return Ok(Self::Both(Box::new(DenseAndExperts::new(config, experts, inner, of_layer)?)));
        }
        let [shared, gate] = experts.names.shared.map(|name| name.trim_start_matches("mlp."));
        let hidden = config.hidden_size;
        let latents = |width: usize| {
            let [before, behind] = EXPERT_LATENTS.map(|name| vb.pp(name.trim_start_matches("mlp.")));
            Ok::<_, Error>([
                Projection::new(hidden, width, false, &before)?,
                Projection::new(width, hidden, false, &behind)?,
            ])
        };
        Ok(Self::Experts(Box::new(Mixture {
            experts: MoE::new(options(hidden, experts, vb), vb)?,
            latents: experts.latent.map(latents).transpose()?,
            shared: (experts.shared > 0)
                .then(|| Dense::new(config, experts.shared, &vb.pp(shared)))
                .transpose()?,
            gate: experts.shared_gate.then(|| Projection::new(hidden, 1, false, &vb.pp(gate))).transpose()?,
        })))
    }

    /// What the network adds to the states `[batch, tokens, hidden]`, which are `x` behind the norm before it.
    pub(crate) fn forward(&self, x: &DTensor, before: &DTensor) -> Result<DTensor> {
        match self {
            Self::Dense(dense) => dense.forward(x),
            Self::Experts(mixture) => mixture.forward(x),
            Self::Both(both) => both.forward(x, before),
        }
    }
}

impl Dense {
    fn new(config: &Config, inner: usize, vb: &MeshVarBuilder) -> Result<Self> {
        Self::cut(config, in_blocks(inner, granule(&vb.pp("down_proj"))), vb)
    }

    /// A network that is cut so that it makes up for the loads of ranks, in numbers of weights, if there are some.
    fn beside(loads: &[usize], config: &Config, inner: usize, vb: &MeshVarBuilder) -> Result<Self> {
        if loads.is_empty() {
            return Self::new(config, inner, vb);
        }
        let width = in_blocks(inner, granule(&vb.pp("down_proj")).max(ALIGNED));
        let of_column = config.hidden_size * (2 + usize::from(config.parts.gated));
        let shares = Shares::beside(loads, width.units, width.unit * of_column)?;
        Self::cut(config, width, &vb.with_shares(shares)?)
    }

    /// A network of this inner width, which is cut between its units.
    fn cut(config: &Config, inner: Width, vb: &MeshVarBuilder) -> Result<Self> {
        let (hidden, parts) = (config.hidden_size, &config.parts);
        Ok(Self {
            gate: match parts.gated {
                true => Some(Projection::new(hidden, inner, parts.mlp_bias, &vb.pp("gate_proj"))?),
                false => None,
            },
            up: Projection::new(hidden, inner, parts.mlp_bias, &vb.pp("up_proj"))?,
            down: Projection::new(inner, hidden, parts.mlp_bias, &vb.pp("down_proj"))?,
            activation: parts.activation,
            factors: [parts.factors.gate, parts.factors.down],
        })
    }

    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        let [of_gate, of_down] = self.factors;
        let Some(gate) = &self.gate else {
            let made = self.down.forward(&self.up.forward(x)?.activation(self.activation)?)?;
            return scaled(&made, of_down);
        };
        let [gate, up] = gate.forward_both(&self.up, x)?;
        let gate = scaled(&gate, of_gate)?;
        let made = self.down.forward(&match self.activation {
            Activation::Silu => gate.silu_gate(&up)?,
            other => gate.activation(other)?.mul(&up)?,
        })?;
        scaled(&made, of_down)
    }
}

impl DenseAndExperts {
    fn new(config: &Config, experts: &Experts, inner: usize, of_layer: &MeshVarBuilder) -> Result<Self> {
        let (hidden, vb) = (config.hidden_size, of_layer.pp("mlp"));
        let [behind_dense, before, behind] =
            BESIDE_DENSE.map(|name| Norm::new(hidden, config, &of_layer.pp(name)));
        Ok(Self {
            dense: Dense::new(config, inner, &vb)?,
            experts: MoE::new(options(hidden, experts, &vb), &vb)?,
            scale: vb.pp("router").get(hidden, "scale", Init::Const(1.0), Replicate, false)?,
            eps: config.rms_norm_eps,
            norms: [behind_dense?, before?, behind?],
        })
    }

    fn forward(&self, x: &DTensor, before: &DTensor) -> Result<DTensor> {
        let [behind_dense, before_experts, behind_experts] = &self.norms;
        let scale = self.scale.affine((self.scale.dims()[0] as f64).powf(-0.5), 0.0)?;
        let chosen = through_experts(
            &self.experts,
            &before_experts.forward(before)?,
            &before.rms_norm(&scale, self.eps)?,
        )?;
        behind_dense.forward(&self.dense.forward(x)?)?.add(&behind_experts.forward(&chosen)?)
    }
}

/// What experts make of states, chosen by others of the same layout, perhaps of another width.
fn through_experts(experts: &MoE, x: &DTensor, by: &DTensor) -> Result<DTensor> {
    match routed(x)? {
        None => Ok(experts.forward_by(x, by, Mode::Eval)?.output),
        Some(cut) => {
            let made = experts.forward_by(&x.redistribute(&cut)?, &by.redistribute(&cut)?, Mode::Eval)?;
            made.output.redistribute(x.placements())
        }
    }
}

impl Mixture {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        let routed = match &self.latents {
            None => through_experts(&self.experts, x, x)?,
            Some([before, behind]) => {
                behind.forward(&through_experts(&self.experts, &before.forward(x)?, x)?)?
            }
        };
        let Some(shared) = &self.shared else { return Ok(routed) };
        let made = shared.forward(x)?;
        match &self.gate {
            Some(gate) => routed.add(&made.mul(gate.forward(x)?.sigmoid()?)?),
            None => routed.add(&made),
        }
    }
}

/// The options of a layer of experts, which are distributed over one axis and cut over another, as far as the mesh has them.
fn options(width: usize, experts: &Experts, vb: &MeshVarBuilder) -> MoEConfig {
    let inner = experts.latent.unwrap_or(width);
    let options = MoEConfig::new(inner, experts.hidden, experts.count, experts.chosen)
        .router_width(experts.latent.map(|_| width))
        .scores(experts.scores)
        .groups(experts.groups)
        .bias(experts.has_bias)
        .logit_bias(experts.logit_bias)
        .expert_bias(experts.biases)
        .expert_scale(experts.beside_dense)
        .expert_gate(experts.gate)
        .normalize(experts.normalize)
        .normalize_epsilon(experts.normalize_epsilon)
        .normalize_least(experts.normalize_least)
        .scale(experts.scale)
        .weigh_inputs(experts.weigh_inputs);
    let has = |axis| vb.mesh().axis_index(axis).is_ok();
    let options = if has(EXPERT_AXIS) { options.expert_axis(EXPERT_AXIS) } else { options };
    if has(LAYER_AXIS) { options.tensor_axis(LAYER_AXIS) } else { options }
}

/// How states lie before experts, if not as they do: each rank routes some of the tokens that all have, and sends the rows
/// that others compute.
///
/// Fewer tokens than ranks stay on all: each rank runs its own experts, and one sum joins the results.
fn routed(x: &DTensor) -> Result<Option<Placements>> {
    let mut placements: Placements = x.placements().into();
    let Ok(axis) = x.mesh().axis_index(EXPERT_AXIS) else { return Ok(None) };
    let is_whole = placements.iter().all(|placement| placement.shard_dim() != Some(TOKENS));
    if placements[axis] == Replicate && is_whole && x.dims()[TOKENS] >= x.mesh().shape()[axis] {
        placements[axis] = Shard(TOKENS);
        return Ok(Some(placements));
    }
    Ok(None)
}
