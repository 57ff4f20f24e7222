//! Perceptrons on a mesh.
use candle_shard::nn::{Linear, ShardedVarBuilder};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::{DTensor, Result};

/// Linear 10 → 16, ReLU, Linear 16 → 10.
#[derive(Debug, Clone)]
pub struct MlpModule {
    net1: Linear,
    net2: Linear,
}

impl MlpModule {
    /// The module with parameters `net1` and `net2` at the builder's path.
    pub fn new(bias: bool, vb: &ShardedVarBuilder) -> Result<Self> {
        Ok(Self { net1: Linear::new(10, 16, bias, &vb.pp("net1"))?, net2: Linear::new(16, 10, bias, &vb.pp("net2"))? })
    }

    /// `[.., 10]` to `[.., 10]`.
    pub fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.net2.forward(&self.net1.forward(x)?.relu()?)
    }

    /// The Megatron cut for modules at `prefix` (empty, or ending in a dot) on the mesh axis `axis`.
    pub fn plan(axis: &str, prefix: &str) -> Plan {
        Plan::new(axis)
            .with(format!("{prefix}net1"), ColwiseParallel::default())
            .with(format!("{prefix}net2"), RowwiseParallel::default())
    }
}

/// Several [`MlpModule`]s in a row.
#[derive(Debug, Clone)]
pub struct MlpStacked {
    layers: Vec<MlpModule>,
}

impl MlpStacked {
    /// `n_layers` modules at `layers.0`, `layers.1`, ...
    pub fn new(n_layers: usize, vb: &ShardedVarBuilder) -> Result<Self> {
        let layers = (0..n_layers).map(|i| MlpModule::new(true, &vb.pp("layers").pp(i))).collect::<Result<_>>()?;
        Ok(Self { layers })
    }

    /// `[.., 10]` to `[.., 10]`.
    pub fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.layers.iter().try_fold(x.clone(), |x, layer| layer.forward(&x))
    }

    /// The Megatron cut on the mesh axis `axis`.
    pub fn plan(axis: &str) -> Plan {
        MlpModule::plan(axis, "layers.*.")
    }
}
