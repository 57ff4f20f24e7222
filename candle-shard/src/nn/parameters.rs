//! The parameters that a model holds on this rank.
use crate::nn::found;
use crate::nn::part::Within;
use crate::{DTensor, Result, checkpoint};
use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use candle_dist::{ClipGradNorm, ReduceOp, sum_dtype};
use std::path::Path;

/// One parameter: its name, its distributed tensor, and the variable that is this rank's shard of it.
#[derive(Debug, Clone)]
pub struct Parameter {
    /// The full path, such as `layers.0.attention.wq.weight`.
    pub name: String,
    /// The parameter as it is held: as the layers use it, or the piece of it that a [fully sharded](crate::fsdp) unit keeps.
    pub tensor: DTensor,
    /// This rank's shard, for an optimizer.
    pub var: Var,
    /// The tensor of files that it is a part of, where files do not have it by its name.
    pub(crate) within: Option<Within>,
}

impl Parameter {
    /// Whether it gets no gradient; see [`ShardedVarBuilder::frozen`](crate::nn::ShardedVarBuilder::frozen).
    pub fn is_frozen(&self) -> bool {
        !self.tensor.tracked()
    }

    /// This parameter's gradient, laid out like the parameter; `None` if it took no part.
    ///
    /// Gradients of 16-bit parameters that were summed over ranks, units or recomputed segments are f32.
    /// Gradients of varying parameters are meaningful after [`Parameters::reduce`].
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

    /// This rank's variables, for an optimizer.
    ///
    /// Empty shards and frozen parameters are left out: there is nothing to optimize, candle's optimizers refuse the first and
    /// would keep state for the second.
    pub fn vars(&self) -> Vec<Var> {
        self.iter().filter(|p| p.var.elem_count() > 0 && !p.is_frozen()).map(|p| p.var.clone()).collect()
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
    ///
    /// A parameter that took part on no rank keeps no gradient, as on one device. The all_reduce carries one number for each
    /// parameter that says whether there was a gradient. Sums of 16-bit gradients are f32.
    pub fn reduce(&self, grads: &mut GradStore) -> Result<()> {
        let Some(first) = self.0.first() else { return Ok(()) };
        let mesh = first.tensor.mesh().clone();
        for axis in (0..mesh.ndim()).filter(|&axis| mesh.shape()[axis] > 1) {
            let varying: Vec<&Parameter> = self.iter().filter(|p| p.tensor.is_varying(axis)).collect();
            if varying.is_empty() {
                continue;
            }
            // A parameter without gradient still takes its place, so that the lists are alike on all ranks.
            let grad = |p: &&Parameter| {
                let dtype = sum_dtype(p.var.dtype());
                match grads.get(&p.var) {
                    Some(grad) => grad.to_dtype(dtype),
                    None => Tensor::zeros(p.var.shape(), dtype, p.var.device()),
                }
            };
            let mut partial = varying.iter().map(grad).collect::<candle_core::Result<Vec<_>>>()?;
            let present = varying.iter().map(|p| f32::from(u8::from(grads.get(&p.var).is_some())));
            partial.push(Tensor::from_iter(present, first.var.device())?);
            let mut sums = mesh.axis_group(axis)?.all_reduce_coalesced(&partial, ReduceOp::Sum)?;
            let present = sums.pop().map(|present| present.to_vec1::<f32>()).transpose()?.unwrap_or_default();
            for ((p, sum), _) in varying.iter().zip(sums).zip(present).filter(|(_, present)| *present > 0.0) {
                grads.insert(&p.var, sum);
            }
        }
        Ok(())
    }
}
