//! Multilayer perceptrons on a mesh.
use candle_core::Var;
use candle_shard::nn::{Linear, MeshVarBuilder};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::random::{Distribution, Stream, sample_full};
use candle_shard::{DTensor, Result};

/// Linear 10 → 16, ReLU, Linear 16 → 10.
#[derive(Debug, Clone)]
pub struct MlpModule {
    net1: Linear,
    net2: Linear,
}

impl MlpModule {
    /// Creates the module with parameters `net1` and `net2` at the builder's path.
    pub fn new(bias: bool, vb: &MeshVarBuilder) -> Result<Self> {
        Ok(Self {
            net1: Linear::new(10, 16, bias, &vb.pp("net1"))?,
            net2: Linear::new(16, 10, bias, &vb.pp("net2"))?,
        })
    }

    /// Maps `[.., 10]` to `[.., 10]`.
    pub fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.net2.forward(&self.net1.forward(x)?.relu()?)
    }

    /// Resets the parameters to those of a new module with `seed` at the root of a builder. Every rank must call it.
    ///
    /// # Errors
    /// If they are frozen.
    pub fn reset_parameters(&self, seed: u64) -> Result<()> {
        reset(&self.net1, seed, "net1")?;
        reset(&self.net2, seed, "net2")
    }

    /// Returns the Megatron plan for modules at `prefix` (empty, or ending in a dot) on the mesh axis `axis`.
    pub fn plan(axis: &str, prefix: &str) -> Plan {
        Plan::new(axis)
            .with(format!("{prefix}net1"), ColwiseParallel::default())
            .with(format!("{prefix}net2"), RowwiseParallel::default())
    }
}

/// Resets a layer's parameters to those of a new layer at this path.
fn reset(layer: &Linear, seed: u64, path: &str) -> Result<()> {
    let bound = 1.0 / (layer.weight().dims()[1] as f64).sqrt();
    let even = Distribution::Uniform { lo: -bound, up: bound };
    for (name, parameter) in [("weight", Some(layer.weight())), ("bias", layer.bias())] {
        let Some(parameter) = parameter else { continue };
        let mine = parameter.to_local();
        if !mine.is_variable() {
            let reason = format!(
                "{path}.{name} is frozen and cannot be reset; build it with a builder that is not frozen"
            );
            return Err(candle_core::Error::msg(reason).into());
        }
        let stream = Stream::new(seed, &format!("{path}.{name}"));
        let whole = sample_full(stream, even, parameter.dims(), parameter.dtype(), mine.device())?;
        let drawn = DTensor::distribute(&whole, parameter.mesh(), parameter.placements())?;
        Var::from_tensor(mine)?.set(drawn.to_local())?;
    }
    Ok(())
}

/// A sequence of [`MlpModule`]s.
#[derive(Debug, Clone)]
pub struct MlpStacked {
    layers: Vec<MlpModule>,
}

impl MlpStacked {
    /// Creates `n_layers` modules at `layers.0`, `layers.1`, .... All have the initial values of an [`MlpModule`] with
    /// the builder's seed, wherever the builder gets parameters from.
    pub fn new(n_layers: usize, vb: &MeshVarBuilder) -> Result<Self> {
        let layers =
            (0..n_layers).map(|i| MlpModule::new(true, &vb.pp("layers").pp(i))).collect::<Result<_>>()?;
        let stacked = Self { layers };
        stacked.reset_parameters(vb.seed())?;
        Ok(stacked)
    }

    /// Sets the parameters to those of a new stack with `seed`. Every rank calls it.
    ///
    /// # Errors
    /// If they are frozen.
    pub fn reset_parameters(&self, seed: u64) -> Result<()> {
        self.layers.iter().try_for_each(|layer| layer.reset_parameters(seed))
    }

    /// Maps `[.., 10]` to `[.., 10]`.
    pub fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.layers.iter().try_fold(x.clone(), |x, layer| layer.forward(&x))
    }

    /// Returns the Megatron plan on the mesh axis `axis`.
    pub fn plan(axis: &str) -> Plan {
        MlpModule::plan(axis, "layers.*.")
    }
}
