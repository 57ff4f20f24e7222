//! Optimizers that are elementwise, so that a shard needs nothing from its peers.
use super::Optimizer;
use super::group::{Groups, ParamGroup, check_learning_rates};
use super::params::Params;
use super::slot::Slot;
use crate::autograd::counts;
use crate::nn::Parameters;
use crate::{DTensor, Result, checkpoint, kernels};
use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use std::path::Path;

/// Options of an elementwise optimizer.
pub trait ElementParams: Params {
    /// Updates the parameter of a slot by its gradient; `slot.steps` counts this step.
    fn step(&self, slot: &Slot, grad: &Tensor) -> candle_core::Result<()>;

    /// Updates the parameters of slots by their gradients.
    fn step_all(&self, slots: &[(&Slot, &Tensor)]) -> candle_core::Result<()> {
        slots.iter().try_for_each(|(slot, grad)| self.step(slot, grad))
    }
}

/// An elementwise optimizer: [`Sgd`](super::Sgd), [`Adagrad`](super::Adagrad) or [`AdamW`](super::AdamW).
///
/// Nothing is communicated in a step.
#[derive(Debug)]
pub struct ElementOptimizer<P> {
    pub(super) groups: Groups<P>,
}

impl<P: ElementParams> ElementOptimizer<P> {
    /// Creates an optimizer of one group.
    ///
    /// # Errors
    /// Those of [`from_groups`](Self::from_groups).
    pub fn new(parameters: &Parameters, params: P) -> Result<Self> {
        Self::from_groups([ParamGroup::new(parameters, params)])
    }

    /// Like [`new`](Self::new) with [master weights](ParamGroup::with_master_weights).
    pub fn with_master_weights(parameters: &Parameters, params: P) -> Result<Self> {
        Self::from_groups([ParamGroup::new(parameters, params).with_master_weights()])
    }

    /// Creates an optimizer of these groups.
    ///
    /// # Errors
    /// If an option is out of range, a parameter is in several groups, or parameters lie on several meshes.
    pub fn from_groups(groups: impl IntoIterator<Item = ParamGroup<P>>) -> Result<Self> {
        Ok(Self { groups: Groups::new(groups)? })
    }

    /// Adds a group, such as one of parameters that were frozen before (see
    /// [`MeshVarBuilder::again`](crate::nn::MeshVarBuilder::again)): PyTorch's `add_param_group`. The others keep their state.
    /// Every rank calls it.
    ///
    /// # Errors
    /// Those of [`from_groups`](Self::from_groups), and if the group has a frozen parameter, or ranks of the mesh add others or other
    /// options. The error is the same on every rank of the mesh, and nothing has changed. Replicas and stages with meshes of
    /// their own are not compared: they have to add the same.
    pub fn add_group(&mut self, group: ParamGroup<P>) -> Result<()> {
        group.check_added(self.groups.place()?.map(|(mesh, _)| mesh), false, self.groups.check(&group))?;
        self.groups.push(group)
    }

    /// See [`Optimizer::step`].
    ///
    /// # Errors
    /// If a gradient has another shape than its parameter, or a dtype that its gradients do not have: then nothing has changed.
    pub fn step(&mut self, grads: &GradStore) -> Result<()> {
        for slot in self.groups.slots() {
            if let Some(grad) = grads.get(&slot.of.var) {
                kernels::check_gradient(P::TYPE, &slot.of.var, grad)?;
            }
        }
        counts::parameters_change();
        self.groups.warn_unused(grads);
        for group in &mut self.groups.0 {
            let mut stepped = Vec::with_capacity(group.slots.len());
            for slot in &mut group.slots {
                if let Some(grad) = grads.get(&slot.of.var) {
                    slot.steps = slot.steps.saturating_add(1);
                    stepped.push((&*slot, grad));
                }
            }
            group.params.step_all(&stepped)?;
        }
        Ok(())
    }

    /// See [`Optimizer::backward_step`].
    pub fn backward_step(&mut self, loss: &DTensor) -> Result<()> {
        Optimizer::backward_step(self, loss)
    }

    /// See [`Optimizer::parameters`].
    pub fn parameters(&self) -> Parameters {
        Parameters::new(self.groups.slots().map(|slot| slot.of.clone()).collect())
    }

    /// See [`Optimizer::master_weights`].
    pub fn master_weights(&self) -> Vec<(String, Var)> {
        self.groups.master_weights()
    }

    /// See [`Optimizer::state`].
    pub fn state(&self) -> Result<Vec<(String, DTensor)>> {
        self.groups.state()
    }

    /// See [`Optimizer::load`].
    pub fn load(&mut self, path: impl AsRef<Path>) -> Result<()> {
        self.groups.check_names()?;
        let Some((mesh, _)) = self.groups.place()? else { return Ok(()) };
        let saved = checkpoint::read_with(path.as_ref(), mesh, |saved| self.groups.read(saved))?;
        self.groups.set(saved)
    }

    /// See [`Optimizer::load_partial`].
    pub fn load_partial(&mut self, path: impl AsRef<Path>) -> Result<Vec<String>> {
        self.groups.check_names()?;
        let Some((mesh, _)) = self.groups.place()? else { return Ok(Vec::new()) };
        let partial = checkpoint::read_with(path.as_ref(), mesh, |saved| self.groups.read_partial(saved))?;
        self.groups.set_partial(partial)
    }

    /// See [`Optimizer::learning_rates`].
    pub fn learning_rates(&self) -> Vec<f64> {
        self.groups.learning_rates()
    }

    /// See [`Optimizer::set_learning_rates`].
    pub fn set_learning_rates(&mut self, lrs: &[f64]) -> Result<()> {
        check_learning_rates(P::TYPE, lrs, self.groups.0.len())?;
        self.groups.set_learning_rates(lrs);
        Ok(())
    }

    /// See [`Optimizer::set_learning_rate`].
    pub fn set_learning_rate(&mut self, lr: f64) -> Result<()> {
        Optimizer::set_learning_rate(self, lr)
    }
}

optimizer_by_methods!([P: ElementParams] ElementOptimizer<P>);
