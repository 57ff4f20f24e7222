//! Sequences of layers.
use crate::nn::Module;
use crate::{DTensor, Result};

/// Layers and functions that are applied one after the other.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_dist::World;
/// use candle_shard::nn::{Linear, Module, MeshVarBuilder, seq};
/// use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
/// use candle_shard::{DTensor, Replicate, Result};
///
/// World::threads(2).run(|ctx| -> Result<()> {
///     let mesh = ctx.mesh(&[("tp", 2)])?;
///     let plan = Plan::new("tp").with("up", ColwiseParallel::default()).with("down", RowwiseParallel::default());
///     let vb = MeshVarBuilder::fresh(42, &mesh, plan, DType::F32, &Device::Cpu)?;
///     let (up, down) = (Linear::new(4, 6, true, &vb.pp("up"))?, Linear::new(6, 4, true, &vb.pp("down"))?);
///     let model = seq().add(up).add_fn(DTensor::relu).add(down);
///     let x = DTensor::ones((2, 4), DType::F32, &Device::Cpu, &mesh, &[Replicate])?;
///     assert_eq!(model.forward(&x)?.dims(), [2, 4]);
///     Ok(())
/// })?;
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
#[derive(Default)]
pub struct Sequential {
    layers: Vec<Box<dyn Module + Send + Sync>>,
}

/// Creates an empty sequence.
pub fn seq() -> Sequential {
    Sequential::default()
}

impl Sequential {
    /// Returns the number of layers.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Returns whether there are no layers.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// Appends a layer.
    #[expect(clippy::should_implement_trait, reason = "candle's name")]
    pub fn add(mut self, layer: impl Module + Send + Sync + 'static) -> Self {
        self.layers.push(Box::new(layer));
        self
    }

    /// Appends a function.
    pub fn add_fn(self, f: impl Fn(&DTensor) -> Result<DTensor> + Send + Sync + 'static) -> Self {
        self.add(f)
    }

    /// Returns the output of each layer.
    ///
    /// # Errors
    /// That of the first layer that fails.
    pub fn forward_all(&self, x: &DTensor) -> Result<Vec<DTensor>> {
        let mut made: Vec<DTensor> = Vec::with_capacity(self.len());
        for layer in &self.layers {
            made.push(layer.forward(made.last().unwrap_or(x))?);
        }
        Ok(made)
    }
}

impl Module for Sequential {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.layers.iter().try_fold(x.clone(), |x, layer| layer.forward(&x))
    }
}
