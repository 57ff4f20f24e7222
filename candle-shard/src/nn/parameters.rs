//! The parameters that a model holds on this rank.
use crate::nn::found;
use crate::nn::part::Within;
use crate::{DTensor, Result, checkpoint};
use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use candle_dist::ClipGradNorm;
use std::path::Path;

/// One parameter: its name, its distributed tensor, and the variable that is this rank's shard of it.
#[derive(Debug, Clone)]
pub struct Parameter {
    /// The full path, such as `layers.0.attention.wq.weight`.
    pub name: String,
    /// The parameter as it is held: as the layers use it, or the piece of it that a [fully sharded](crate::fsdp) unit keeps.
    pub tensor: DTensor,
    /// This rank's shard, for an optimiser.
    pub var: Var,
    /// The tensor of files that it is a part of, where files do not have it by its name.
    pub(crate) within: Option<Within>,
}

impl Parameter {
    /// This parameter's gradient, laid out like the parameter; `None` if it took no part.
    ///
    /// Gradients of varying parameters are meaningful after [`Parameters::reduce`].
    pub fn grad(&self, grads: &GradStore) -> Result<Option<DTensor>> {
        let local = |grad: &Tensor| DTensor::from_local_with_spec(grad.clone(), self.tensor.spec().clone());
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

    /// The parameters.
    pub fn iter(&self) -> impl Iterator<Item = &Parameter> {
        self.0.iter()
    }

    /// The number of parameters.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// This rank's variables, for an optimiser.
    ///
    /// Empty shards are left out: there is nothing to optimise, and candle's optimisers refuse them.
    pub fn vars(&self) -> Vec<Var> {
        self.iter().filter(|p| p.var.elem_count() > 0).map(|p| p.var.clone()).collect()
    }

    /// This rank's variables by name, empty shards among them, for a [`DataParallel`](candle_dist::DataParallel).
    ///
    /// To train data-parallel beside tensor-parallel, build the model on the tensor-parallel axis of the mesh,
    /// `mesh.axis("tp")`, give each rank its part of the batch, and average over the other axis:
    /// `DataParallel::new(mesh.axis_group("dp")?, &parameters.named_vars(), ..)`, after [`backward`](Self::backward)
    /// or [`reduce`](Self::reduce). Masks of dropout follow the seed; give every data-parallel rank its own, the
    /// start of `DataParallel` makes the parameters alike.
    pub fn named_vars(&self) -> Vec<(String, Var)> {
        self.iter().map(|p| (p.name.clone(), p.var.clone())).collect()
    }

    /// The parameters by name, for [`checkpoint::save`].
    pub fn named_tensors(&self) -> Vec<(String, DTensor)> {
        self.iter().map(|p| (p.name.clone(), p.tensor.clone())).collect()
    }

    /// Gives every parameter its value of a checkpoint, or of other [`Weights`](crate::Weights), on whatever mesh they
    /// were saved. Every rank calls it.
    ///
    /// # Errors
    /// On every rank alike, without a change to any parameter, if one of them is not there, has another shape or cannot
    /// be read.
    pub fn load(&self, path: impl AsRef<Path>) -> Result<()> {
        let Some(first) = self.0.first() else { return Ok(()) };
        found::parameters_change();
        let wanted = self.iter().map(|p| (p.name.as_str(), p.within.as_ref(), p.tensor.spec()));
        let read = checkpoint::read(path.as_ref(), first.tensor.mesh(), wanted, first.tensor.device())?;
        self.iter().zip(read).try_for_each(|(p, value)| checkpoint::set(&p.var, &value))
    }

    /// Clipping of the complete gradients of [`named_vars`](Self::named_vars) by their norm on the whole mesh.
    ///
    /// One small all_reduce for each axis that shards a parameter.
    pub fn clip_grad_norm(&self, max_norm: f64) -> Result<ClipGradNorm> {
        let mut clip = ClipGradNorm::new(max_norm);
        let Some(first) = self.0.first() else { return Ok(clip) };
        let mesh = first.tensor.mesh();
        for axis in (0..mesh.ndim()).filter(|&axis| mesh.shape()[axis] > 1) {
            let sharded = self.iter().filter(|p| p.tensor.placements()[axis].shard_dim().is_some());
            let names: Vec<&str> = sharded.map(|p| p.name.as_str()).collect();
            if !names.is_empty() {
                clip = clip.sharded(mesh.axis_group(axis)?, names);
            }
        }
        Ok(clip)
    }

    /// The number of elements that this rank holds.
    pub fn local_elem_count(&self) -> usize {
        self.iter().map(|p| p.var.elem_count()).sum()
    }

    /// The number of elements of the whole model.
    pub fn elem_count(&self) -> usize {
        self.iter().map(|p| p.tensor.elem_count()).sum()
    }

    /// The gradients of `loss`, complete: the backward pass and [`reduce`](Self::reduce).
    pub fn backward(&self, loss: &DTensor) -> Result<GradStore> {
        let mut grads = loss.backward()?;
        self.reduce(&mut grads)?;
        Ok(grads)
    }

    /// Adds up the gradients of varying parameters, all of an axis in one all_reduce.
    pub fn reduce(&self, grads: &mut GradStore) -> Result<()> {
        let Some(first) = self.0.first() else { return Ok(()) };
        let mesh = first.tensor.mesh().clone();
        for axis in (0..mesh.ndim()).filter(|&axis| mesh.shape()[axis] > 1) {
            let varying: Vec<&Parameter> = self.iter().filter(|p| p.tensor.is_varying(axis)).collect();
            // A parameter without gradient still takes its place, so that the lists are alike on all ranks.
            let grad = |p: &&Parameter| grads.get(&p.var).cloned().map_or_else(|| p.var.zeros_like(), Ok);
            let partial = varying.iter().map(grad).collect::<candle_core::Result<Vec<_>>>()?;
            let sums = mesh.axis_group(axis)?.all_reduce_coalesced(&partial, candle_dist::ReduceOp::Sum)?;
            for (p, sum) in varying.iter().zip(sums) {
                grads.insert(&p.var, sum);
            }
        }
        Ok(())
    }
}
