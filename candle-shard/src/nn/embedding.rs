//! The lookup layer.
use crate::nn::{Init, ShardedVarBuilder};
use crate::parallel::{LayerKind, ModuleStyle};
use crate::random::Distribution;
use crate::{DTensor, Result};

/// A table `[rows, width]` whose rows are looked up by id; under a plan cut by rows, by columns, or replicated.
#[derive(Debug, Clone)]
pub struct Embedding {
    weight: DTensor,
    style: ModuleStyle,
}

impl Embedding {
    /// A layer at the builder's path with the parameter `weight`, normal with this standard deviation where fresh.
    pub fn new(rows: usize, width: usize, stdev: f64, vb: &ShardedVarBuilder) -> Result<Self> {
        let style = vb.style();
        let layout = style.layout(LayerKind::Embedding)?;
        let init = Init::Random(Distribution::Normal { mean: 0.0, stdev });
        let weight = vb.get((rows, width), "weight", init, layout.weight, layout.varying)?;
        Ok(Self { weight, style })
    }

    /// The rows `[.., width]` at `ids` (u32, `[..]`).
    pub fn forward(&self, ids: &DTensor) -> Result<DTensor> {
        let [y] = self.style.outputs([&self.weight.embedding(ids)?])?;
        Ok(y)
    }

    /// The table.
    pub fn weight(&self) -> &DTensor {
        &self.weight
    }
}
