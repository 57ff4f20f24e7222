//! Data that a stage keeps between the passes of one microbatch.
use super::state::VariableSnapshot;
use super::{Activation, Fingerprints, Gradient, StageModule, WeightQueue, vjp};
use crate::graph::Ctx;
use crate::{Error, Result, Value};
use candle_core::backprop::GradStore;
use candle_core::{Tensor, TensorId, Var};
use candle_dist::{TensorTree, empty};
use candle_dist_kernels::random::Draws;
use std::collections::HashSet;
use std::sync::Arc;

/// One stage's run of one microbatch. Its backward pass can run once, whole or in two parts.
pub struct Tape {
    stage: StageModule,
    kept: ForwardRecord,
}

enum ForwardRecord {
    Recorded(RunGraph),
    Inputs(Vec<Activation>, Ctx, FirstRun),
}

/// What the second run of a stage must have from the first.
pub(super) struct FirstRun {
    /// The random draws of the nodes.
    pub(super) draws: Draws,
    /// The variables that the run changed, as they were before.
    pub(super) before: VariableSnapshot,
    /// The results, if the second run is compared with the first.
    pub(super) outputs: Option<Fingerprints>,
}

/// The graph of one run.
pub(super) struct RunGraph {
    /// For each tensor of each input, the variable that stands for it if it requires a gradient.
    leaves: Vec<Vec<Option<Var>>>,
    /// The outputs with their graph.
    outputs: Vec<Value>,
    queue: Arc<WeightQueue>,
}

/// The gradients of a backward pass.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Backward {
    /// The gradients of the stage's inputs, in their order.
    pub inputs: Vec<Gradient>,
    /// The gradients of the stage's parameters.
    pub parameters: GradStore,
}

/// The second part of a backward pass: deferred weight gradients.
///
/// It holds only the tensors that they need, such as the inputs of linear layers and the gradients of their outputs.
#[derive(Debug)]
pub struct WeightTape {
    queue: Arc<WeightQueue>,
    /// Gradients from other uses of the same weights.
    grads: GradStore,
}

impl Tape {
    pub(super) fn recorded(stage: StageModule, recorded: RunGraph) -> Self {
        Self { stage, kept: ForwardRecord::Recorded(recorded) }
    }

    pub(super) fn inputs(stage: StageModule, inputs: Vec<Activation>, ctx: Ctx, first: FirstRun) -> Self {
        Self { stage, kept: ForwardRecord::Inputs(inputs, ctx, first) }
    }

    /// Runs the whole backward pass, from the gradients of the stage's outputs in their order.
    ///
    /// The gradient of an output may be [none](Gradient::is_none); if all are, so are all results.
    ///
    /// # Errors
    /// [`Error::Pipe`] if the gradients do not match the outputs, and those of recomputed nodes.
    pub fn backward(self, gradients: &[Gradient]) -> Result<Backward> {
        let (mut backward, queue) = self.run(gradients, false)?;
        queue.finish(&mut backward.parameters)?;
        Ok(backward)
    }

    /// Runs the backward pass without the weight gradients of linear layers. The returned tape computes these, bit by
    /// bit as [`backward`](Self::backward) does.
    ///
    /// This defers the weights of [`nn::Linear`](crate::nn::Linear) and of the linear layers of `candle_shard`, also
    /// recomputed ones, if their gradients need no communication: not fully sharded weights, nor weights that other
    /// stages send. Each parameter's gradient comes entirely from one of the two parts.
    ///
    /// # Errors
    /// Those of [`backward`](Self::backward).
    pub fn backward_inputs(self, gradients: &[Gradient]) -> Result<(Backward, WeightTape)> {
        let (mut backward, queue) = self.run(gradients, true)?;
        let mut grads = GradStore::default();
        for weight in queue.waiting() {
            if let Some(grad) = backward.parameters.remove(&weight) {
                grads.insert(&weight, grad);
            }
        }
        Ok((backward, WeightTape { queue, grads }))
    }

    fn run(self, gradients: &[Gradient], is_deferring: bool) -> Result<(Backward, Arc<WeightQueue>)> {
        let recorded = match self.kept {
            ForwardRecord::Recorded(recorded) => recorded,
            ForwardRecord::Inputs(inputs, ctx, FirstRun { draws, before, outputs }) => {
                let again = before.during(|| draws.again(|| RunGraph::new(&self.stage, &inputs, &ctx)))?;
                outputs.map_or(Ok(()), |outputs| outputs.check(&self.stage, &again.outputs, &ctx))?;
                again
            }
        };
        recorded.queue.defer(is_deferring);
        let mut grads = vjp(&recorded.seeds(&self.stage, gradients)?)?;
        self.stage.state().borrow_mut().found(&grads);
        // Some sums of 16-bit gradients are f32. An activation's gradient has its dtype, as within one graph.
        let mut of_leaf =
            |leaf: &Option<Var>| match leaf.as_ref().and_then(|leaf| Some((leaf, grads.remove(leaf)?))) {
                Some((leaf, grad)) => empty::compute(&grad, |grad| grad.to_dtype(leaf.dtype())).map(Some),
                None => Ok(None),
            };
        let of_input =
            |leaves: &Vec<Option<Var>>| leaves.iter().map(&mut of_leaf).collect::<candle_core::Result<_>>();
        let inputs = recorded.leaves.iter().map(of_input).map(|parts| parts.map(Gradient));
        let inputs = inputs.collect::<candle_core::Result<_>>()?;
        Ok((Backward { inputs, parameters: grads }, recorded.queue))
    }
}

impl WeightTape {
    /// Returns the number of weight gradients that could not be deferred.
    pub(crate) fn at_once(&self) -> usize {
        self.queue.at_once()
    }

    /// Computes the deferred weight gradients.
    ///
    /// # Errors
    /// Those of candle.
    pub fn backward(self) -> Result<GradStore> {
        let mut grads = self.grads;
        self.queue.finish(&mut grads)?;
        Ok(grads)
    }
}

impl RunGraph {
    pub(super) fn new(stage: &StageModule, inputs: &[Activation], ctx: &Ctx) -> Result<Self> {
        let (mut leaves, mut values) = (Vec::new(), Vec::new());
        for input in inputs {
            let variable =
                |(tensor, &tracked): (&Tensor, &bool)| tracked.then(|| Var::from_tensor(tensor)).transpose();
            let own = input.value.tensors().into_iter().zip(&input.tracked).map(variable);
            let own = own.collect::<candle_core::Result<Vec<_>>>()?;
            let mut stand_ins = own.iter();
            let is_sharded = input.value.is_sharded();
            values.push(input.value.map_tensors(|tensor| -> Result<Tensor> {
                Ok(match stand_ins.next().cloned().flatten() {
                    None => tensor.clone(),
                    // A sharded tensor caches nothing for a variable, which may change, so this is not the variable
                    // itself.
                    Some(leaf) if is_sharded => leaf.reshape(leaf.shape())?,
                    Some(leaf) => leaf.into_inner(),
                })
            })?);
            leaves.push(own);
        }
        let queue = WeightQueue::new(leaves.iter().flatten().flatten().map(|leaf| leaf.id()).collect());
        let outputs = queue.during(|| stage.run(values, |node, values| node.run(values, ctx)))?;
        Ok(Self { leaves, outputs, queue })
    }

    /// Returns the variables on which the outputs depend.
    pub(super) fn reached(&self) -> HashSet<TensorId> {
        let tensors = self.outputs.iter().flat_map(TensorTree::tensors);
        let behind = tensors.flat_map(Tensor::sorted_nodes);
        behind.filter(|tensor| tensor.is_variable()).map(Tensor::id).collect()
    }

    pub(super) fn outputs(&self) -> Result<Vec<Activation>> {
        self.outputs.iter().map(Activation::of).collect()
    }

    /// Refuses a loss whose count has a gradient: it is divided by the sum of all counts when the passes are over.
    pub(super) fn check_count(&self, loss: usize) -> Result<()> {
        let Value::Tuple(parts) = &self.outputs[loss] else { return Ok(()) };
        let is_reached = |count: &Tensor| {
            // A comparison or the condition of a choice leads to variables without a gradient.
            let leads = count.dtype().is_float() && count.track_op();
            let leads = leads && count.sorted_nodes().iter().any(|node| node.is_variable());
            let grads =
                if leads { vjp(&[(count.clone(), count.ones_like()?)])? } else { GradStore::default() };
            Ok::<_, Error>(grads.get_ids().next().is_some())
        };
        match parts.get(1) {
            Some(Value::Tensor(count)) if is_reached(count)? => Err(Error::Pipe(format!(
                "the count of the loss, {}, has a gradient, which would be left out of the gradient of the sum divided by the \
                 count; detach it if it is to be a constant, or give a loss that is a mean or a sum",
                parts[1]
            ))),
            _ => Ok(()),
        }
    }

    /// Returns the output tensors that have a gradient, with it.
    fn seeds(&self, stage: &StageModule, gradients: &[Gradient]) -> Result<Vec<(Tensor, Tensor)>> {
        let index = stage.def().index;
        let (given, outputs) = (gradients.len(), self.outputs.len());
        if given != outputs {
            return Err(Error::Pipe(format!("{given} gradients for the {outputs} outputs of stage {index}")));
        }
        let mut seeds = Vec::new();
        for (place, (output, gradient)) in self.outputs.iter().zip(gradients).enumerate() {
            let tensors = output.tensors();
            let fits = |(tensor, part): (&&Tensor, &Option<Tensor>)| {
                part.as_ref()
                    .is_none_or(|part| part.dims() == tensor.dims() && part.dtype() == tensor.dtype())
            };
            if gradient.0.len() > tensors.len() || !tensors.iter().zip(&gradient.0).all(fits) {
                let parts: Vec<String> =
                    gradient.0.iter().map(|part| Value::from(part.clone()).to_string()).collect();
                let parts = parts.join(", ");
                return Err(Error::Pipe(format!(
                    "gradient ({parts}) for output {place} of stage {index}, {output}"
                )));
            }
            let parts = tensors.into_iter().zip(&gradient.0);
            for (tensor, part) in parts {
                if let Some(part) = part {
                    seeds.push((tensor.clone(), part.to_device(tensor.device())?));
                }
            }
        }
        Ok(seeds)
    }
}
