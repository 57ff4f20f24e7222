//! The experts: gated feed-forward networks, each over the rows that chose it.
use super::NO_EXPERT;
use super::config::{Axes, MoEConfig};
use super::dispatch::{Arrived, bags};
use crate::kernels::{self, BagMode};
use crate::nn::ShardedVarBuilder;
use crate::nn::linear::init;
use crate::nn::place::AxisCut;
use crate::{DTensor, Result};
use candle_core::Tensor;

/// The weights of all experts: expert `i` maps `x` to `down[i] · (silu(gate[i] · x) · (up[i] · x))`.
#[derive(Debug, Clone)]
pub(super) struct Experts {
    /// `[experts, hidden, width]`.
    pub(super) gate: DTensor,
    /// `[experts, hidden, width]`.
    pub(super) up: DTensor,
    /// `[experts, width, hidden]`.
    pub(super) down: DTensor,
}

impl Experts {
    pub(super) fn new(config: &MoEConfig, axes: &Axes, vb: &ShardedVarBuilder) -> Result<Self> {
        let &MoEConfig { width, hidden, experts, .. } = config;
        let make = |name: &str, [out, into]: [usize; 2], hidden_dim: usize| {
            let own = axes.experts.map(|axis| AxisCut { axis, dim: 0, sizes: axes.explicit_sizes() });
            let tensor = axes.tensor.map(|axis| AxisCut { axis, dim: hidden_dim, sizes: None });
            let cuts: Vec<AxisCut> = own.into_iter().chain(tensor).collect();
            vb.cut(&[experts, out, into], name, init(into), &cuts)
        };
        Ok(Self {
            gate: make("gate_proj", [hidden, width], 1)?,
            up: make("up_proj", [hidden, width], 1)?,
            down: make("down_proj", [width, hidden], 2)?,
        })
    }
}

/// Returns for each row the weighted sum of its experts' results, `[n, width]`, in the dtype of the weights of choices.
///
/// Rows are sorted by expert, so that each product reads one expert's weights once. The weights `[experts, ..]` are those
/// of this rank.
pub(super) fn compute(arrived: &Arrived, [gate, up, down]: [&Tensor; 3]) -> Result<Tensor> {
    let (n, top_k) = arrived.weights.dims2()?;
    let mut by_expert: Vec<Vec<u32>> = vec![Vec::new(); gate.dim(0)?];
    for (slot, &expert) in arrived.experts.iter().enumerate().filter(|(_, expert)| **expert != NO_EXPERT) {
        by_expert[expert as usize].push(slot as u32);
    }
    let counts: Vec<usize> = by_expert.iter().map(Vec::len).collect();
    let slots = by_expert.concat();
    let rows: Vec<u32> = slots.iter().map(|slot| slot / top_k as u32).collect();
    let x = kernels::embedding(&arrived.rows, &rows[..], None)?;
    let product = |x: &Tensor, weight: &Tensor| kernels::grouped_linear(x, weight, &counts[..]);
    let hidden = kernels::silu_gate(&product(&x, gate)?, &product(&x, up)?)?;
    let made = product(&hidden, down)?.to_dtype(arrived.weights.dtype())?;
    let mut of_row: Vec<Vec<u32>> = vec![Vec::new(); n];
    (0u32..).zip(&rows).for_each(|(place, &row)| of_row[row as usize].push(place));
    let in_bags: Vec<u32> = of_row.iter().flatten().map(|&place| slots[place as usize]).collect();
    let weights = kernels::embedding(&arrived.weights.reshape((n * top_k, 1))?, in_bags, None)?.flatten_all()?;
    Ok(kernels::embedding_bag(&made, &bags(&of_row)?, BagMode::Sum, Some(&weights))?)
}
