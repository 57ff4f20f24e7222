//! The experts: gated feed-forward networks, each over the rows that chose it.
use super::NO_EXPERT;
use super::config::{MoEAxes, MoEConfig};
use super::dispatch::{ExpertRows, bags};
use super::quantized::{NAMES, QuantizedExperts};
use crate::kernels::{self, BagMode};
use crate::nn::MeshVarBuilder;
use crate::nn::linear::init;
use crate::nn::place::AxisCut;
use crate::{DTensor, Result};
use candle_core::Tensor;

/// The weights of all experts: expert `i` maps `x` to `down[i] · (silu(gate[i] · x) · (up[i] · x))`.
#[derive(Debug, Clone)]
pub(super) enum ExpertWeights {
    /// Gate and up `[experts, hidden, width]`, and down `[experts, width, hidden]`.
    Floats(Box<[DTensor; 3]>),
    /// Blocks of the same.
    Quantized(QuantizedExperts),
}

impl ExpertWeights {
    pub(super) fn new(config: &MoEConfig, axes: &MoEAxes, vb: &MeshVarBuilder) -> Result<Self> {
        if let Some(quantized) = QuantizedExperts::read(config, axes, vb)? {
            return Ok(Self::Quantized(quantized));
        }
        let &MoEConfig { width, hidden, experts, .. } = config;
        let make = |name: &str, [out, into]: [usize; 2], hidden_dim: usize| {
            let own = axes.experts.map(|axis| AxisCut { axis, dim: 0, sizes: axes.explicit_sizes() });
            let tensor = axes.tensor_cut(hidden_dim, hidden, vb)?;
            let cuts: Vec<AxisCut> = own.into_iter().chain(tensor).collect();
            vb.cut(&[experts, out, into], name, init(into), &cuts)
        };
        let [gate, up, down] = NAMES;
        let (gate, up) = (make(gate, [hidden, width], 1)?, make(up, [hidden, width], 1)?);
        Ok(Self::Floats(Box::new([gate, up, make(down, [width, hidden], 2)?])))
    }

    /// Returns the weights that are tensors.
    pub(super) fn tensors(&self) -> &[DTensor] {
        match self {
            Self::Floats(weights) => &weights[..],
            Self::Quantized(_) => &[],
        }
    }

    /// Returns the number of experts of this rank, whose [tensors](Self::tensors) have the layout `laid`.
    fn len(&self, laid: &[DTensor]) -> Result<usize> {
        match self {
            Self::Floats(_) => Ok(laid[0].to_local().dim(0)?),
            Self::Quantized(experts) => Ok(experts.len()),
        }
    }

    /// Returns the results for rows that are sorted by expert.
    fn results(&self, laid: &[DTensor], x: &Tensor, counts: &[usize]) -> Result<Tensor> {
        if let Self::Quantized(experts) = self {
            return experts.compute(x, counts);
        }
        let product = |x: &Tensor, weight: &DTensor| kernels::grouped_linear(x, weight.to_local(), counts);
        Ok(product(&kernels::silu_gate(&product(x, &laid[0])?, &product(x, &laid[1])?)?, &laid[2])?)
    }
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
    let x = kernels::embedding(&arrived.rows, &rows[..], None)?;
    let made = kernels::convert(&experts.results(laid, &x, &counts)?, arrived.weights.dtype())?;
    let mut of_row: Vec<Vec<u32>> = vec![Vec::new(); n];
    (0u32..).zip(&rows).for_each(|(place, &row)| of_row[row as usize].push(place));
    let in_bags: Vec<u32> = of_row.iter().flatten().map(|&place| slots[place as usize]).collect();
    let weights =
        kernels::embedding(&arrived.weights.reshape((n * top_k, 1))?, in_bags, None)?.flatten_all()?;
    Ok(kernels::embedding_bag(&made, &bags(&of_row)?, BagMode::Sum, Some(&weights))?)
}
