//! Optimizers of this rank's shards. Their state is saved and resharded like the parameters.
//!
#![doc = include_str!("README.md")]

/// Implements [`Optimizer`] by the methods of the same names, which need no import of the trait.
macro_rules! optimizer_by_methods {
    ([$($generics:tt)*] $optimizer:ty) => {
        impl<$($generics)*> crate::nn::Optimizer for $optimizer {
            fn step(&mut self, grads: &candle_core::backprop::GradStore) -> crate::Result<()> {
                self.step(grads)
            }

            fn parameters(&self) -> crate::nn::Parameters {
                self.parameters()
            }

            fn master_weights(&self) -> Vec<(String, candle_core::Var)> {
                self.master_weights()
            }

            fn state(&self) -> crate::Result<Vec<(String, crate::DTensor)>> {
                self.state()
            }

            fn load(&mut self, path: &std::path::Path) -> crate::Result<()> {
                self.load(path)
            }

            fn load_partial(&mut self, path: &std::path::Path) -> crate::Result<Vec<String>> {
                self.load_partial(path)
            }

            fn learning_rates(&self) -> Vec<f64> {
                self.learning_rates()
            }

            fn set_learning_rates(&mut self, lrs: &[f64]) -> crate::Result<()> {
                self.set_learning_rates(lrs)
            }
        }
    };
}

mod adagrad;
mod adam_w;
mod element;
mod group;
mod muon;
mod options;
mod params;
mod schedule;
mod sgd;
mod slot;

pub use adagrad::{Adagrad, ParamsAdagrad};
pub use adam_w::AdamW;
pub use element::ElementOptimizer;
pub use group::ParamGroup;
pub use muon::{AdjustLr, Muon, ParamsMuon};
pub(crate) use params::{Params, check};
pub use schedule::LrSchedule;
pub use sgd::{ParamsSgd, Sgd};

use crate::nn::Parameters;
use crate::{DTensor, Result};
use candle_core::Var;
use candle_core::backprop::GradStore;
use std::fmt;
use std::path::Path;

/// The interface of all optimizers of shards: [`Sgd`], [`Adagrad`], [`AdamW`] and [`Muon`].
///
/// Each has [groups](ParamGroup) of parameters, with options per group. Frozen parameters and integer parameters are
/// left out. A parameter without a gradient stays as it is. Steps are counted per parameter, as in PyTorch.
/// Optimizers by rows are in [`sparse`](crate::sparse). They use gradients of [`RowVar`](crate::sparse::RowVar)s, not a
/// `GradStore`.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_dist::World;
/// use candle_nn::ParamsAdamW;
/// use candle_shard::Result;
/// use candle_shard::nn::{AdamW, LayerNorm, Linear, Optimizer, ParamGroup, ParamsSgd, Sgd, MeshVarBuilder};
/// use candle_shard::parallel::Plan;
///
/// World::threads(2).run(|ctx| -> Result<()> {
///     let mesh = ctx.mesh(&[("tp", 2)])?;
///     let vb = MeshVarBuilder::fresh(1, &mesh, Plan::new("tp"), DType::F32, &Device::Cpu)?;
///     let (_, _) = (Linear::new(4, 2, true, &vb.pp("out"))?, LayerNorm::new(2, 1e-5, &vb.pp("norm"))?);
///     let (decay, no_decay) = vb.finish()?.split_decay(); // norms and biases do not decay
///     assert_eq!((decay.len(), no_decay.len()), (1, 3));
///
///     let mut chosen: Vec<Box<dyn Optimizer>> = Vec::new();
///     let groups = |params: fn(f64) -> ParamsAdamW| {
///         [ParamGroup::new(&decay, params(0.1)), ParamGroup::new(&no_decay, params(0.0))]
///     };
///     let adam_w = AdamW::from_groups(groups(|weight_decay| ParamsAdamW { weight_decay, ..Default::default() }))?;
///     chosen.push(Box::new(adam_w));
///     chosen.push(Box::new(Sgd::new(&decay, ParamsSgd { momentum: 0.9, nesterov: true, ..Default::default() })?));
///     for optimizer in &mut chosen {
///         optimizer.set_learning_rate(3e-4)?;
///         assert!(optimizer.learning_rates().iter().all(|lr| *lr == 3e-4));
///     }
///     Ok(())
/// })?;
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
pub trait Optimizer: fmt::Debug {
    /// Updates every parameter that has a gradient. The gradients must be complete, as those of
    /// [`Parameters::backward`](crate::nn::Parameters::backward) are.
    ///
    /// A step without a gradient of any parameter changes nothing, and is a warning.
    ///
    /// # Errors
    /// If a gradient does not fit its parameter.
    fn step(&mut self, grads: &GradStore) -> Result<()>;

    /// Runs the backward pass of `loss`, and updates every parameter by its complete gradient:
    /// [`backward`](Parameters::backward) of the [`parameters`](Self::parameters), and [`step`](Self::step). Every rank of the mesh
    /// calls it.
    ///
    /// To clip gradients, to average those of replicas, to add those of several losses, or to step several optimizers, make the two
    /// calls yourself.
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_dist::World;
    /// use candle_shard::nn::{AdamW, linear};
    /// use candle_shard::prelude::*;
    ///
    /// World::threads(2).run(|ctx| -> candle_shard::Result<()> {
    ///     let mesh = ctx.mesh(&[("tp", 2)])?;
    ///     let plan = Plan::new("tp").with("up", ColwiseParallel::default());
    ///     let vb = MeshVarBuilder::fresh(42, &mesh, plan, DType::F32, &Device::Cpu)?;
    ///     let layer = linear(4, 6, vb.pp("up"))?;
    ///     let mut optimizer = AdamW::new(&vb.finish()?, candle_nn::ParamsAdamW::default())?;
    ///     let x = DTensor::ones((2, 4), DType::F32, &Device::Cpu, &mesh, &[Replicate])?;
    ///     let loss = || layer.forward(&x)?.sqr()?.mean_all();
    ///     let before = loss()?;
    ///     optimizer.backward_step(&before)?;
    ///     assert!(loss()?.to_scalar::<f32>()? < before.to_scalar::<f32>()?);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    ///
    /// # Errors
    /// Those of the two calls.
    fn backward_step(&mut self, loss: &DTensor) -> Result<()> {
        self.step(&self.parameters().backward(loss)?)
    }

    /// Returns the parameters that it trains, group by group.
    fn parameters(&self) -> Parameters;

    /// Returns this rank's [master weights](ParamGroup::with_master_weights) by the names of their parameters, for
    /// [`LocalSgd::with_master_weights`](candle_dist::LocalSgd::with_master_weights); none if it has none.
    fn master_weights(&self) -> Vec<(String, Var)>;

    /// Returns the state of each parameter, which has the parameter's layout, its number of steps, and the options of its
    /// group as f64 numbers in the order of their fields, for [`checkpoint::save`](crate::checkpoint::save). The names end with
    /// that of the parameter.
    ///
    /// # Errors
    /// If two parameters have the same name.
    fn state(&self) -> Result<Vec<(String, DTensor)>>;

    /// Loads the state and the options from a checkpoint that was saved on any mesh. Every rank calls it.
    ///
    /// Learning rates and other options are then those that were saved, as after PyTorch's `load_state_dict`; set others after
    /// it. They belong to parameters, so groups may be cut in another way if each one's parameters were saved with the same
    /// options. A group without parameters here keeps its options, and all do if a checkpoint has none.
    ///
    /// # Errors
    /// If a part of the state is missing or cannot be read, or parameters of one group were saved with unlike options. The
    /// error is the same on every rank of their mesh, and nothing has changed there. Stages of a pipeline have meshes of their own.
    fn load(&mut self, path: &Path) -> Result<()>;

    /// Loads the state of the parameters that a checkpoint has, and returns the names of the others, whose state stays as it
    /// is. Every rank calls it. The options stay as they are, also those of parameters that a checkpoint has.
    ///
    /// Use it to go on with a model after more of its parameters are trained.
    ///
    /// # Errors
    /// If a checkpoint has only a part of the state of a parameter, or cannot be read. The error is the same on every rank, and
    /// nothing has changed.
    fn load_partial(&mut self, path: &Path) -> Result<Vec<String>>;

    /// Returns the learning rate of each group.
    fn learning_rates(&self) -> Vec<f64>;

    /// Sets the learning rate of each group for the following steps.
    ///
    /// # Errors
    /// If there is not one per group, or one is negative or not finite. Nothing changes then.
    fn set_learning_rates(&mut self, lrs: &[f64]) -> Result<()>;

    /// Sets the same learning rate for all groups for the following steps; an [`LrSchedule`] has one for each.
    ///
    /// # Errors
    /// If it is negative or not finite.
    fn set_learning_rate(&mut self, lr: f64) -> Result<()> {
        self.set_learning_rates(&vec![lr; self.learning_rates().len()])
    }
}
