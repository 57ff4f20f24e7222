//! Groups of parameters with the same options.
use super::params::{Params, check};
use super::slot::{Slot, place};
use crate::agreement::agreed;
use crate::nn::parameters::unused;
use crate::nn::{Parameter, Parameters};
use crate::{DTensor, Error, Result, Weights};
use candle_core::backprop::GradStore;
use candle_core::{Device, TensorId, Var};
use candle_dist::DeviceMesh;
use itertools::Itertools;
use std::collections::HashSet;

/// Parameters with their optimizer options: PyTorch's `param_groups`.
#[derive(Debug, Clone)]
pub struct ParamGroup<P> {
    parameters: Parameters,
    params: P,
    master_weights: bool,
}

impl<P> ParamGroup<P> {
    /// Creates a group of these parameters.
    pub fn new(parameters: &Parameters, params: P) -> Self {
        Self { parameters: parameters.clone(), params, master_weights: false }
    }

    /// Keeps a 32-bit copy of each 16-bit shard, which is updated instead (Micikevicius et al. 2018). The parameter is
    /// the copy, rounded, so that steps too small for 16 bits add up.
    ///
    /// The copies are part of the [`state`](super::Optimizer::state).
    pub fn with_master_weights(self) -> Self {
        Self { master_weights: true, ..self }
    }
}

impl<P: Params> ParamGroup<P> {
    /// Returns the parameters that are trained.
    pub(super) fn trained(&self) -> impl Iterator<Item = &Parameter> + Clone {
        self.parameters.iter().filter(|of| of.var.dtype().is_float() && !of.is_frozen())
    }

    /// Checks a group that is to be added to an optimizer of parameters on `mesh`, for which the result of other checks is `checked`:
    /// every rank of the mesh adds the same. Every rank calls it. Where parameters have to be `in_order`, their order counts.
    ///
    /// # Errors
    /// On all ranks alike, if a check has failed on one, the group has a parameter that is frozen, or ranks train others or with
    /// other options.
    pub(super) fn check_added(
        &self,
        mesh: Option<&DeviceMesh>,
        in_order: bool,
        checked: Result<()>,
    ) -> Result<()> {
        let Some(mesh) = mesh.or_else(|| self.parameters.iter().next().map(|of| of.tensor.mesh())) else {
            // No rank knows another one.
            return checked;
        };
        let fix =
            "build a model that trains it, and take its parameters of the builder again (finish, built)";
        let frozen = self.parameters.iter().find(|of| of.var.dtype().is_float() && of.is_frozen());
        // A stage of a pipeline may have none to add.
        let checked = checked.and_then(|()| match frozen {
            Some(frozen) => Error::op(P::TYPE, format!("{} of the group is frozen; {fix}", frozen.name)),
            None => Ok(()),
        });
        let mut names: Vec<&str> = self.trained().map(|of| of.name.as_str()).collect();
        if !in_order {
            names.sort_unstable();
        }
        let options =
            P::OPTIONS.iter().zip(self.params.options()).map(|(name, value)| format!("{name} {value}"));
        let masters = if self.master_weights { " and master weights" } else { "" };
        let names = if names.is_empty() { "no parameters".to_owned() } else { names.join(", ") };
        let text = format!("{names} with {}{masters}", options.format(", "));
        let group = mesh.group()?;
        agreed(group, P::TYPE, checked)?;
        let texts = group.all_gather_text(&text)?;
        match group.ranks().iter().zip(&texts).find(|(_, text)| **text != texts[0]) {
            None => Ok(()),
            Some((rank, other)) => {
                let (at, first) = (group.ranks()[0], &texts[0]);
                let reason = format!("rank {at} adds a group of {first}, and rank {rank} one of {other}");
                Error::op(
                    P::TYPE,
                    format!("{reason}; train the same parameters with the same options on all ranks"),
                )
            }
        }
    }
}

impl Parameters {
    /// Splits the parameters into those for which `f` is true, and the others, both in order.
    pub fn partition(&self, mut f: impl FnMut(&Parameter) -> bool) -> (Self, Self) {
        let (some, others) = self.iter().cloned().partition(|parameter| f(parameter));
        (Self::new(some), Self::new(others))
    }

    /// Splits the parameters into those that usually decay, and norms and biases, which do not; see
    /// [`Parameter::decays`].
    ///
    /// ```
    /// # use candle_core::{DType, Device};
    /// # use candle_shard::nn::{Linear, MeshVarBuilder};
    /// # candle_dist::World::threads(1).run(|ctx| -> candle_shard::Result<()> {
    /// # let (mesh, plan) = (ctx.mesh(&[("tp", 1)])?, candle_shard::parallel::Plan::new("tp"));
    /// # let vb = MeshVarBuilder::fresh(1, &mesh, plan, DType::F32, &Device::Cpu)?;
    /// # Linear::new(4, 2, true, &vb.pp("out"))?;
    /// # let parameters = vb.finish()?;
    /// let (decay, no_decay) = parameters.split_decay();
    /// assert_eq!(decay.iter().next().unwrap().name, "out.weight");
    /// assert_eq!(no_decay.iter().next().unwrap().name, "out.bias");
    /// # Ok(()) })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    pub fn split_decay(&self) -> (Self, Self) {
        self.partition(Parameter::decays)
    }
}

impl Parameter {
    /// Returns whether it has two dims or more and no part of its name is `bias`, begins with `ln_`, or contains
    /// `norm`.
    pub fn decays(&self) -> bool {
        let is_still = |part: &str| {
            let part = part.to_ascii_lowercase();
            part == "bias" || part == "ln" || part.starts_with("ln_") || part.contains("norm")
        };
        self.tensor.rank() >= 2 && !self.name.split('.').any(is_still)
    }
}

/// A group with the optimizer's state.
#[derive(Debug)]
pub(super) struct OptimizerGroup<P> {
    pub(super) params: P,
    pub(super) slots: Vec<Slot>,
}

/// The options and the state of all parameters in a checkpoint.
#[derive(Debug)]
pub(super) struct OptimizerState<P> {
    /// One for each group.
    params: Vec<P>,
    /// In the order of the slots.
    values: Vec<DTensor>,
}

/// The state of some of the parameters.
#[derive(Debug, Default)]
pub(super) struct PartialState {
    of: HashSet<TensorId>,
    /// In the order of the slots.
    values: Vec<DTensor>,
    /// The names of the other parameters.
    lacking: Vec<String>,
}

/// The groups of an optimizer.
#[derive(Debug)]
pub(super) struct Groups<P>(pub(super) Vec<OptimizerGroup<P>>);

impl<P: Params> Groups<P> {
    /// Creates the groups, without parameters that are not trained.
    ///
    /// # Errors
    /// If an option is out of range, a parameter is in several groups, or parameters lie on several meshes.
    pub(super) fn new(groups: impl IntoIterator<Item = ParamGroup<P>>) -> Result<Self> {
        let mut made = Self(Vec::new());
        for group in groups {
            made.check(&group)?;
            made.push(group)?;
        }
        Ok(made)
    }

    /// Appends a group that [`check`](Self::check) has passed.
    pub(super) fn push(&mut self, group: ParamGroup<P>) -> Result<()> {
        let slot = |of| Slot::new(of, &group.params, group.master_weights);
        let slots = group.trained().map(slot).collect::<Result<_>>()?;
        self.0.push(OptimizerGroup { params: group.params, slots });
        Ok(())
    }

    /// Refuses a group that cannot be one of these.
    pub(super) fn check(&self, group: &ParamGroup<P>) -> Result<()> {
        group.params.check()?;
        let mut seen: HashSet<TensorId> = self.slots().map(|slot| slot.of.var.id()).collect();
        for of in group.trained() {
            if !seen.insert(of.var.id()) {
                return Error::op(P::TYPE, format!("{} is in several groups; leave it in one", of.name));
            }
        }
        place(P::TYPE, self.slots().map(|slot| &slot.of).chain(group.trained())).map(drop)
    }

    /// Warns of a step without a gradient of any of these parameters.
    pub(super) fn warn_unused(&self, grads: &GradStore) {
        if let Some(first) = unused(self.slots().map(|slot| &slot.of), grads) {
            candle_dist::warn(format_args!(
                "a step of {} changes nothing: none of its parameters, such as {first:?}, has a gradient in this GradStore",
                P::TYPE
            ));
        }
    }

    pub(super) fn slots(&self) -> impl Iterator<Item = &Slot> + Clone {
        self.0.iter().flat_map(|group| &group.slots)
    }

    /// Returns the 32-bit copies by the names of their parameters.
    pub(super) fn master_weights(&self) -> Vec<(String, Var)> {
        let named = |slot: &Slot| Some((slot.of.name.clone(), slot.master.clone()?));
        self.slots().filter_map(named).collect()
    }

    /// Returns the mesh and device of the parameters; `None` without parameters.
    pub(super) fn place(&self) -> Result<Option<(&DeviceMesh, &Device)>> {
        place(P::TYPE, self.slots().map(|slot| &slot.of))
    }

    /// Returns the state and the options by name.
    ///
    /// # Errors
    /// If two parameters have the same name, so that one entry of a checkpoint would be loaded for both.
    pub(super) fn state(&self) -> Result<Vec<(String, DTensor)>> {
        let mut states = self.states()?.into_iter();
        let mut all = Vec::new();
        for OptimizerGroup { params, slots } in &self.0 {
            for (slot, state) in slots.iter().zip(states.by_ref()) {
                all.extend(state);
                all.push(slot.options(params)?);
            }
        }
        Ok(all)
    }

    /// Refuses two parameters with the same name.
    pub(super) fn check_names(&self) -> Result<()> {
        let Some(name) = self.slots().map(|slot| &slot.of.name).duplicates().next() else { return Ok(()) };
        let fix = "build them under paths of their own, or give each an optimizer";
        Error::op(
            P::TYPE,
            format!("two parameters are named {name}, so their states have the same names; {fix}"),
        )
    }

    /// Returns the [`state`](Self::state) of each slot without its options.
    fn states(&self) -> Result<Vec<Vec<(String, DTensor)>>> {
        self.check_names()?;
        self.0.iter().flat_map(|group| group.slots.iter().map(|slot| slot.state(&group.params))).collect()
    }

    /// Reads the options and the state.
    ///
    /// # Errors
    /// If a part of the state is missing, the options do not fit, or a checkpoint cannot be read.
    pub(super) fn read(&self, saved: &Weights) -> Result<OptimizerState<P>> {
        Ok(OptimizerState {
            values: read(saved, &self.states()?.concat())?,
            params: self.saved_params(saved)?,
        })
    }

    /// Loads what [`read`](Self::read) has read.
    pub(super) fn set(&mut self, OptimizerState { params, values }: OptimizerState<P>) -> Result<()> {
        let mut values = values.into_iter();
        for (group, params) in self.0.iter_mut().zip(params) {
            group.params = params;
            group.slots.iter_mut().try_for_each(|slot| slot.set(&group.params, &mut values))?;
        }
        Ok(())
    }

    /// Reads the state of the parameters that a checkpoint has.
    ///
    /// # Errors
    /// If a checkpoint has a part of the state of a parameter, or it cannot be read.
    pub(super) fn read_partial(&self, saved: &Weights) -> Result<PartialState> {
        let mut partial = PartialState::default();
        let mut wanted = Vec::new();
        for (slot, state) in self.slots().zip(self.states()?) {
            let (found, missing): (Vec<_>, Vec<_>) =
                state.iter().partition(|(name, _)| saved.contains_tensor(name));
            match (found.first(), missing.first()) {
                (Some((found, _)), Some((missing, _))) => {
                    let reason = format!("the checkpoint has {found} and no {missing}");
                    return Error::op(P::TYPE, format!("{reason}; was it saved with other options?"));
                }
                (None, Some(_)) => partial.lacking.push(slot.of.name.clone()),
                _ => {
                    partial.of.insert(slot.of.var.id());
                    wanted.extend(state);
                }
            }
        }
        partial.values = read(saved, &wanted)?;
        Ok(partial)
    }

    /// Loads what [`read_partial`](Self::read_partial) has read, and returns the names of the other parameters.
    pub(super) fn set_partial(
        &mut self,
        PartialState { of, values, lacking }: PartialState,
    ) -> Result<Vec<String>> {
        let mut values = values.into_iter();
        for OptimizerGroup { params, slots } in &mut self.0 {
            for slot in slots.iter_mut().filter(|slot| of.contains(&slot.of.var.id())) {
                slot.set(params, &mut values)?;
            }
        }
        Ok(lacking)
    }

    pub(super) fn learning_rates(&self) -> Vec<f64> {
        self.0.iter().map(|group| group.params.lr()).collect()
    }

    /// Sets the learning rates. `lrs` begins with one rate per group.
    pub(super) fn set_learning_rates(&mut self, lrs: &[f64]) {
        self.0.iter_mut().zip(lrs).for_each(|(group, &lr)| *group.params.lr_mut() = lr);
    }
}

/// Refuses learning rates that are invalid or not one per group.
pub(super) fn check_learning_rates(op: &'static str, lrs: &[f64], groups: usize) -> Result<()> {
    if lrs.len() != groups {
        return Error::op(op, format!("{} learning rates for {groups} groups: give one for each", lrs.len()));
    }
    lrs.iter().try_for_each(|&lr| check(op, "lr", lr, f64::INFINITY))
}

/// Reads the values of this state from a checkpoint.
pub(super) fn read(saved: &Weights, state: &[(String, DTensor)]) -> Result<Vec<DTensor>> {
    state.iter().map(|(name, tensor)| saved.read(name, tensor.spec(), tensor.device())).collect()
}
