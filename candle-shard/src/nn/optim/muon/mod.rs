//! Muon.
mod exchange;
mod orthogonal;
mod owners;
mod params;

pub use params::{AdjustLr, ParamsMuon};

use super::group::{Groups, ParamGroup, check_learning_rates};
use super::params::Params;
use super::slot::{Slot, place};
use super::{AdamW, Optimizer};
use crate::autograd::counts;
use crate::kernels::on_master;
use crate::nn::{Parameter, Parameters};
use crate::{DTensor, Error, Result, checkpoint};
use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use candle_dist::{DeviceMesh, sum_dtype};
use candle_nn::ParamsAdamW;
use exchange::{MatrixShard, gather, is_held_elsewhere, spread};
use itertools::Itertools;
use std::path::Path;

/// Muon (Jordan et al. 2024) for matrices, by PyTorch's rule: the momentum of each matrix is orthogonalized
/// approximately.
///
/// Each matrix, in any layout, is orthogonalized once per step, by one rank of the mesh. The owners are chosen so that
/// the work is balanced. A step makes two exchanges per group: one gathers the shards at the owners, one distributes
/// the results. The first is skipped if no matrix is sharded, and both on one rank. Replicas that average gradients
/// outside of the mesh, as [`DataParallel`](candle_dist::DataParallel) does, each do the same work.
///
/// Muon is for the matrices of hidden layers. All other parameters need an explicit [`AdamW`]; so should embeddings and
/// output layers.
/// State: `muon.momentum_buffer.NAME`, which is f32 for 16-bit parameters, `muon.options.NAME`, and the state of the AdamW.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_dist::World;
/// use candle_nn::ParamsAdamW;
/// use candle_shard::nn::{AdamW, Linear, Muon, ParamsMuon, MeshVarBuilder};
/// use candle_shard::parallel::{ColwiseParallel, Plan};
/// use candle_shard::{DTensor, Replicate, Result};
///
/// World::threads(2).run(|ctx| -> Result<()> {
///     let mesh = ctx.mesh(&[("tp", 2)])?;
///     let plan = Plan::new("tp").with("up", ColwiseParallel::default());
///     let vb = MeshVarBuilder::fresh(1, &mesh, plan, DType::F32, &Device::Cpu)?;
///     let layer = Linear::new(4, 6, true, &vb.pp("up"))?;
///     let parameters = vb.finish()?;
///     assert!(Muon::new(&parameters, ParamsMuon::default()).is_err()); // a bias is no matrix
///
///     let (matrices, others) = parameters.partition(|parameter| parameter.tensor.rank() == 2);
///     let mut optimizer = Muon::new(&matrices, ParamsMuon { lr: 0.02, ..Default::default() })?
///         .with_adam_w(AdamW::new(&others, ParamsAdamW { lr: 3e-4, ..Default::default() })?)?;
///     assert_eq!(optimizer.learning_rates(), [0.02, 3e-4]);
///     let x = DTensor::distribute(&Tensor::ones((1, 4), DType::F32, &Device::Cpu)?, &mesh, &[Replicate])?;
///     optimizer.step(&parameters.backward(&layer.forward(&x)?.sum_all()?)?)?;
///     Ok(())
/// })?;
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
#[derive(Debug)]
pub struct Muon {
    groups: Groups<ParamsMuon>,
    /// The rank of the mesh that orthogonalizes each matrix, by group and slot.
    owners: Vec<Vec<usize>>,
    others: Option<AdamW>,
}

impl Muon {
    /// Creates an optimizer of one group.
    ///
    /// # Errors
    /// Those of [`from_groups`](Self::from_groups).
    pub fn new(parameters: &Parameters, params: ParamsMuon) -> Result<Self> {
        Self::from_groups([ParamGroup::new(parameters, params)])
    }

    /// Like [`new`](Self::new) with [master weights](ParamGroup::with_master_weights).
    pub fn with_master_weights(parameters: &Parameters, params: ParamsMuon) -> Result<Self> {
        Self::from_groups([ParamGroup::new(parameters, params).with_master_weights()])
    }

    /// Creates an optimizer of these groups.
    ///
    /// # Errors
    /// If a trained parameter is not a matrix, an option is out of range, a parameter is in several groups, or
    /// parameters lie on several meshes.
    pub fn from_groups(groups: impl IntoIterator<Item = ParamGroup<ParamsMuon>>) -> Result<Self> {
        let mut made = Self { groups: Groups::new([])?, owners: Vec::new(), others: None };
        for group in groups {
            made.check(&group)?;
            made.groups.push(group)?;
        }
        made.balance()?;
        Ok(made)
    }

    /// Adds a group of matrices before those of the AdamW, such as one of parameters that were frozen before: PyTorch's
    /// `add_param_group`. The others keep their state. Every rank calls it.
    ///
    /// # Errors
    /// Those of [`from_groups`](Self::from_groups) and of [`AdamW::add_group`]. The error is the same on every rank, and nothing has
    /// changed.
    pub fn add_group(&mut self, group: ParamGroup<ParamsMuon>) -> Result<()> {
        group.check_added(self.mesh()?, true, self.check(&group))?;
        self.groups.push(group)?;
        self.balance()
    }

    /// Adds a group to the AdamW, or the first of one. Every rank calls it.
    ///
    /// # Errors
    /// Those of [`AdamW::add_group`] and [`with_adam_w`](Self::with_adam_w). The error is the same on every rank, and nothing has
    /// changed.
    pub fn add_adam_w_group(&mut self, group: ParamGroup<ParamsAdamW>) -> Result<()> {
        let is_apart = Self::check_apart(group.trained(), self.groups.slots());
        let none = AdamW::from_groups([])?;
        let groups = &self.others.as_ref().unwrap_or(&none).groups;
        group.check_added(self.mesh()?, false, is_apart.and_then(|()| groups.check(&group)))?;
        self.others.get_or_insert(none).groups.push(group)
    }

    /// Refuses two parameters with the same name.
    fn check_names(&self) -> Result<()> {
        self.groups.check_names()?;
        self.others.as_ref().map_or(Ok(()), |others| others.groups.check_names())
    }

    /// Returns the mesh of the parameters of both optimizers.
    fn mesh(&self) -> Result<Option<&DeviceMesh>> {
        let of_others = self.others.as_ref().map_or(Ok(None), |others| others.groups.place())?;
        Ok(self.groups.place()?.or(of_others).map(|(mesh, _)| mesh))
    }

    /// Refuses a group that cannot be one of Muon's.
    fn check(&self, group: &ParamGroup<ParamsMuon>) -> Result<()> {
        let others = group.trained().filter(|of| of.tensor.rank() != 2);
        let others = others.map(|of| format!("{} {:?}", of.name, of.tensor.dims())).join(", ");
        if !others.is_empty() {
            return Error::op(
                ParamsMuon::TYPE,
                format!(
                    "{others}: these are not matrices; partition the parameters and give them to with_adam_w"
                ),
            );
        }
        if let Some(adam_w) = &self.others {
            Self::check_apart(group.trained(), adam_w.groups.slots())?;
        }
        self.groups.check(group)
    }

    /// Assigns the matrices to the ranks that orthogonalize them.
    fn balance(&mut self) -> Result<()> {
        let ranks = self.groups.place()?.map_or(1, |(mesh, _)| mesh.size());
        let costs = self.groups.0.iter().flat_map(|group| {
            group.slots.iter().map(|slot| owners::cost(slot.of.tensor.dims(), group.params.ns_steps))
        });
        let mut chosen = owners::balanced(&costs.collect_vec(), ranks).into_iter();
        self.owners =
            self.groups.0.iter().map(|group| chosen.by_ref().take(group.slots.len()).collect()).collect();
        Ok(())
    }

    /// Refuses parameters that are among the `slots` of the other optimizer, or on another mesh.
    fn check_apart<'a>(
        parameters: impl Iterator<Item = &'a Parameter> + Clone,
        slots: impl Iterator<Item = &'a Slot> + Clone,
    ) -> Result<()> {
        place(ParamsMuon::TYPE, slots.clone().map(|slot| &slot.of).chain(parameters.clone()))?;
        let mut both = parameters.filter(|of| slots.clone().any(|slot| slot.of.var.id() == of.var.id()));
        both.next().map_or(Ok(()), |of| {
            let reason = format!("{} is in a group of Muon and of its AdamW; leave it in one", of.name);
            Error::op(ParamsMuon::TYPE, reason)
        })
    }

    /// Adds an AdamW for the parameters that are not matrices. Its groups come after Muon's.
    ///
    /// # Errors
    /// If there is one already, the two have a parameter in common, or their parameters lie on several meshes.
    pub fn with_adam_w(mut self, others: AdamW) -> Result<Self> {
        if self.others.is_some() {
            return Error::op(
                ParamsMuon::TYPE,
                "it has an AdamW already; give it one AdamW of several groups",
            );
        }
        Self::check_apart(others.groups.slots().map(|slot| &slot.of), self.groups.slots())?;
        self.others = Some(others);
        Ok(self)
    }

    /// See [`Optimizer::step`]. Every rank of the mesh calls it, with gradients of the same parameters.
    ///
    /// # Errors
    /// On every rank, if the ranks do not have gradients of the same parameters.
    pub fn step(&mut self, grads: &GradStore) -> Result<()> {
        counts::parameters_change();
        self.groups.warn_unused(grads);
        if let Some((mesh, device)) = self.groups.place()? {
            for (group, owners) in self.groups.0.iter().zip(&self.owners) {
                let nothing = Tensor::zeros(0, group.params.dtype, device)?;
                step(&group.params, (mesh, &nothing), group.slots.iter().zip(owners.iter().copied()), grads)?;
            }
        }
        self.others.as_mut().map_or(Ok(()), |others| others.step(grads))
    }

    /// See [`Optimizer::backward_step`].
    pub fn backward_step(&mut self, loss: &DTensor) -> Result<()> {
        Optimizer::backward_step(self, loss)
    }

    /// See [`Optimizer::parameters`].
    pub fn parameters(&self) -> Parameters {
        let others = self.others.iter().flat_map(|others| others.groups.slots());
        Parameters::new(self.groups.slots().chain(others).map(|slot| slot.of.clone()).collect())
    }

    /// See [`Optimizer::master_weights`].
    pub fn master_weights(&self) -> Vec<(String, Var)> {
        let others = self.others.iter().flat_map(AdamW::master_weights);
        self.groups.master_weights().into_iter().chain(others).collect()
    }

    /// See [`Optimizer::state`].
    pub fn state(&self) -> Result<Vec<(String, DTensor)>> {
        let others = self.others.as_ref().map(AdamW::state).transpose()?;
        Ok([self.groups.state()?, others.unwrap_or_default()].concat())
    }

    /// See [`Optimizer::load`].
    pub fn load(&mut self, path: impl AsRef<Path>) -> Result<()> {
        self.check_names()?;
        let Some(mesh) = self.mesh()? else { return Ok(()) };
        let (mine, of_others) = checkpoint::read_with(path.as_ref(), mesh, |saved| {
            let of_others = self.others.as_ref().map(|others| others.groups.read(saved));
            Ok((self.groups.read(saved)?, of_others.transpose()?))
        })?;
        self.groups.set(mine)?;
        self.balance()?;
        self.others.as_mut().zip(of_others).map_or(Ok(()), |(others, saved)| others.groups.set(saved))
    }

    /// See [`Optimizer::load_partial`].
    pub fn load_partial(&mut self, path: impl AsRef<Path>) -> Result<Vec<String>> {
        self.check_names()?;
        let Some(mesh) = self.mesh()? else { return Ok(Vec::new()) };
        let (mine, of_others) = checkpoint::read_with(path.as_ref(), mesh, |saved| {
            let of_others = self.others.as_ref().map(|others| others.groups.read_partial(saved));
            Ok((self.groups.read_partial(saved)?, of_others.transpose()?))
        })?;
        let mut lacking = self.groups.set_partial(mine)?;
        if let Some((others, partial)) = self.others.as_mut().zip(of_others) {
            lacking.extend(others.groups.set_partial(partial)?);
        }
        Ok(lacking)
    }

    /// See [`Optimizer::learning_rates`].
    pub fn learning_rates(&self) -> Vec<f64> {
        let others = self.others.as_ref().map(AdamW::learning_rates);
        [self.groups.learning_rates(), others.unwrap_or_default()].concat()
    }

    /// See [`Optimizer::set_learning_rates`].
    pub fn set_learning_rates(&mut self, lrs: &[f64]) -> Result<()> {
        check_learning_rates(ParamsMuon::TYPE, lrs, self.learning_rates().len())?;
        self.groups.set_learning_rates(lrs);
        self.others.as_mut().map_or(Ok(()), |others| others.set_learning_rates(&lrs[self.groups.0.len()..]))
    }

    /// See [`Optimizer::set_learning_rate`].
    pub fn set_learning_rate(&mut self, lr: f64) -> Result<()> {
        Optimizer::set_learning_rate(self, lr)
    }
}

optimizer_by_methods!([] Muon);

/// Runs the step of one group, whose slots come with their owners. `nothing` is a tensor of its dtype without elements.
fn step<'a>(
    params: &ParamsMuon,
    (mesh, nothing): (&DeviceMesh, &Tensor),
    slots: impl Iterator<Item = (&'a Slot, usize)>,
    grads: &GradStore,
) -> Result<()> {
    let (mut stepped, mut matrices) = (Vec::new(), Vec::new());
    // Known without the gradients: if one rank alone has none, all ranks get an error.
    let mut is_spread = false;
    for (slot, owner) in slots {
        is_spread = is_spread || is_held_elsewhere(mesh, slot.of.tensor.spec(), owner);
        let Some(grad) = grads.get(&slot.of.var).filter(|_| slot.of.tensor.elem_count() > 0) else {
            continue;
        };
        let local = momentum(params, slot, grad)?.to_dtype(params.dtype)?;
        matrices.push(MatrixShard { spec: slot.of.tensor.spec(), owner, local });
        stepped.push(slot);
    }
    let mut wholes = gather(mesh, nothing, &matrices)?;
    for whole in wholes.iter_mut().flatten() {
        *whole = orthogonal::orthogonalize(whole, params)?;
    }
    for (slot, update) in
        stepped.into_iter().zip(spread(mesh, is_spread.then_some(nothing), &matrices, &wholes)?)
    {
        let lr = params.adjusted_lr(slot.of.tensor.dims());
        let keep = 1.0 - params.lr * params.weight_decay;
        let update = update.to_dtype(sum_dtype(slot.of.var.dtype()))?;
        on_master(ParamsMuon::TYPE, (&slot.of.var, slot.master.as_ref()), &update, |var, update| {
            let now = var.as_detached_tensor().to_dtype(update.dtype())?;
            var.set(&((now * keep)? - (update * lr)?)?.to_dtype(var.dtype())?)
        })?;
    }
    Ok(())
}

/// Adds a gradient to the buffer of a slot, and returns the matrix to orthogonalize.
fn momentum(params: &ParamsMuon, slot: &Slot, grad: &Tensor) -> Result<Tensor> {
    let [buffer] = &slot.states[..] else {
        return Error::op(
            ParamsMuon::TYPE,
            format!("{} has {} states, not 1", slot.of.name, slot.states.len()),
        );
    };
    if grad.shape() != slot.of.var.shape() {
        let (got, want) = (grad.dims(), slot.of.var.dims());
        return Error::op(
            ParamsMuon::TYPE,
            format!("a gradient {got:?} of {}: expected {want:?}", slot.of.name),
        );
    }
    let grad = grad.detach().to_dtype(buffer.dtype())?;
    if grad.elem_count() == 0 {
        return Ok(grad);
    }
    let towards = |from: &Tensor, to: &Tensor, part: f64| (from * (1.0 - part))? + (to * part)?;
    let next = towards(&buffer.as_detached_tensor(), &grad, 1.0 - params.momentum)?;
    Var::set(buffer, &next)?;
    Ok(if params.nesterov { towards(&grad, &next, params.momentum)? } else { next })
}
