//! Backward passes through all stages.
use super::LocalPipe;
use super::forward::Pass;
use crate::grads;
use crate::graph::ValueId;
use crate::microbatch::Microbatches;
use crate::step::{StepOptions, StepResult};
use crate::tape::{Gradient, WeightTape, vjp};
use crate::{Error, Result};
use candle_core::Tensor;
use candle_core::backprop::GradStore;
use candle_dist::TensorTree;
use std::collections::BTreeMap;

/// The gradients of a step so far.
struct Gradients {
    /// The gradients of each stage's parameters.
    stages: Vec<GradStore>,
    /// The deferred weight gradients of the stages, in order.
    deferred: Vec<(usize, WeightTape)>,
    /// The gradients of the variables from which the inputs were computed.
    outside: GradStore,
}

impl LocalPipe {
    /// Runs one training step without the optimizer: all forward passes, then all backward passes, in GPipe's order.
    ///
    /// # Errors
    /// [`Error::Pipe`] if the model has no loss, or it is not a scalar of floats, or units keep gradients
    /// of `fsdp::no_sync`; those of [`forward`](Self::forward).
    pub fn forward_backward(&self, batch: &Microbatches, options: &StepOptions) -> Result<StepResult> {
        let (Some(loss), Some(stage)) = (self.info.graph.loss, self.info.loss_stage()) else {
            return Err(Error::Pipe("the model has no loss to differentiate; declare it with loss or loss_fn".into()));
        };
        StepOptions::check_synced()?;
        let (mut step, mut passes) = (StepResult::begin(), Vec::new());
        let keep = options.keep_by_stage(self.stages.len())?;
        for (inputs, ctx, weight) in self.microbatches(batch, options, true)? {
            let pass = self.record(inputs?, &ctx, (&keep, options.outputs), weight, &mut step)?;
            passes.push((pass, weight));
        }
        let stages = self.stages.iter().map(|_| GradStore::default()).collect();
        let mut gradients = Gradients { stages, deferred: Vec::new(), outside: GradStore::default() };
        for ((pass, weight), value) in passes.into_iter().zip(&step.losses) {
            // The gradient of a sum, which does not depend on its count.
            let seed = Gradient::of_loss(&value.into(), weight)?;
            self.backward(pass, (loss.value, stage, seed), options.split_backward, &mut gradients)?;
        }
        for (stage, tape) in gradients.deferred {
            grads::add(&mut gradients.stages[stage], &tape.backward()?)?;
        }
        step.grads = gradients.outside;
        // In the stages' order, which is also the order of the members of a shared parameter.
        gradients.stages.iter().try_for_each(|grads| grads::add(&mut step.grads, grads))?;
        self.divided(step)
    }

    /// Runs the backward pass of one microbatch, from the gradient of a stage's output.
    fn backward(
        &self,
        pass: Pass,
        (loss, stage, seed): (ValueId, usize, Gradient),
        is_split: bool,
        gradients: &mut Gradients,
    ) -> Result<()> {
        // The gradients from the users of each value, by stage.
        let mut found: BTreeMap<ValueId, BTreeMap<usize, Gradient>> = BTreeMap::new();
        found.entry(loss).or_default().insert(stage, seed);
        for (index, (stage, tape)) in self.stages.iter().zip(pass.tapes).enumerate().rev() {
            let of = |value: &ValueId| Gradient::sum(found.get(value).into_iter().flat_map(BTreeMap::values));
            let outputs = stage.def().outputs.iter().map(|output| of(&output.value)).collect::<Result<Vec<_>>>()?;
            if outputs.iter().all(Gradient::is_none) {
                continue;
            }
            let backward = if is_split {
                let (backward, deferred) = tape.backward_inputs(&outputs)?;
                gradients.deferred.push((index, deferred));
                backward
            } else {
                tape.backward(&outputs)?
            };
            grads::add(&mut gradients.stages[index], &backward.parameters)?;
            for (input, gradient) in stage.def().inputs.iter().zip(backward.inputs) {
                found.entry(input.value).or_default().insert(index, gradient);
            }
        }
        let mut seeds: Vec<(Tensor, Tensor)> = Vec::new();
        for (value, input) in &pass.inputs {
            let gradient = Gradient::sum(found.get(value).into_iter().flat_map(BTreeMap::values))?;
            let parts = input.tensors().into_iter().cloned().zip(gradient.0);
            seeds.extend(parts.filter_map(|(tensor, part)| Some((tensor, part?))));
        }
        grads::add(&mut gradients.outside, &vjp(&seeds)?)
    }
}
