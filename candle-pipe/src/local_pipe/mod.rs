//! All stages of a model in one process.
mod compare;
mod profile;

pub use profile::NodeProfile;

use crate::graph::{Ctx, Inputs, PipeInfo, Scope, ValueId};
use crate::microbatch::Microbatches;
use crate::pipe::Pipe;
use crate::runtime::Runtime;
use crate::schedule::{Action, Compute, Lowering, Pass, Program, Schedule};
use crate::tape::StageModule;
use crate::{Error, Kwargs, Result, StepOptions, StepResult, Value, ValuePath};
use candle_core::{Device, Tensor, Var};
use itertools::iproduct;
use std::collections::BTreeMap;

/// A cut model that runs in one process, stage after stage, each with its own graph. It is the reference for a pipeline
/// on many ranks, and a way to try a cut on one device.
///
/// Gradients cross stages as they do between ranks: the gradients from all users of a value are summed in the users'
/// order.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Optimizer, SGD, VarBuilder, VarMap};
/// use candle_pipe::microbatch::Microbatches;
/// use candle_pipe::{EqualCount, In, LocalPipe, PipeBuilder, LossReduction, StepOptions, nn};
///
/// let mut g = PipeBuilder::<VarBuilder<'static>>::new();
/// let (x, target) = (g.input("x", In::Arg), g.input("target", In::Arg));
/// let h = g.module("up", |vb| Ok(nn::linear(1, 4, vb.clone())?), [x]);
/// let y = g.module("down", |vb| Ok(nn::linear(4, 1, vb.clone())?), [h]);
/// g.loss_fn(|xs, _| Ok(candle_nn::loss::mse(xs[0].tensor()?, xs[1].tensor()?)?), [y, target], LossReduction::Mean);
/// let pipe = g.finish(EqualCount(3))?;
///
/// let parameters = VarMap::new();
/// let vb = VarBuilder::from_varmap(&parameters, DType::F32, &Device::Cpu);
/// let local = LocalPipe::new(&pipe, &vb, &Device::Cpu)?;
/// let mut optimizer = SGD::new(parameters.all_vars(), 1e-4)?;
///
/// let x = Tensor::new(&[[1f32], [2.], [3.], [4.], [5.]], &Device::Cpu)?;
/// let batch = Microbatches::cut(2, [&x, &x])?;
/// let mut losses = Vec::new();
/// for step in 0..2 {
///     let result = local.forward_backward(&batch, &StepOptions::default().step(step))?;
///     losses.push(result.loss()?.to_scalar::<f32>()?);
///     optimizer.step(&result.grads)?;
/// }
/// assert!(losses[1] < losses[0]);
/// # Ok::<(), candle_pipe::Error>(())
/// ```
pub struct LocalPipe {
    /// Of one rank, which has all stages.
    runtime: Runtime,
    stages: Vec<StageModule>,
}

impl LocalPipe {
    /// Builds all stages on one device. They share one copy of each replicated parameter.
    ///
    /// # Errors
    /// Those of the constructors.
    pub fn new<B: Scope>(pipe: &Pipe<B>, scope: &B, device: &Device) -> Result<Self> {
        let runtime = Runtime::alone(pipe, program(pipe.info(), 1, &[])?, scope, device)?;
        let stages = runtime.stages().cloned().collect();
        Ok(Self { runtime, stages })
    }

    /// Returns the model and its stages as plain data.
    pub fn info(&self) -> &PipeInfo {
        self.runtime.info()
    }

    /// Returns the stages.
    pub fn stages(&self) -> &[StageModule] {
        &self.stages
    }

    /// Returns the parameters of all stages by full name, as the model uses them.
    pub fn parameters(&self) -> BTreeMap<&str, &Tensor> {
        let all = self.stages.iter().flat_map(StageModule::parameters);
        all.map(|(name, tensor)| (name.as_str(), tensor)).collect()
    }

    /// Returns the variables of all stages by full name, each once, for an optimizer. A parameter that is made of a variable,
    /// such as a cast, stands for the variable.
    ///
    /// # Errors
    /// Those of candle.
    pub fn named_vars(&self) -> Result<Vec<(String, Var)>> {
        self.runtime.named_vars()
    }

    /// Runs one training step without the optimizer: all forward passes, then all backward passes, in GPipe's
    /// order. Variables from which the inputs were computed have gradients too.
    ///
    /// # Errors
    /// [`Error::Pipe`] if the model has no loss, or it is not a scalar of floats, or units keep gradients
    /// of `fsdp::no_sync`; those of [`forward`](Self::forward).
    pub fn forward_backward(&self, batch: &Microbatches, options: &StepOptions) -> Result<StepResult> {
        let passes =
            if options.split_backward { &[Pass::Input, Pass::Weight][..] } else { &[Pass::Backward] };
        let program = program(self.info(), batch.len(), passes)?;
        let made = self.runtime.train(&program, Ok(batch), &options.clone().split_backward(false));
        Ok(made.map_err(Error::out_of_action)?.step)
    }

    /// Returns the outputs and losses of all microbatches in evaluation mode, without gradients. Of the
    /// options, the step, the first row, the outputs and the weights have a meaning here, and others are
    /// refused.
    ///
    /// # Errors
    /// Those of [`forward`](Self::forward), and one if the loss is not a scalar of floats, or an option has
    /// no meaning in an evaluation (see [`StepOptions`]).
    pub fn evaluate(&self, batch: &Microbatches, options: &StepOptions) -> Result<StepResult> {
        let made = self.runtime.evaluate_by(&program(self.info(), batch.len(), &[])?, batch, options);
        Ok(made.map_err(Error::out_of_action)?.step)
    }

    /// Returns the model's outputs by name, in evaluation mode, for arguments that are one batch.
    ///
    /// # Errors
    /// If an input is missing or unknown, or a node does not accept its inputs.
    pub fn forward(&self, args: &[Value], kwargs: &Kwargs) -> Result<Kwargs> {
        let values = self.through(args, kwargs, |stage, inputs, ctx| stage.evaluate(inputs, ctx))?;
        let named = self.info().graph.outputs.iter();
        Ok(named
            .filter_map(|output| Some((output.name.clone(), values.get(&output.value)?.clone())))
            .collect())
    }

    /// Runs arguments that are one batch through all stages, in evaluation mode; `run` runs each stage.
    /// Returns all values.
    fn through(
        &self,
        args: &[Value],
        kwargs: &Kwargs,
        mut run: impl FnMut(&StageModule, Vec<Value>, &Ctx) -> Result<Vec<Value>>,
    ) -> Result<BTreeMap<ValueId, Value>> {
        let mut values = self.runtime.signature.bind(args, kwargs)?;
        let ctx = Ctx { training: false, ..self.stages[0].ctx(0..batch_size(&values)) };
        for stage in &self.stages {
            let inputs =
                stage.def().inputs.iter().filter_map(|input| values.get(&input.value).cloned()).collect();
            let outputs = run(stage, inputs, &ctx)?;
            values.extend(stage.def().outputs.iter().map(|output| output.value).zip(outputs));
        }
        Ok(values)
    }
}

/// Returns the program of one rank: the microbatches one after the other through all stages, and so through
/// each of the backward `passes`, from the last stage to the first.
fn program(info: &PipeInfo, microbatches: usize, passes: &[Pass]) -> Result<Program> {
    let stages = info.num_stages();
    let compute = |pass, (microbatch, stage)| Some(Action::Compute(Compute { stage, pass, microbatch }));
    let forwards = iproduct!(0..microbatches, 0..stages).map(|at| compute(Pass::Forward, at));
    let back = |&pass| iproduct!(0..microbatches, (0..stages).rev()).map(move |at| compute(pass, at));
    let schedule = Schedule::new(vec![forwards.chain(passes.iter().flat_map(back)).collect()])?;
    // Stages on one rank share one copy of a parameter, whose gradients are summed already.
    schedule.lower(&Lowering::of(info)?.shared([]))
}

/// Returns the first size of the first tensor that has one.
fn batch_size(inputs: &Inputs) -> usize {
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
