//! The traits of layers.
use crate::fsdp::FullyShard;
use crate::nn::{DynamicTanh, Embedding, LayerNorm, Linear, RmsNorm};
use crate::{DTensor, Result};
use candle_nn::Activation;

/// A function from one distributed tensor to another: candle's `Module` for a mesh.
///
/// Functions and closures are modules too.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_dist::World;
/// use candle_shard::nn::{Linear, Module, MeshVarBuilder};
/// use candle_shard::parallel::Plan;
/// use candle_shard::{DTensor, Replicate, Result};
///
/// World::threads(2).run(|ctx| -> Result<()> {
///     let mesh = ctx.mesh(&[("tp", 2)])?;
///     let vb = MeshVarBuilder::fresh(42, &mesh, Plan::new("tp"), DType::F32, &Device::Cpu)?;
///     let layer = Linear::new(4, 6, true, &vb.pp("layer"))?;
///     let x = DTensor::ones((2, 4), DType::F32, &Device::Cpu, &mesh, &[Replicate])?;
///     assert_eq!(x.apply(&layer)?.apply(&DTensor::relu)?.dims(), [2, 6]);
///     Ok(())
/// })?;
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
pub trait Module {
    /// Applies this module to `x`.
    ///
    /// # Errors
    /// Those of its ops.
    fn forward(&self, x: &DTensor) -> Result<DTensor>;
}

impl<F: Fn(&DTensor) -> Result<DTensor>> Module for F {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self(x)
    }
}

impl<M: Module> Module for Option<&M> {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.map_or_else(|| Ok(x.clone()), |module| module.forward(x))
    }
}

/// A [`Module`] that behaves differently in training and evaluation: candle's `ModuleT` for a mesh.
pub trait ModuleT {
    /// Applies this module to `x`, in training if `train` is true.
    ///
    /// # Errors
    /// Those of its ops.
    fn forward_t(&self, x: &DTensor, train: bool) -> Result<DTensor>;
}

impl<M: Module> ModuleT for M {
    fn forward_t(&self, x: &DTensor, _: bool) -> Result<DTensor> {
        self.forward(x)
    }
}

impl DTensor {
    /// Applies `module` to this tensor.
    pub fn apply<M: Module + ?Sized>(&self, module: &M) -> Result<Self> {
        module.forward(self)
    }

    /// Applies `module` to this tensor, in training or in evaluation.
    pub fn apply_t<M: ModuleT + ?Sized>(&self, module: &M, train: bool) -> Result<Self> {
        module.forward_t(self, train)
    }
}

impl Module for Activation {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        x.activation(*self)
    }
}

/// A unit of a module is a module: its forward pass is [`run`](FullyShard::run).
impl<M: Module> Module for FullyShard<M> {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.run(|module| module.forward(x))
    }
}

macro_rules! layers {
    ($($layer:ty),*) => {
        $(impl Module for $layer {
            fn forward(&self, x: &DTensor) -> Result<DTensor> {
                self.forward(x)
            }
        })*
    };
}
layers!(DynamicTanh, Embedding, LayerNorm, Linear, RmsNorm);
