//! Execution of stages on the ranks of a group, by a schedule.
//!
//! Every rank lowers the same schedule to the same program and runs its own list (`execute.rs`). Tensors are
//! sent without copies (`wire.rs`). Gradients of shared parameters and of replicas of the model are reduced
//! where the program says so (`reduce.rs`). The ranks negotiate nothing during a step: the program, whose
//! sends and receives have one common order, and which says what each message carries, determines everything.
//! A failed rank notifies the others, and the step ends for all of them or for none.
//!
#![doc = include_str!("README.md")]

mod agree;
mod apart;
mod batch;
mod buffers;
mod build;
mod clock;
mod credit;
mod execute;
mod loss;
mod names;
mod notes;
mod outline;
#[cfg(feature = "shard")]
mod parameters;
mod reduce;
mod stopwatch;
mod traffic;
mod wire;

use crate::graph::{GraphSignature, LossReduction, PipeInfo, ValueId};
use crate::microbatch::Microbatches;
use crate::schedule::{Program, Span};
use crate::tape::{StageModule, named_vars};
use crate::{Error, Kwargs, Result, StepOptions, StepResult, Value};
use batch::StepBatch;
use buffers::Buffers;
use build::ReplicatedParameter;
use candle_core::{Device, Tensor, Var};
use candle_dist::{ClipGradNorm, DataParallel, DeviceMesh, ProcessGroup, ReduceOp};
use clock::Clock;
use execute::{Execution, Outputs, ProgramResults};
use notes::{NoteBoard, Notes};
use std::collections::{BTreeMap, HashMap, HashSet};

/// The stages of a pipe on this rank, ready to train and to evaluate.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_dist::World;
/// use candle_nn::{VarBuilder, VarMap};
/// use candle_pipe::schedule::ScheduleKind;
/// use candle_pipe::{EqualCount, In, PipeBuilder, LossReduction, Result, Runtime, nn};
///
/// let losses = World::threads(2).run(|ctx| -> Result<f64> {
///     let mut g = PipeBuilder::<VarBuilder<'static>>::new();
///     let (x, target) = (g.input("x", In::Arg), g.input("target", In::Arg));
///     let h = g.module("up", |vb| Ok(nn::linear(1, 4, vb.clone())?), [x]);
///     let y = g.module("down", |vb| Ok(nn::linear(4, 1, vb.clone())?), [h]);
///     g.loss_fn(|xs, _| Ok(candle_nn::loss::mse(xs[0].tensor()?, xs[1].tensor()?)?), [y, target], LossReduction::Mean);
///     let pipe = g.finish(EqualCount(2))?;
///
///     let schedule = ScheduleKind::OneFOneB.schedule(2, 3, 1)?; // 2 ranks, 3 microbatches, 1 stage per rank
///     let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
///     let runtime = Runtime::new(&pipe, &schedule, ctx.group(), &vb, &Device::Cpu)?;
///     let x = Tensor::ones((7, 1), DType::F32, &Device::Cpu)?;
///     let made = runtime.step(0, [&x, &x])?; // microbatches of 3, 2 and 2 rows
///     assert_eq!(made.step.loss().is_ok(), ctx.rank() == 1); // which has the last stage
///     runtime.loss(&made) // tells it to all ranks
/// })?;
/// assert_eq!(losses[0], losses[1]);
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
pub struct Runtime {
    info: PipeInfo,
    pub(crate) signature: GraphSignature,
    stages: BTreeMap<usize, StageModule>,
    training: Program,
    evaluation: Program,
    group: ProcessGroup,
    /// The ranks with the same stages in other copies of the model, if there are any.
    copies: Option<ProcessGroup>,
    /// The gradient averages of each stage over the replicas of the model, if there are any.
    replicas: BTreeMap<usize, DataParallel>,
    shared: Vec<ReplicatedParameter>,
    buffers: Buffers,
    /// The memory addresses of the parameters.
    parameters: HashSet<usize>,
    /// The values that are returned to the caller, with their names.
    outputs: HashMap<ValueId, Vec<String>>,
    /// The values that are parameters, equal for all microbatches.
    constants: HashSet<ValueId>,
    /// The mesh that sharded tensors between stages lie on.
    mesh: Option<DeviceMesh>,
    /// The parameters that are built on it, of these stages and of others.
    #[cfg(feature = "shard")]
    built: Option<candle_shard::nn::Parameters>,
    /// The most unacknowledged messages from one rank to another in an evaluation.
    window: usize,
    /// The device of the stages.
    device: Device,
    clock: Clock,
    /// The place of message heads that are not messages themselves.
    board: Option<NoteBoard>,
}

/// The result of a step on one rank.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct RankStep {
    /// Losses and outputs on the ranks of the stages that compute them, and the gradients of this rank's parameters.
    pub step: StepResult,
    /// The computations of this rank, in seconds since the last rank of the pipeline reached the step, by the clock of
    /// the first rank (see [`Runtime::settle_clocks`]). On a CUDA device these are times of the device; that code has
    /// not run on a GPU yet. On other devices they are the times of the calls on the host.
    pub spans: Vec<Span>,
    /// The peak number of open passes of stages over microbatches: forward done, backward not yet.
    pub peak_activations: usize,
    /// The number of weight gradients that this rank computed together with input gradients although the schedule
    /// defers them. These belong to weights that are not variables of the stage, such as fully sharded ones. The step
    /// then takes longer than simulated.
    pub weights_at_once: usize,
    /// The length of the longest chain of computations, of this rank and others, that ends with the last one of this
    /// rank; each needs the previous one or follows it on the same rank. Unlike times, it depends only on the schedule
    /// and the messages.
    pub critical_path: usize,
    /// The number of rows of the batch of this copy of the model.
    rows: usize,
    /// Whether the caller set the weights of the losses.
    has_weights: bool,
}

impl Runtime {
    /// Measures the offsets between the clocks of this pipeline's ranks again. Every rank must call it.
    ///
    /// [`new`](Self::new) does it once. The clocks of hosts drift apart by some microseconds per second, so call it
    /// before a step whose [spans](RankStep::spans) you want to draw. Threads of one process share a clock and send no
    /// messages.
    ///
    /// # Errors
    /// If the group fails.
    pub fn settle_clocks(&mut self) -> Result<()> {
        self.clock = Clock::settle(&self.group)?;
        Ok(())
    }

    /// Returns the model and its stages as plain data, with the shared parameters that were declared or found.
    pub fn info(&self) -> &PipeInfo {
        &self.info
    }

    /// Returns this rank's stages.
    pub fn stages(&self) -> impl Iterator<Item = &StageModule> {
        self.stages.values()
    }

    /// Returns the variables of this rank's stages by full name, each once, for an optimizer. A weight that several stages of
    /// this rank share is one of them. A parameter that is made of a variable, such as a cast, stands for the variable.
    ///
    /// # Errors
    /// Those of candle.
    pub fn named_vars(&self) -> Result<Vec<(String, Var)>> {
        named_vars(self.stages.values())
    }

    /// Extends `clip` to all stages: each parameter of the pipe counts once, on however many ranks it is shared. Give it
    /// [`named_vars`](Self::named_vars), or those of them that are trained.
    ///
    /// Add the groups over which parameters are sharded within a stage first, as
    /// [`Parameters::clip_grad_norm`](candle_shard::nn::Parameters::clip_grad_norm) does. Without them, clipping is refused.
    ///
    /// Two stages of candle's layers, with an optimizer that has state, and one checkpoint of both:
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_dist::World;
    /// # use candle_nn::{ParamsAdamW, VarBuilder, VarMap};
    /// # use candle_pipe::schedule::ScheduleKind;
    /// # use candle_pipe::{EqualCount, In, PipeBuilder, LossReduction, Result, Runtime, nn};
    /// use candle_shard::checkpoint::save_stages;
    /// use candle_shard::nn::AdamW;
    ///
    /// # let folder = std::env::temp_dir().join(format!("two-stages-{}", std::process::id()));
    /// # let norms = World::threads(2).run(|ctx| -> Result<f64> {
    /// # let mut g = PipeBuilder::<VarBuilder<'static>>::new();
    /// # let x = g.input("x", In::Arg);
    /// # let h = g.module("up", |vb| Ok(nn::linear(1, 4, vb.clone())?), [x]);
    /// # let y = g.module("down", |vb| Ok(nn::linear(4, 1, vb.clone())?), [h]);
    /// # g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sqr()?.mean_all()?), [y], LossReduction::Mean);
    /// # let (pipe, schedule) = (g.finish(EqualCount(2))?, ScheduleKind::OneFOneB.schedule(2, 2, 1)?);
    /// # let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    /// # let x = Tensor::ones((4, 1), DType::F32, &Device::Cpu)?;
    /// let runtime = Runtime::new(&pipe, &schedule, ctx.group(), &vb, &Device::Cpu)?;
    /// let parameters = runtime.parameters()?;
    /// let mut optimizer = AdamW::new(&parameters, ParamsAdamW::default())?;
    ///
    /// let mut made = runtime.step(0, [&x])?.step;
    /// let clip = runtime.clip_grad_norm(parameters.clip_grad_norm(1.0)?);
    /// let norm = clip.clip(&parameters.named_vars(), &mut made.grads)?; // of both stages
    /// optimizer.step(&made.grads)?;
    /// save_stages(&folder, ctx.group(), &parameters.named_tensors())?;
    /// # Ok(norm)
    /// # })?;
    /// # std::fs::remove_dir_all(&folder).ok();
    /// # assert_eq!(norms[0], norms[1]);
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    pub fn clip_grad_norm(&self, clip: ClipGradNorm) -> ClipGradNorm {
        let first_elsewhere =
            self.info.replicated().filter(|share| self.rank_of(share.stages[0]) != self.group.rank());
        let copies =
            first_elsewhere.flat_map(|share| self.stages().flat_map(|stage| stage.copy_of(&share.name)));
        let copies: Vec<Tensor> = copies.map(|(_, copy)| copy).collect();
        clip.staged(&self.group).elsewhere(&copies)
    }

    /// Returns the program of a training step on all ranks.
    pub fn program(&self) -> &Program {
        &self.training
    }

    /// Runs training step number `step` without the optimizer: cuts inputs that are passed by position into the microbatches of the
    /// schedule, each tensor along dim 0, and calls [`forward_backward`](Self::forward_backward). Every rank calls it with the whole
    /// batch.
    ///
    /// The number of the step seeds dropout, so a training that is resumed goes on with the next one. Inputs by name, other dims and
    /// other [options](StepOptions), such as the first row of a replica with dropout, need `forward_backward` itself.
    ///
    /// # Errors
    /// Those of [`Microbatches::cut`] and of [`forward_backward`](Self::forward_backward).
    pub fn step<V: Into<Value>>(&self, step: u64, inputs: impl IntoIterator<Item = V>) -> Result<RankStep> {
        let batch = Microbatches::cut(self.training.schedule().microbatches(), inputs);
        self.train(&self.training, batch.as_ref().map_err(Error::clone), &StepOptions::default().step(step))
    }

    /// Runs one training step without the optimizer, on a batch that is equal on all ranks.
    ///
    /// A batch has as many microbatches as the schedule, or, if it has fewer rows, one for each row: then the
    /// computations of the other microbatches are left out. Every rank passes at least the inputs that its
    /// stages use; a rank without inputs passes the number of [rows](crate::microbatch::Splitter::rows).
    /// Inputs that several ranks pass are compared by a digest, which on other devices than the CPU covers
    /// only their ends. Parameters get gradients. Variables from which inputs were computed get some in a
    /// process alone; elsewhere inputs must not be tracked.
    ///
    /// # Errors
    /// On this rank, before any communication: if there is no loss, or the schedule has no backward passes. On all
    /// ranks at once, before any computation, so that all can continue: if a rank's batch is not cut into the
    /// schedule's microbatches, lacks an input, or differs from that of the others, or if a rank is within `fsdp::no_sync`. Errors of nodes, which name rank,
    /// stage, microbatch and action, and of communication; after these the group has failed.
    pub fn forward_backward(&self, batch: &Microbatches, options: &StepOptions) -> Result<RankStep> {
        self.train(&self.training, Ok(batch), options)
    }

    /// Runs a training step by a program. A batch that this rank could not cut is an error on all ranks, as
    /// others are.
    pub(crate) fn train(
        &self,
        program: &Program,
        batch: Result<&Microbatches>,
        options: &StepOptions,
    ) -> Result<RankStep> {
        if self.info.graph.loss.is_none() {
            return Err(Error::Pipe(
                "the model has no loss to differentiate; declare it with loss or loss_fn".into(),
            ));
        }
        if !program.schedule().has_backward() {
            let reason = "it has no backward passes to train with; evaluate, or use one that has";
            return Err(Error::Schedule(reason.into()));
        }
        self.run(program, batch, options, true, Outputs::of(options))
    }

    /// Returns the outputs and losses of all microbatches in evaluation mode, without gradients. Of the options,
    /// the step, the first row, the outputs and the weights have a meaning here, and others are refused.
    ///
    /// Every rank must call it, also those of the other copies of the model ([`with_replicas`](Self::with_replicas),
    /// [`beside`](Self::beside)), because all copies start a step together. If a copy has no rows left, it passes some
    /// rows again.
    ///
    /// # Errors
    /// Those of [`forward_backward`](Self::forward_backward); on all ranks alike, if an option has no meaning in an evaluation (see
    /// [`StepOptions`]).
    pub fn evaluate(&self, batch: &Microbatches, options: &StepOptions) -> Result<RankStep> {
        self.evaluate_by(&self.evaluation, batch, options)
    }

    /// Runs an evaluation by a program.
    pub(crate) fn evaluate_by(
        &self,
        program: &Program,
        batch: &Microbatches,
        options: &StepOptions,
    ) -> Result<RankStep> {
        self.run(program, Ok(batch), options, false, Outputs::of(options))
    }

    /// Like [`evaluate`](Self::evaluate), but passes the outputs and the number of each finished microbatch to `each`,
    /// on the ranks that compute them, instead of keeping them. So memory does not grow with the number of
    /// microbatches.
    ///
    /// # Errors
    /// Those of [`evaluate`](Self::evaluate); on all ranks alike, if the options are without outputs; and those of `each`, after
    /// which the group has failed.
    pub fn evaluate_each(
        &self,
        batch: &Microbatches,
        options: &StepOptions,
        mut each: impl FnMut(usize, Kwargs) -> Result<()>,
    ) -> Result<RankStep> {
        self.run(&self.evaluation, Ok(batch), options, false, Outputs::Given(&mut each))
    }

    /// Gives the rows of tables that lookups have changed in place since the last training step, as those with `max_norm` do, to
    /// all replicas. Training steps do so by themselves. Call it between an evaluation and a checkpoint; every rank calls it.
    ///
    /// # Errors
    /// If the communication fails.
    pub fn share_changed_rows(&self) -> Result<()> {
        Ok(self.replicas.values().try_for_each(DataParallel::share_changed_rows)?)
    }

    fn run(
        &self,
        program: &Program,
        cut: Result<&Microbatches>,
        options: &StepOptions,
        backward: bool,
        outputs: Outputs<'_>,
    ) -> Result<RankStep> {
        let are_kept = matches!(outputs, Outputs::Kept);
        let has_outputs = match outputs {
            Outputs::Given(_) if !options.outputs => {
                let reason = "outputs(false) in evaluate_each, which passes outputs on; leave it out, or call evaluate";
                Err(Error::Pipe(reason.into()))
            }
            _ => Ok(()),
        };
        let batch =
            has_outputs.and(cut).and_then(|cut| StepBatch::new(self, program, cut, options, backward));
        let batch = agree::settle(self, batch)?;
        let mut step = if backward { StepResult::begin() } else { StepResult::default() };
        let notes = self.board.as_ref().map_or(Notes::default(), NoteBoard::next_step);
        let execution = Execution::new(self, program, &batch, outputs, &notes);
        let made = execution.inspect_err(|error| self.group.fail(&error.to_string()))?.run()?;
        let ProgramResults { losses, outputs, grads, spans, peak, path, at_once } = made;
        step.grads = grads;
        let last = self.rank_of(self.info.num_stages() - 1);
        step.loss_rank = self.info.graph.loss.map(|_| self.group.ranks()[last]);
        let reduction = self.info.graph.loss.map_or(LossReduction::Mean, |loss| loss.reduction);
        for (loss, &weight) in losses.iter().zip(&batch.weights) {
            loss.iter().try_for_each(|loss| step.add_loss(loss, reduction, weight))?;
        }
        if backward && batch.training {
            let settled = self.buffers.settle(self, &step.grads);
            settled.inspect_err(|error| self.group.fail(&error.to_string()))?;
        }
        if are_kept {
            step.outputs = outputs.into_iter().map(Value::Map).collect();
        }
        // A finished rank has not succeeded while another one can still fail.
        match reduction {
            LossReduction::Counted => self.divide(&mut step)?,
            _ => self.group.barrier()?,
        }
        let (rows, has_weights) = (batch.all_rows, options.weights.is_some());
        let (peak_activations, weights_at_once, critical_path) = (peak, at_once, path);
        Ok(RankStep { step, spans, peak_activations, weights_at_once, critical_path, rows, has_weights })
    }

    /// Divides the loss and the gradients by the total count of the losses of all microbatches of all copies of the
    /// model.
    fn divide(&self, step: &mut StepResult) -> Result<()> {
        let mine = Tensor::new(&step.counted()?, &Device::Cpu)?;
        let mut all = self.group.all_reduce(&mine, ReduceOp::Sum)?;
        if let Some(copies) = &self.copies {
            all = copies.all_reduce(&all, ReduceOp::Sum)?;
        }
        let all = all.to_vec1::<f64>()?;
        // Gradients are means over the copies, so they are multiplied by the number of copies.
        let copies = self.copies.as_ref().map_or(1, ProcessGroup::size);
        step.divide([all[0], all[1]], copies as f64)
    }

    fn stage(&self, stage: usize) -> Result<&StageModule> {
        let elsewhere = || Error::Schedule(format!("stage {stage} is not on rank {}", self.group.rank()));
        self.stages.get(&stage).ok_or_else(elsewhere)
    }

    /// Returns whether no other rank takes part in a step, on other stages, in other copies or on a mesh of
    /// the stages.
    fn is_alone(&self) -> bool {
        self.group.size() == 1
            && self.copies.is_none()
            && self.mesh.as_ref().is_none_or(|mesh| mesh.size() == 1)
    }

    fn rank_of(&self, stage: usize) -> usize {
        self.training.schedule().stage_ranks()[stage]
    }
}
