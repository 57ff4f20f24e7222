//! The parameters that a model holds on this rank.
use crate::autograd::{counts, shared};
use crate::fsdp;
use crate::layout::{Replicate, RowsOf, Spec};
use crate::{DTensor, Error, Result, checkpoint};
use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use candle_dist::{ClipGradNorm, Collective, DeviceMesh, GradMark, ReduceOp, empty, sum_dtype};
use itertools::Itertools;
use std::collections::HashMap;
use std::path::Path;

/// One parameter: its name, its distributed tensor, and the variable that is this rank's shard of it.
#[derive(Debug, Clone)]
pub struct Parameter {
    /// The full path, such as `layers.0.attention.wq.weight`.
    pub name: String,
    /// The parameter as it is stored: as the layers use it, or the shard of it that a [fully sharded](crate::fsdp) unit
    /// keeps.
    pub tensor: DTensor,
    /// This rank's shard, for an optimizer.
    pub var: Var,
    /// The tensor in files that it is a part of, if files do not contain it by its name.
    pub(crate) within: Option<RowsOf>,
    /// Set where a `GradStore` has the sum of the gradient over the ranks that use the parameter differently.
    pub(crate) is_summed: GradMark,
}

impl Parameter {
    /// Returns whether it gets no gradient; see [`MeshVarBuilder::frozen`](crate::nn::MeshVarBuilder::frozen).
    pub fn is_frozen(&self) -> bool {
        !self.tensor.tracked()
    }

    /// Returns this parameter's gradient, in the parameter's layout; `None` if it has none.
    ///
    /// Gradients of 16-bit parameters that were summed over ranks, units or recomputed segments are f32.
    /// Gradients of varying parameters are complete only after [`Parameters::reduce`].
    pub fn grad(&self, grads: &GradStore) -> Result<Option<DTensor>> {
        let local = |grad: &Tensor| {
            let spec = self.tensor.spec().clone().with_dtype(grad.dtype());
            DTensor::from_local_with_spec(grad.clone(), spec)
        };
        grads.get(&self.var).map(local).transpose()
    }
}

/// The parameters of a model in the order in which they were built, the same on every rank.
#[derive(Debug, Clone, Default)]
pub struct Parameters(Vec<Parameter>);

impl Parameters {
    pub(crate) fn new(parameters: Vec<Parameter>) -> Self {
        Self(parameters)
    }

    /// Creates parameters of variables that every rank of `mesh` holds whole: those of a model of candle's layers, or of the stages
    /// of a pipeline over a `VarBuilder`. Optimizers, checkpoints and clipping take them like others.
    ///
    /// They are in the order of their names. Gradients are used as they are; average those of replicas before.
    ///
    /// `Runtime::parameters` of candle-pipe makes those of the stages of this rank, on a mesh of this rank alone. Two methods then see
    /// these stages alone:
    ///
    /// | for | instead of | use |
    /// |---|---|---|
    /// | the norm of all stages | [`clip`](Self::clip) | `runtime.clip_grad_norm(parameters.clip_grad_norm(1.0)?)` of candle-pipe, whose documentation has an example |
    /// | a checkpoint of all stages | [`checkpoint::save`] | [`checkpoint::save_stages`] |
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_dist::World;
    /// use candle_nn::{Module, ParamsAdamW, VarBuilder, VarMap};
    /// use candle_shard::Result;
    /// use candle_shard::nn::{AdamW, Parameters};
    ///
    /// World::threads(1).run(|ctx| -> Result<()> {
    ///     let varmap = VarMap::new();
    ///     let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    ///     let layer = candle_nn::linear(4, 2, vb)?;
    ///     let parameters = Parameters::replicated(&ctx.mesh(&[("dp", 1)])?, &candle_dist::named_vars(&varmap))?;
    ///     let mut optimizer = AdamW::new(&parameters, ParamsAdamW::default())?;
    ///     let x = candle_core::Tensor::ones((3, 4), DType::F32, &Device::Cpu)?;
    ///     optimizer.step(&layer.forward(&x)?.sqr()?.mean_all()?.backward()?)?;
    ///     assert_eq!(optimizer.state()?.len(), 8); // two moments, the number of steps and the options of each variable
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    ///
    /// # Errors
    /// If two variables have one name, a variable has two, or one cannot be a tensor of the mesh.
    pub fn replicated<N: AsRef<str>>(mesh: &DeviceMesh, named: &[(N, Var)]) -> Result<Self> {
        let parameter = |(name, var): &(N, Var)| {
            let name = name.as_ref().to_string();
            let spec = Spec::new(mesh, &vec![Replicate; mesh.ndim()], var.shape(), var.dtype())?;
            let tensor = DTensor::leaf(var.as_tensor().clone(), spec.shared()).named(&name);
            Ok(Parameter { name, tensor, var: var.clone(), within: None, is_summed: GradMark::new()? })
        };
        let mut parameters = named.iter().map(parameter).collect::<Result<Vec<_>>>()?;
        // The order of a map of variables differs between processes, and a norm is rounded as it is summed.
        parameters.sort_by(|a, b| a.name.cmp(&b.name));
        if let Some(twice) = parameters.iter().map(|p| &p.name).duplicates().next() {
            return Error::op("Parameters::replicated", format!("two variables are named {twice:?}"));
        }
        let mut names = HashMap::new();
        for p in &parameters {
            if let Some(other) = names.insert(p.var.id(), &p.name) {
                let reason = format!("{other:?} and {:?} are one variable; give it one name", p.name);
                return Error::op("Parameters::replicated", reason);
            }
        }
        Ok(Self(parameters))
    }

    /// Returns the parameters.
    pub fn iter(&self) -> impl Iterator<Item = &Parameter> + Clone {
        self.0.iter()
    }

    /// Returns the number of parameters.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether there are no parameters.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// This rank's variables, for an optimizer.
    ///
    /// Empty shards and frozen parameters are left out: candle's optimizers refuse the former and would keep state for
    /// the latter.
    pub fn vars(&self) -> Vec<Var> {
        self.iter().filter(|p| p.var.elem_count() > 0 && !p.is_frozen()).map(|p| p.var.clone()).collect()
    }

    /// This rank's variables by name, including empty shards, for [`DataParallel`](candle_dist::DataParallel).
    ///
    /// To combine data and tensor parallelism, build the model on the tensor-parallel axis of the mesh,
    /// `mesh.axis("tp")`, give each rank its part of the batch, and average over the other axis:
    /// `DataParallel::new(mesh.axis_group("dp")?, &parameters.named_vars(), ..)`, after [`backward`](Self::backward)
    /// or [`reduce`](Self::reduce). Dropout masks depend on the seed: give every data-parallel rank its own.
    /// `DataParallel` makes the parameters equal at its start.
    pub fn named_vars(&self) -> Vec<(String, Var)> {
        self.iter().map(|p| (p.name.clone(), p.var.clone())).collect()
    }

    /// Returns the parameters by name, for [`checkpoint::save`].
    pub fn named_tensors(&self) -> Vec<(String, DTensor)> {
        self.iter().map(|p| (p.name.clone(), p.tensor.clone())).collect()
    }

    /// Loads every parameter from a checkpoint, or from other [`Weights`](crate::Weights), that was saved on any mesh.
    /// Every rank calls it.
    ///
    /// # Errors
    /// If a parameter is missing, has another shape or cannot be read. The error is the same on every rank, and no
    /// parameter has changed.
    pub fn load(&self, path: impl AsRef<Path>) -> Result<()> {
        let Some(first) = self.0.first() else { return Ok(()) };
        counts::parameters_change();
        let wanted = self.iter().map(|p| (p.name.as_str(), p.within.as_ref(), p.tensor.spec()));
        let read = checkpoint::read(path.as_ref(), first.tensor.mesh(), wanted, first.tensor.device())?;
        self.iter().zip(read).try_for_each(|(p, value)| checkpoint::set(&p.var, &value))
    }

    /// Returns a clipper of the complete gradients of [`named_vars`](Self::named_vars) by their norm on the whole mesh.
    ///
    /// It costs one small all_reduce for each axis that shards a parameter. Frozen parameters may be left out of the list.
    pub fn clip_grad_norm(&self, max_norm: f64) -> Result<ClipGradNorm> {
        let mut clip = ClipGradNorm::new(max_norm);
        let Some(first) = self.0.first() else { return Ok(clip) };
        let mesh = first.tensor.mesh();
        for axis in (0..mesh.ndim()).filter(|&axis| mesh.shape()[axis] > 1) {
            let trained = self.iter().filter(|p| !p.is_frozen());
            let sharded = trained.filter(|p| p.tensor.placements()[axis].shard_dim().is_some());
            let names: Vec<&str> = sharded.map(|p| p.name.as_str()).collect();
            if !names.is_empty() {
                clip = clip.sharded(mesh.axis_group(axis)?, names);
            }
        }
        Ok(clip)
    }

    /// Limits the norm of the complete gradients on the whole mesh to `max_norm`, and returns the norm before that:
    /// PyTorch's `clip_grad_norm_`.
    ///
    /// Options, and the axes of replicas and pipelines, are those of [`clip_grad_norm`](Self::clip_grad_norm).
    ///
    /// # Errors
    /// If a gradient has to be [reduced](Self::reduce) first; and those of [`ClipGradNorm::clip`].
    pub fn clip(&self, grads: &mut GradStore, max_norm: f64) -> Result<f64> {
        self.check_frozen("Parameters::clip", grads)?;
        let is_partial =
            |p: &&Parameter| Self::varies(p) && grads.get(&p.var).is_some() && !p.is_summed.is_set(grads);
        if let Some(p) = self.iter().filter(is_partial).min_by_key(|p| &p.name) {
            let reason = "is a part of a sum over ranks; call reduce before, or take the gradients of Parameters::backward";
            return Error::op("Parameters::clip", format!("the gradient of {} {reason}", p.name));
        }
        Ok(self.clip_grad_norm(max_norm)?.clip(&self.named_vars(), grads)?)
    }

    /// Refuses gradients of frozen parameters: how they are summed is not known here.
    fn check_frozen(&self, op: &'static str, grads: &GradStore) -> Result<()> {
        let is_unfrozen = |p: &&Parameter| p.is_frozen() && grads.get(&p.var).is_some();
        let Some(p) = self.iter().filter(is_unfrozen).min_by_key(|p| &p.name) else { return Ok(()) };
        let reason = "has a gradient, and was frozen when these parameters were taken; take them of the builder again (finish, built)";
        Error::op(op, format!("{} {reason}", p.name))
    }

    /// Returns whether the gradient of a parameter is a part of a sum over ranks until it is [reduced](Self::reduce).
    fn varies(p: &Parameter) -> bool {
        let sizes = p.tensor.mesh().shape();
        (0..sizes.len()).any(|axis| sizes[axis] > 1 && Self::varies_on(p, axis))
    }

    fn varies_on(p: &Parameter, axis: usize) -> bool {
        !p.is_frozen() && p.tensor.is_varying(axis)
    }

    /// Returns the number of elements that this rank holds.
    pub fn local_elem_count(&self) -> usize {
        self.iter().map(|p| p.var.elem_count()).sum()
    }

    /// Returns the number of elements of the whole model.
    pub fn elem_count(&self) -> usize {
        self.iter().map(|p| p.tensor.elem_count()).sum()
    }

    /// Returns the complete gradients of `loss`: runs the backward pass and [`reduce`](Self::reduce).
    ///
    /// If none of these parameters has a gradient, as those of another model, that is a warning.
    ///
    /// # Errors
    /// Those of [`DTensor::backward`] and of [`reduce`](Self::reduce).
    pub fn backward(&self, loss: &DTensor) -> Result<GradStore> {
        let mut grads = loss.backward()?;
        self.reduce(&mut grads)?;
        if !fsdp::keeps_grads()
            && let Some(first) = unused(self.iter(), &grads)
        {
            candle_dist::warn(format_args!(
                "Parameters::backward: the loss depends on none of these parameters, such as {first:?}; take those of the model \
                 that computed it"
            ));
        }
        Ok(grads)
    }

    /// Sums the gradients of varying parameters, all of an axis in one all_reduce, in which they are listed by name.
    ///
    /// A parameter without a gradient on any rank keeps none, as on one device. The all_reduce carries one number per
    /// parameter that says whether there was a gradient. Sums of 16-bit gradients are f32.
    ///
    /// # Errors
    /// If `grads` has sums already: those of an earlier call or of [`backward`](Self::backward), also if they were
    /// clipped, averaged or accumulated since. A second sum would be a multiple of the gradient. If a parameter has a gradient that
    /// was frozen when these parameters were taken from their builder.
    pub fn reduce(&self, grads: &mut GradStore) -> Result<()> {
        let Some(first) = self.0.first() else { return Ok(()) };
        self.check_frozen("Parameters::reduce", grads)?;
        let mesh = first.tensor.mesh().clone();
        let is_whole = |p: &&Parameter| Self::varies(p) && p.is_summed.is_set(grads);
        if let Some(p) = self.iter().filter(is_whole).min_by_key(|p| &p.name) {
            let reason = "is summed over ranks already; call reduce once for each GradStore, and only for gradients of \
                          DTensor::backward or of a pipeline: Parameters::backward has called it";
            return Error::op("Parameters::reduce", format!("the gradient of {} {reason}", p.name));
        }
        for axis in (0..mesh.ndim()).filter(|&axis| mesh.shape()[axis] > 1) {
            let mut varying: Vec<&Parameter> = self.iter().filter(|p| Self::varies_on(p, axis)).collect();
            // By name: ranks may have built them in unlike orders.
            varying.sort_by_key(|p| &p.name);
            if varying.is_empty() {
                continue;
            }
            // A parameter without gradient keeps its place in the list, so that the lists are alike on all ranks.
            let grad = |p: &&Parameter| {
                let dtype = sum_dtype(p.var.dtype());
                match grads.get(&p.var) {
                    Some(grad) => empty::compute(grad, |grad| grad.to_dtype(dtype)),
                    None => Tensor::zeros(p.var.shape(), dtype, p.var.device()),
                }
            };
            let mut partial = varying.iter().map(grad).collect::<candle_core::Result<Vec<_>>>()?;
            let present = varying.iter().map(|p| f32::from(u8::from(grads.get(&p.var).is_some())));
            partial.push(Tensor::from_iter(present, first.var.device())?);
            let names = varying.iter().map(|p| p.name.as_str());
            let group =
                mesh.axis_group(axis)?.with_description(format!("gradients of {}", shared::listed(names)));
            let mut sums = group.call(Collective::AllReduce(ReduceOp::Sum)).run_all(&partial)?;
            let present =
                sums.pop().map(|present| Ok::<_, Error>(group.to_host(&present)?.to_vec1::<f32>()?));
            let present = present.transpose()?.unwrap_or_default();
            for ((p, sum), _) in varying.iter().zip(sums).zip(present).filter(|(_, present)| *present > 0.0) {
                grads.insert(&p.var, sum);
                p.is_summed.set(grads);
            }
        }
        Ok(())
    }
}

/// Returns the name of the first trained parameter with elements on this rank, if none of them has a gradient.
pub(crate) fn unused<'a>(
    parameters: impl Iterator<Item = &'a Parameter>,
    grads: &GradStore,
) -> Option<&'a str> {
    let mut trained = parameters.filter(|p| !p.is_frozen() && p.var.elem_count() > 0).peekable();
    let first = *trained.peek()?;
    trained.all(|p| grads.get(&p.var).is_none()).then_some(first.name.as_str())
}
