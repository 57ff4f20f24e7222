//! A mixture of experts on one device in plain candle: a dense loop over experts.

use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_shard::nn::{ExpertGate, MoEConfig, Scores};
use candle_shard::random::Distribution;

use crate::reference_params::Params;

/// The reference of [`candle_shard::nn::MoE`], with its parameters and options. Axes and sizes have no effect.
///
/// Each expert computes all tokens, and most results are multiplied by zero: slow, but without any routing of rows.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_shard::nn::MoEConfig;
/// use test_utils::reference_moe::Moe;
///
/// # fn main() -> candle_core::Result<()> {
/// let layer = Moe::new(&MoEConfig::new(4, 8, 3, 2), 0, DType::F32, &Device::Cpu)?;
/// let made = layer.forward(&Tensor::ones((5, 4), DType::F32, &Device::Cpu)?)?;
/// assert_eq!((made.output.dims(), made.counts.iter().sum::<usize>()), (&[5, 4][..], 5 * 2));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Moe {
    layer: MoeLayer,
    vars: Vec<(String, Var)>,
}

/// What the layer made of tokens.
#[derive(Clone, Debug)]
pub struct Made {
    /// The tokens after the layer.
    pub output: Tensor,
    /// The sum of the auxiliary losses.
    pub loss: Option<Tensor>,
    /// The number of tokens that chose each expert.
    pub counts: Vec<usize>,
    /// The experts that each token chose, and `None` for dropped choices.
    pub choices: Vec<Vec<Option<usize>>>,
}

impl Moe {
    /// Creates a layer with newly drawn parameters and a bias of zeros.
    pub fn new(config: &MoEConfig, seed: u64, dtype: DType, device: &Device) -> Result<Self> {
        let mut params = Params::new(seed, dtype, device);
        let layer = MoeLayer::new(&mut params, "", config)?;
        Ok(Self { layer, vars: params.into_vars() })
    }

    /// Maps tokens `[.., width]` to tokens of the same shape.
    pub fn forward(&self, x: &Tensor) -> Result<Made> {
        self.layer.forward(x)
    }

    /// Like [`forward`](Self::forward), with experts that are chosen by as many other tokens.
    pub fn forward_by(&self, x: &Tensor, by: &Tensor) -> Result<Made> {
        self.layer.forward_by(x, by)
    }

    /// Sets the bias of the choice, one number per expert.
    pub fn set_bias(&mut self, bias: Vec<f64>) {
        self.layer.bias = bias;
    }

    /// Returns the parameters by name.
    pub fn vars(&self) -> &[(String, Var)] {
        &self.vars
    }
}

#[derive(Clone, Debug)]
pub(crate) struct MoeLayer {
    config: MoEConfig,
    bias: Vec<f64>,
    router: Tensor,
    logit_bias: Option<Tensor>,
    expert_scale: Option<Tensor>,
    /// Gate, if there is one, up and down.
    experts: Vec<Tensor>,
    /// Their biases, if there are some.
    biases: Option<Vec<Tensor>>,
    shared: Option<[Tensor; 3]>,
    shared_gate: Option<Tensor>,
}

impl MoeLayer {
    /// Draws the parameters. `prefix` is empty, or ends in a dot.
    pub(crate) fn new(params: &mut Params, prefix: &str, config: &MoEConfig) -> Result<Self> {
        let &MoEConfig { width, hidden, experts, shared_hidden, .. } = config;
        let mut draw = |name: &str, shape: &[usize]| {
            let bound = 1.0 / (shape[shape.len() - 1] as f64).sqrt();
            params.draw(format!("{prefix}{name}"), shape, Distribution::Uniform { lo: -bound, up: bound })
        };
        let by_width = config.router_width.unwrap_or(width);
        let router = draw("router.weight", &[experts, by_width])?;
        let first = usize::from(!config.expert_gate.has_gate());
        let of_experts = [("gate", hidden, width), ("up", hidden, width), ("down", width, hidden)];
        let made = of_experts[first..]
            .iter()
            .map(|(name, out, into)| draw(&format!("experts.{name}_proj"), &[experts, *out, *into]));
        let made: Vec<Tensor> = made.collect::<Result<_>>()?;
        let shared = match shared_hidden {
            0 => None,
            hidden => Some([
                draw("shared_experts.gate_proj.weight", &[hidden, width])?,
                draw("shared_experts.up_proj.weight", &[hidden, width])?,
                draw("shared_experts.down_proj.weight", &[width, hidden])?,
            ]),
        };
        let shared_gate =
            config.shared_gate.then(|| draw("shared_expert_gate.weight", &[1, width])).transpose()?;
        // A layer draws it with the bound of the router's weight.
        let bound = 1.0 / (by_width as f64).sqrt();
        let uniform = Distribution::Uniform { lo: -bound, up: bound };
        let logit_bias = || params.draw(format!("{prefix}router.logit_bias"), &[experts], uniform);
        let logit_bias = config.logit_bias.then(logit_bias).transpose()?;
        let expert_scale = || params.ones(format!("{prefix}router.per_expert_scale"), experts);
        let expert_scale = config.expert_scale.then(expert_scale).transpose()?;
        let mut bias_of = |name: &str, columns: usize, into: usize| {
            let bound = 1.0 / (into as f64).sqrt();
            let uniform = Distribution::Uniform { lo: -bound, up: bound };
            params.draw(format!("{prefix}experts.{name}_proj_bias"), &[experts, columns], uniform)
        };
        let biases = match config.expert_bias {
            true => Some(
                of_experts[first..]
                    .iter()
                    .map(|&(name, out, into)| bias_of(name, out, into))
                    .collect::<Result<_>>()?,
            ),
            false => None,
        };
        let (config, bias) = (config.clone(), vec![0.0; experts]);
        let experts = made;
        Ok(Self { config, bias, router, logit_bias, expert_scale, experts, biases, shared, shared_gate })
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Result<Made> {
        self.forward_by(x, x)
    }

    fn forward_by(&self, x: &Tensor, by: &Tensor) -> Result<Made> {
        let config = &self.config;
        let flat = x.reshape(((), config.width))?;
        let by_width = config.router_width.unwrap_or(config.width);
        let mut logits = by.reshape(((), by_width))?.matmul(&self.router.t()?)?;
        if let Some(bias) = &self.logit_bias {
            logits = logits.broadcast_add(bias)?;
        }
        let scores = match config.scores {
            Scores::Softmax => candle_nn::ops::softmax(&logits, D::Minus1)?,
            Scores::Sigmoid => candle_nn::ops::sigmoid(&logits)?,
        };
        let all = scores.detach().to_dtype(DType::F64)?.to_vec2::<f64>()?;
        let chosen: Vec<Vec<usize>> = all.iter().map(|scores| self.choose(scores)).collect();
        let choices = self.limit(&chosen);
        let indexes: Vec<u32> = chosen.iter().flatten().map(|&expert| expert as u32).collect();
        let indexes = Tensor::from_vec(indexes, (chosen.len(), config.top_k), x.device())?;
        let mut weights = scores.gather(&indexes, 1)?;
        if config.normalize {
            let sums = (weights.sum_keepdim(1)? + config.normalize_epsilon)?;
            let least = sums.ones_like()?.affine(config.normalize_least, 0.0)?;
            weights = weights.broadcast_div(&sums.ge(&least)?.where_cond(&sums, &least)?)?;
        }
        weights = (weights * config.scale)?;
        if let Some(factors) = &self.expert_scale {
            weights = (weights * factors.broadcast_as(scores.shape())?.contiguous()?.gather(&indexes, 1)?)?;
        }
        let mut output = flat.zeros_like()?;
        for expert in 0..config.experts {
            let uses = choices.iter().flatten().map(|choice| f64::from(u8::from(*choice == Some(expert))));
            let uses = Tensor::from_iter(uses, x.device())?.reshape(weights.shape())?.to_dtype(x.dtype())?;
            let weight = (&weights * &uses)?.sum_keepdim(1)?;
            let (flat, weight) = match config.weigh_inputs {
                true => (flat.broadcast_mul(&weight)?, uses.sum_keepdim(1)?),
                false => (flat.clone(), weight),
            };
            let product = |x: &Tensor, which: usize| {
                let made = x.matmul(&self.experts[which].get(expert)?.t()?)?;
                match &self.biases {
                    Some(biases) => made.broadcast_add(&biases[which].get(expert)?),
                    None => Ok(made),
                }
            };
            let last = self.experts.len() - 1;
            let up = product(&flat, last - 1)?;
            // Without a gate nothing reads it.
            let gate = if last > 1 { product(&flat, 0)? } else { up.clone() };
            let made = product(&activated(&gate, &up, config.expert_gate)?, last)?;
            output = (output + made.broadcast_mul(&weight)?)?;
        }
        if let Some([gate, up, down]) = &self.shared {
            let made = gated(&flat, [gate, up, down])?;
            let made = match &self.shared_gate {
                Some(gate) => made.broadcast_mul(&candle_nn::ops::sigmoid(&flat.matmul(&gate.t()?)?)?)?,
                None => made,
            };
            output = (output + made)?;
        }
        let mut counts = vec![0; config.experts];
        chosen.iter().flatten().for_each(|&expert| counts[expert] += 1);
        let loss = self.losses(&logits, &scores, &counts)?;
        Ok(Made { output: output.reshape(x.shape())?, loss, counts, choices })
    }

    /// Returns the best experts of a token, the best first.
    fn choose(&self, scores: &[f64]) -> Vec<usize> {
        let values: Vec<f64> = scores.iter().zip(&self.bias).map(|(score, bias)| score + bias).collect();
        let sorted = |mut of: Vec<usize>, value: &dyn Fn(usize) -> f64| {
            // Stable, so that the first of equal ones stays first.
            of.sort_by(|&a, &b| value(b).total_cmp(&value(a)));
            of
        };
        let mut allowed: Vec<usize> = (0..values.len()).collect();
        if let Some(groups) = self.config.groups {
            let size = values.len() / groups.count;
            let worth = |group: usize| {
                let members = sorted((group * size..(group + 1) * size).collect(), &|i| values[i]);
                members.iter().take(groups.best).map(|&i| values[i]).sum()
            };
            let best = sorted((0..groups.count).collect(), &worth);
            allowed.retain(|i| best[..groups.chosen].contains(&(i / size)));
        }
        let mut best = sorted(allowed, &|i| values[i]);
        best.truncate(self.config.top_k);
        best
    }

    /// Drops the choices of full experts.
    fn limit(&self, chosen: &[Vec<usize>]) -> Vec<Vec<Option<usize>>> {
        let mut kept: Vec<Vec<Option<usize>>> =
            chosen.iter().map(|c| c.iter().copied().map(Some).collect()).collect();
        let Some(factor) = self.config.capacity_factor else { return kept };
        let mean = (chosen.len() * self.config.top_k) as f64 / self.config.experts as f64;
        let mut room = vec![(factor * mean).ceil() as usize; self.config.experts];
        for choice in 0..self.config.top_k {
            for (token, experts) in chosen.iter().enumerate() {
                match &mut room[experts[choice]] {
                    0 => kept[token][choice] = None,
                    left => *left -= 1,
                }
            }
        }
        kept
    }

    fn losses(&self, logits: &Tensor, scores: &Tensor, counts: &[usize]) -> Result<Option<Tensor>> {
        let config = &self.config;
        let mut loss = None;
        if config.balance_weight != 0.0 {
            let shares = match config.scores {
                Scores::Softmax => scores.clone(),
                Scores::Sigmoid => scores.broadcast_div(&scores.sum_keepdim(1)?)?,
            };
            let choices = (scores.dim(0)? * config.top_k) as f64;
            let counts = counts.iter().map(|&count| count as f64 / choices);
            let counts = Tensor::from_iter(counts, scores.device())?.to_dtype(scores.dtype())?;
            let balance = (shares.mean(0)? * counts)?.sum_all()?;
            loss = Some((balance * (config.balance_weight * config.experts as f64))?);
        }
        if config.z_weight != 0.0 {
            let z = (logits.exp()?.sum(1)?.log()?.sqr()?.mean_all()? * config.z_weight)?;
            loss = Some(match loss {
                Some(loss) => (loss + z)?,
                None => z,
            });
        }
        Ok(loss)
    }
}

fn gated(x: &Tensor, [gate, up, down]: [&Tensor; 3]) -> Result<Tensor> {
    activated(&x.matmul(&gate.t()?)?, &x.matmul(&up.t()?)?, ExpertGate::Silu)?.matmul(&down.t()?)
}

fn activated(gate: &Tensor, up: &Tensor, kind: ExpertGate) -> Result<Tensor> {
    match kind {
        ExpertGate::Silu => (gate * candle_nn::ops::sigmoid(gate)?)? * up,
        ExpertGate::SquaredRelu => up.relu()?.sqr(),
        ExpertGate::Gelu => {
            // candle's own has a backward pass with constants of six digits.
            let inner = ((gate * ((gate.sqr()? * 0.044715)? + 1.0)?)? * (2.0 / std::f64::consts::PI).sqrt())?;
            ((gate * (inner.tanh()? + 1.0)?)? * 0.5)? * up
        }
        ExpertGate::Clamped { alpha, limit } => {
            let limited = |x: &Tensor, low: f64| {
                let is_within = (x.le(limit)? * x.ge(low)?)?;
                is_within.where_cond(x, &x.detach().clamp(low, limit)?)
            };
            let (gate, up) = (limited(gate, f64::NEG_INFINITY)?, limited(up, -limit)?);
            (&gate * candle_nn::ops::sigmoid(&(&gate * alpha)?)?)? * (up + 1.0)?
        }
    }
}
