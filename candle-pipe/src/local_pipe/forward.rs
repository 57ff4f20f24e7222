//! Forward passes through all stages.
use super::LocalPipe;
use crate::graph::{Ctx, Inputs, Reduction, ValueId};
use crate::microbatch::{Masked, Microbatches};
use crate::step::{StepOptions, StepResult};
use crate::tape::{Activation, Keep, StageModule, Tape};
use crate::{Kwargs, Result, Value, ValuePath};
use std::collections::BTreeMap;

/// Values by id.
type Values<V> = BTreeMap<ValueId, V>;

/// Data of a microbatch's forward pass for the backward pass.
pub(super) struct Pass {
    /// One for each stage.
    pub(super) tapes: Vec<Tape>,
    /// The inputs with their graphs, for callers that require gradients beyond them.
    pub(super) inputs: Inputs,
}

impl LocalPipe {
    /// Returns the model's outputs by name, in evaluation mode, for arguments that are one batch.
    ///
    /// # Errors
    /// If an input is missing or unknown, or a node does not accept its inputs.
    pub fn forward(&self, args: &[Value], kwargs: &Kwargs) -> Result<Kwargs> {
        let inputs = self.signature.bind(args, kwargs)?;
        let ctx = Ctx { training: false, ..self.stages[0].ctx(0..batch_size(&inputs)) };
        let values = self.through(inputs, |stage, inputs| stage.evaluate(inputs, &ctx))?;
        Ok(self.outputs(|value| values.get(&value).cloned()))
    }

    /// Returns the outputs and losses of all microbatches in evaluation mode, without gradients. Of the options,
    /// the step, the first row, the outputs and the weights have a meaning here, and others are refused.
    ///
    /// # Errors
    /// Those of [`forward`](Self::forward), and one if the loss is not a scalar of floats, or an option has no meaning in an evaluation
    /// (see [`StepOptions`]).
    pub fn evaluate(&self, batch: &Microbatches, options: &StepOptions) -> Result<StepResult> {
        options.check_evaluation()?;
        let mut step = StepResult::default();
        for (inputs, ctx, weight) in self.microbatches(batch, options, false)? {
            let values = self.through(inputs?, |stage, inputs| stage.evaluate(inputs, &ctx))?;
            self.add_to(&mut step, weight, options.outputs, |value| values.get(&value).cloned())?;
        }
        self.divided(step)
    }

    /// Divides the loss of a step by its count, if it has one.
    pub(super) fn divided(&self, mut step: StepResult) -> Result<StepResult> {
        if self.info.graph.loss.is_some_and(|loss| loss.reduction == Reduction::Counted) {
            step.divide(step.counted()?, 1.0)?;
        }
        Ok(step)
    }

    /// Runs the forward pass of one microbatch and adds its results to `step`.
    pub(super) fn record(
        &self,
        inputs: Inputs,
        ctx: &Ctx,
        (keep, outputs): (&[Keep], bool),
        weight: f64,
        step: &mut StepResult,
    ) -> Result<Pass> {
        let mut tapes = Vec::with_capacity(keep.len());
        let leaves = inputs.iter().map(|(&value, input)| Ok((value, Activation::of(input)?)));
        let values = self.through(leaves.collect::<Result<_>>()?, |stage, inputs| {
            let (outputs, tape) = stage.forward(inputs, ctx, keep[stage.def().index])?;
            tapes.push(tape);
            Ok(outputs)
        })?;
        self.add_to(step, weight, outputs, |value| Some(values.get(&value)?.value.clone()))?;
        Ok(Pass { tapes, inputs })
    }

    /// Returns the inputs, context and weight of each microbatch.
    pub(super) fn microbatches(
        &self,
        batch: &Microbatches,
        options: &StepOptions,
        backward: bool,
    ) -> Result<impl Iterator<Item = (Result<Inputs>, Ctx, f64)>> {
        let weights = options.loss_weights(batch, self.info.graph.loss)?;
        let rows = batch.row_ranges(options.first_row);
        let masked = Masked::of(batch, options.first_row, &self.info.graph, &self.signature)?;
        let each = batch.iter().zip(rows).zip(weights).zip(masked).enumerate();
        Ok(each.map(move |(microbatch, ((((args, kwargs), rows), weight), masked))| {
            let (step, training) = (options.step, options.is_training(backward));
            let ctx = Ctx { microbatch, step, training, masked, ..self.stages[0].ctx(rows) };
            (self.signature.bind(args, kwargs), ctx, weight)
        }))
    }

    /// Runs values through all stages; `run` runs each stage.
    pub(super) fn through<V: Clone>(
        &self,
        mut values: Values<V>,
        mut run: impl FnMut(&StageModule, Vec<V>) -> Result<Vec<V>>,
    ) -> Result<Values<V>> {
        for stage in &self.stages {
            let inputs = stage.def().inputs.iter().filter_map(|input| values.get(&input.value).cloned()).collect();
            let outputs = run(stage, inputs)?;
            values.extend(stage.def().outputs.iter().map(|output| output.value).zip(outputs));
        }
        Ok(values)
    }

    fn outputs(&self, get: impl Fn(ValueId) -> Option<Value>) -> Kwargs {
        let named = self.info.graph.outputs.iter();
        named.filter_map(|output| Some((output.name.clone(), get(output.value)?))).collect()
    }

    fn add_to(
        &self,
        step: &mut StepResult,
        weight: f64,
        outputs: bool,
        get: impl Fn(ValueId) -> Option<Value>,
    ) -> Result<()> {
        if outputs {
            step.outputs.push(Value::Map(self.outputs(&get)));
        }
        match self.info.graph.loss.and_then(|loss| Some((get(loss.value)?, loss.reduction))) {
            Some((loss, reduction)) => step.add_loss(&loss, reduction, weight),
            None => Ok(()),
        }
    }
}

/// Returns the first size of the first tensor that has one.
pub(super) fn batch_size(inputs: &Inputs) -> usize {
    let rows = |leaf: &Value| match leaf {
        Value::Tensor(tensor) => tensor.dims().first().copied(),
        #[cfg(feature = "shard")]
        Value::DTensor(tensor) => tensor.dims().first().copied(),
        _ => None,
    };
    let root = ValuePath::new("inputs");
    let mut leaves = inputs.values().flat_map(|value| value.leaves(&root));
    leaves.find_map(|(_, leaf)| rows(leaf)).unwrap_or(1)
}
