//! The experts: feed-forward networks, most of them gated, each over the rows that chose it.
use super::NO_EXPERT;
use super::config::{ExpertGate, MoEAxes, MoEConfig};
use super::dispatch::{ExpertRows, bags};
use super::quantized::{NAMES, QuantizedExperts};
use crate::kernels::{self, BagMode, Function};
use crate::nn::linear::init;
use crate::nn::lora::AdapterScope;
use crate::nn::place::AxisCut;
use crate::nn::{Init, MeshVarBuilder};
use crate::{DTensor, Error, Result};
use candle_core::{DType, Tensor};
use candle_dist::empty;
use std::sync::Arc;

/// The weights of all experts: expert `i` maps `x` to `down[i] · (silu(gate[i] · x) · (up[i] · x))`, or has another activation, and
/// perhaps biases.
#[derive(Debug, Clone)]
pub(super) struct ExpertWeights {
    /// The products, if files have them in blocks.
    quantized: Option<QuantizedExperts>,
    /// If not, gate and up `[experts, hidden, width]`, and down `[experts, width, hidden]`; then the biases of all three, if there are
    /// some, `[experts, hidden]` twice and `[experts, width]`; then the factors of adapters. Without a gate all of its own are missing.
    tensors: Vec<DTensor>,
    has_biases: bool,
    /// The adapters beside gate, up and down.
    adapters: [Vec<ExpertAdapter>; 3],
    gate: ExpertGate,
    /// Whether the weights of choices multiply the rows that come in.
    weigh_inputs: bool,
    /// Whether this rank adds the biases of the results, which are sums over the tensor axis.
    is_first: bool,
}

/// The low-rank factors of an adapter beside the weight `[experts, out, in]` of a projection, each of an expert's own.
#[derive(Debug, Clone)]
struct ExpertAdapter {
    /// Its number in the model.
    number: usize,
    /// The places of `A` `[experts, rank, in]` and `B` `[experts, out, rank]` among the tensors.
    factors: [usize; 2],
    scale: f64,
}

/// The names of the biases of gate, up and down.
const BIASES: [&str; 3] = ["gate_proj_bias", "up_proj_bias", "down_proj_bias"];

impl ExpertWeights {
    pub(super) fn new(config: &MoEConfig, axes: &MoEAxes, vb: &MeshVarBuilder) -> Result<Self> {
        let &MoEConfig { width, hidden, experts, .. } = config;
        let quantized = QuantizedExperts::read(config, axes, vb)?;
        let built =
            |vb: &MeshVarBuilder, name: &str, dims: &[usize], init: Init, hidden_dim: Option<usize>| {
                let own = axes.experts.map(|axis| AxisCut { axis, dim: 0, sizes: axes.explicit_sizes() });
                let of_hidden = |dim: usize| match &quantized {
                    Some(quantized) => Ok(quantized.hidden_cut(dim)),
                    None => axes.tensor_cut(dim, hidden, vb),
                };
                let cuts = own.into_iter().chain(hidden_dim.map(of_hidden).transpose()?.flatten());
                vb.cut(&[&[experts], dims].concat(), name, init, &cuts.collect::<Vec<_>>())
            };
        let make = |name: &str, dims: &[usize], into: usize, hidden_dim: Option<usize>| {
            built(vb, name, dims, init(into), hidden_dim)
        };
        let mut tensors = Vec::new();
        let has_gate = config.expert_gate.has_gate();
        if quantized.is_none() {
            let [gate, up, down] = NAMES;
            tensors.extend(has_gate.then(|| make(gate, &[hidden, width], width, Some(1))).transpose()?);
            tensors.push(make(up, &[hidden, width], width, Some(1))?);
            tensors.push(make(down, &[width, hidden], hidden, Some(2))?);
        }
        if config.expert_bias {
            let [gate, up, down] = BIASES;
            tensors.extend(has_gate.then(|| make(gate, &[hidden], width, Some(1))).transpose()?);
            tensors.push(make(up, &[hidden], width, Some(1))?);
            tensors.push(make(down, &[width], hidden, None)?);
        }
        let mut adapters = [const { Vec::new() }; 3];
        let sizes = [(NAMES[0], hidden, width), (NAMES[1], hidden, width), (NAMES[2], width, hidden)];
        for (which, (name, out, into)) in sizes.into_iter().enumerate().skip(usize::from(!has_gate)) {
            for (number, vb, options) in vb.pp(name).adapters_here() {
                vb.check_expert_adapter(&options)?;
                let [of_out, of_in] = if which < 2 { [Some(1), None] } else { [None, Some(2)] };
                let named = |factor: &str| format!("{factor}.{}.weight", vb.adapter_name());
                let of_a = options.a_of.as_ref().map_or_else(|| vb.clone(), |path| vb.at(path));
                let (a, rank) = (named("lora_A"), options.rank);
                let build = || built(&of_a, &a, &[rank, into], init(into), of_in);
                let a = if options.a_of.is_some() { of_a.shared_factor(&a, build)? } else { build()? };
                let b = built(&vb, &named("lora_B"), &[out, rank], Init::Const(0.0), of_out)?;
                let factors = [tensors.len(), tensors.len() + 1];
                tensors.extend([a, b]);
                adapters[which].push(ExpertAdapter { number, factors, scale: options.scale() });
            }
        }
        let is_first = axes.tensor.is_none_or(|axis| vb.mesh().coordinate()[axis] == 0);
        let has_biases = config.expert_bias;
        let MoEConfig { expert_gate: gate, weigh_inputs, .. } = *config;
        Ok(Self { quantized, tensors, has_biases, adapters, gate, weigh_inputs, is_first })
    }

    /// Returns the weights that are tensors.
    pub(super) fn tensors(&self) -> &[DTensor] {
        &self.tensors
    }

    /// Returns the number of experts of this rank, whose [tensors](Self::tensors) have the layout `laid`.
    fn len(&self, laid: &[DTensor]) -> Result<usize> {
        match &self.quantized {
            Some(experts) => Ok(experts.len()),
            None => Ok(laid[0].to_local().dim(0)?),
        }
    }

    /// Returns the results for rows that are sorted by expert, in the dtype `dtype`.
    fn results(&self, laid: &[DTensor], x: &Tensor, counts: &[usize], dtype: DType) -> Result<Tensor> {
        // The place of the first product, which is up where there is no gate.
        let first = usize::from(!self.gate.has_gate());
        let (weights, biases) = laid.split_at(if self.quantized.is_some() { 0 } else { 3 - first });
        let biases = if self.has_biases { biases } else { &[] };
        let experts =
            counts.iter().zip(0u32..).flat_map(|(&count, expert)| std::iter::repeat_n(expert, count));
        let experts: Arc<[u32]> = experts.collect();
        let of_rows = |which: usize| -> Result<Option<Tensor>> {
            let Some(bias) = which.checked_sub(first).and_then(|at| biases.get(at)) else { return Ok(None) };
            Ok(Some(kernels::embedding(bias.to_local(), experts.clone(), None)?))
        };
        let with = |made: Tensor, which: usize| match of_rows(which)? {
            Some(bias) => sum(&made, &bias),
            None => Ok(made),
        };
        let gated = |gate: Option<Tensor>, up: Tensor| {
            let gate = gate.map(|gate| with(self.adapted(gate, x, 0, (laid, counts))?, 0)).transpose()?;
            let up = with(self.adapted(up, x, 1, (laid, counts))?, 1)?;
            Ok::<_, Error>(match (self.gate, gate) {
                (_, None) => squared_relu(&up)?,
                (ExpertGate::Gelu, Some(gate)) => gelu_gate(&gate, &up)?,
                (ExpertGate::Clamped { alpha, limit }, Some(gate)) => {
                    kernels::clamped_gate(&gate, &up, alpha, limit)?
                }
                (_, Some(gate)) => kernels::silu_gate(&gate, &up)?,
            })
        };
        // Ranks without rows take part where the blocks are gathered.
        let held = self.quantized.as_ref().map(QuantizedExperts::held).transpose()?;
        let made = match self.quantized.as_ref().zip(held) {
            // Then all that takes part elsewhere takes part here, in the same order.
            Some((experts, _)) if experts.is_idle(x)? => {
                let mut idle: Vec<Tensor> =
                    [Some(x.clone()), of_rows(0)?, of_rows(1)?].into_iter().flatten().collect();
                idle.extend(self.running(laid)?);
                empty::zeros_of(&idle.iter().collect::<Vec<_>>(), x.shape(), x.dtype())?
            }
            Some((experts, held)) => {
                let (gate, up) = experts.hidden(&held, x, counts)?;
                let inner = gated(gate, up)?;
                self.adapted(experts.down(&held, &inner, counts)?, &inner, 2, (laid, counts))?
            }
            None => {
                let product = |x: &Tensor, of: usize| {
                    kernels::grouped_linear(x, weights[of - first].to_local(), counts)
                };
                let gate = (first == 0).then(|| product(x, 0)).transpose()?;
                let inner = gated(gate, product(x, 1)?)?;
                self.adapted(product(&inner, 2)?, &inner, 2, (laid, counts))?
            }
        };
        let made = kernels::convert(&made, dtype)?;
        let Some(bias) = of_rows(2)? else { return Ok(made) };
        let bias = kernels::convert(&bias, dtype)?;
        // The other ranks have zeros, which keep their places in the backward pass.
        let bias = if self.is_first { bias } else { bias.mul(&bias.zeros_like()?)? };
        sum(&made, &bias)
    }
}

impl ExpertWeights {
    /// Returns the factors of the adapters that run.
    fn running(&self, laid: &[DTensor]) -> Result<Vec<Tensor>> {
        let mut factors = Vec::new();
        for ExpertAdapter { number, factors: places, .. } in self.adapters.iter().flatten() {
            if AdapterScope::of_all_rows("moe", "experts", *number)?.is_some() {
                factors.extend(places.map(|at| laid[at].to_local().clone()));
            }
        }
        Ok(factors)
    }

    /// Returns the products `made` of rows `x` with the weights of a projection, with what the running adapters add.
    fn adapted(
        &self,
        made: Tensor,
        x: &Tensor,
        which: usize,
        (laid, counts): (&[DTensor], &[usize]),
    ) -> Result<Tensor> {
        self.adapters[which].iter().try_fold(
            made,
            |made, ExpertAdapter { number, factors: [a, b], scale }| {
                let Some(factor) = AdapterScope::of_all_rows("moe", "experts", *number)? else {
                    return Ok(made);
                };
                let narrow = kernels::grouped_linear(x, laid[*a].to_local(), counts)?;
                let added = kernels::grouped_linear(&narrow, laid[*b].to_local(), counts)?;
                sum(&made, &added.affine(factor * scale, 0.0)?)
            },
        )
    }
}

/// `gelu(gate) · up`. Of two tensors without elements candle forgets one.
fn gelu_gate(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    if gate.elem_count() == 0 {
        return Ok(empty::zeros_of(&[gate, up], gate.shape(), gate.dtype())?);
    }
    Ok(Function::Gelu.apply(gate)?.mul(up)?)
}

/// `max(up, 0)²`.
fn squared_relu(up: &Tensor) -> Result<Tensor> {
    if up.elem_count() == 0 {
        return Ok(empty::zeros_of(&[up], up.shape(), up.dtype())?);
    }
    Ok(up.relu()?.sqr()?)
}

/// The sum of two tensors of a shape, of which candle forgets one where they have no elements.
fn sum(made: &Tensor, bias: &Tensor) -> Result<Tensor> {
    if made.elem_count() == 0 {
        return Ok(empty::zeros_of(&[made, bias], made.shape(), made.dtype())?);
    }
    Ok(kernels::add(made, bias)?)
}

/// Rows times their weights `[n, 1]`, in the dtype of the rows. Of tensors without elements candle forgets one.
fn weighted(x: &Tensor, weights: &Tensor) -> Result<Tensor> {
    if x.elem_count() == 0 {
        return Ok(empty::zeros_of(&[x, weights], x.shape(), x.dtype())?);
    }
    let made = kernels::convert(x, weights.dtype())?.broadcast_mul(weights)?;
    Ok(kernels::convert(&made, x.dtype())?)
}

/// Returns for each row the weighted sum of its experts' results, `[n, width]`, in the dtype of the weights of choices.
///
/// Rows are sorted by expert, so that each product reads one expert's weights once. `laid` are the tensors of the experts.
pub(super) fn compute(arrived: &ExpertRows, experts: &ExpertWeights, laid: &[DTensor]) -> Result<Tensor> {
    let (n, top_k) = arrived.weights.dims2()?;
    let mut by_expert: Vec<Vec<u32>> = vec![Vec::new(); experts.len(laid)?];
    for (slot, &expert) in arrived.experts.iter().enumerate().filter(|(_, expert)| **expert != NO_EXPERT) {
        by_expert[expert as usize].push(slot as u32);
    }
    let counts: Vec<usize> = by_expert.iter().map(Vec::len).collect();
    let slots = by_expert.concat();
    let rows: Vec<u32> = slots.iter().map(|slot| slot / top_k as u32).collect();
    let mut x = kernels::embedding(&arrived.rows, &rows[..], None)?;
    let all_weights = arrived.weights.reshape((n * top_k, 1))?;
    if experts.weigh_inputs {
        x = weighted(&x, &kernels::embedding(&all_weights, &slots[..], None)?)?;
    }
    let made = experts.results(laid, &x, &counts, arrived.weights.dtype())?;
    let mut of_row: Vec<Vec<u32>> = vec![Vec::new(); n];
    (0u32..).zip(&rows).for_each(|(place, &row)| of_row[row as usize].push(place));
    let bags = bags(&of_row)?;
    if experts.weigh_inputs {
        return Ok(kernels::embedding_bag(&made, &bags, BagMode::Sum, None)?);
    }
    let in_bags: Vec<u32> = of_row.iter().flatten().map(|&place| slots[place as usize]).collect();
    let weights = kernels::embedding(&all_weights, in_bags, None)?.flatten_all()?;
    Ok(kernels::embedding_bag(&made, &bags, BagMode::Sum, Some(&weights))?)
}
