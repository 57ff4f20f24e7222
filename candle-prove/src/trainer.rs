//! A model that trains in a set-up, on one rank.
use super::model::{LossFn, MakeOptimizer, ModelInput, ModelProgram};
use super::plain::plain_builder;
use super::setup::{KEEP, Setup};
use super::table::{dense_rows, take_rows};
use super::trajectory::Trajectory;
use super::{PIPELINE, REPLICAS};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::comm::{Event, Log};
use candle_dist::{
    ClipGradNorm, DataParallel, DataParallelOptions, DeviceMesh, GradAccumulator, ProcessGroup, RankContext,
    ReduceOp,
};
use candle_nn::ParamsAdamW;
use candle_pipe::graph::Scope;
use candle_pipe::microbatch::microbatch_sizes;
use candle_pipe::{EqualCount, Keep, LossReduction, PipeBuilder, Result, Runtime, StepOptions};
use candle_shard::fsdp::{FullyShardOptions, no_sync};
use candle_shard::nn::{AdamW, MeshVarBuilder, Mode, Optimizer, Parameter, Parameters};
use candle_shard::parallel::Plan;
use candle_shard::{DTensor, checkpoint, observe, strict};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;
use std::panic::Location;
use std::path::Path;
use std::rc::Rc;

/// What the runs of a proof have in common.
pub(super) struct Subject {
    pub(super) program: ModelProgram,
    pub(super) inputs: Vec<ModelInput>,
    pub(super) plans: Vec<Plan>,
    /// The axes that shard the rows of inputs.
    pub(super) rows: Vec<String>,
    /// The axes that shard units.
    pub(super) units: Vec<String>,
    pub(super) unit_options: FullyShardOptions,
    pub(super) seed: u64,
    pub(super) optimizer: Option<MakeOptimizer>,
    /// The number of steps before a checkpoint.
    pub(super) steps: u64,
    /// Whether replicas of a pipeline are averaged behind its steps.
    pub(super) is_beside: bool,
    /// Whether the ranks of units sum gradients only in the last pass of a step.
    pub(super) is_unsynced: bool,
}

/// The bound on the norm of the gradients.
const MOST: f64 = 0.5;

/// A large `eps`, so that gradients of roundings do not become steps of the size of the learning rate.
const OPTIONS: ParamsAdamW = ParamsAdamW { lr: 0.05, beta1: 0.9, beta2: 0.95, eps: 1e-2, weight_decay: 0.01 };

/// A model on this rank, with its optimizer.
struct ModelTrainer<'a> {
    subject: &'a Subject,
    setup: &'a Setup,
    /// The mesh with all axes.
    whole: DeviceMesh,
    /// The mesh of the model, without the axes of stages and replicas.
    mesh: DeviceMesh,
    replicas: Option<ProcessGroup>,
    model: RankModel,
    parameters: Parameters,
    /// The float inputs of a function, which get gradients.
    leaves: Vec<(String, DTensor, Var)>,
    /// The average over the replicas, where the pipeline does not make it.
    average: Option<DataParallel>,
    optimizer: Box<dyn Optimizer>,
}

/// The model, built on this rank.
enum RankModel {
    Layers { loss: LossFn },
    Graph { runtime: Box<Runtime>, reduction: Option<LossReduction> },
    Function { inputs: Vec<DTensor> },
}

/// Trains for some steps and saves the state in `folder`.
pub(super) fn train(
    subject: &Subject,
    setup: &Setup,
    folder: &Path,
    ctx: &RankContext,
) -> Result<Trajectory> {
    let mut trainer = ModelTrainer::new(subject, setup, ctx)?;
    let mut trajectory = Trajectory::default();
    for step in 0..subject.steps {
        trainer.step(step, &mut trajectory)?;
    }
    trainer.end(&mut trajectory)?;
    if setup.resume.is_some() {
        trainer.save(folder)?;
    }
    Ok(trajectory)
}

/// Makes one more step after those of [`train`], from its checkpoint if there is one, and otherwise from the start.
pub(super) fn resume(
    subject: &Subject,
    setup: &Setup,
    folder: Option<&Path>,
    ctx: &RankContext,
) -> Result<Trajectory> {
    let mut trainer = ModelTrainer::new(subject, setup, ctx)?;
    let mut trajectory = Trajectory::default();
    match folder {
        Some(folder) => trainer.load(folder)?,
        None => (0..subject.steps).try_for_each(|step| trainer.step(step, &mut Trajectory::default()))?,
    }
    trainer.step(subject.steps, &mut trajectory)?;
    trainer.end(&mut trajectory)?;
    Ok(trajectory)
}

/// Runs only the forward pass of the first step, and returns the whole results of its ops with their names and lines.
pub(super) fn forward(subject: &Subject, setup: &Setup, ctx: &RankContext) -> Result<Trajectory> {
    let trainer = ModelTrainer::new(subject, setup, ctx)?;
    let found = Rc::new(RefCell::new((Trajectory::default(), Ok(()))));
    let rows = trainer.rows(0);
    let (list, mode) = (found.clone(), Mode::TrainRows { step: 0, first_row: rows.start });
    let see = move |op: &'static str, site: &'static Location<'static>, result: &DTensor| {
        let (trajectory, outcome) = &mut *list.borrow_mut();
        if outcome.is_ok() {
            let name = format!("result of op {}, {op} at {}:{}", trajectory.len(), site.file(), site.line());
            *outcome = trajectory.whole(name, result);
        }
    };
    observe(see, || match &trainer.model {
        RankModel::Layers { loss } => Ok(loss(&trainer.inputs(&rows)?, mode).map(drop)?),
        RankModel::Function { inputs } => trainer.function(inputs).map(drop),
        RankModel::Graph { .. } => Ok(()),
    })?;
    let (trajectory, outcome) = found.replace((Trajectory::default(), Ok(())));
    outcome?;
    Ok(trajectory)
}

/// Makes one step on a rank of a simulated group. Returns the mesh and the calls between the forward pass and the step of the
/// optimizer.
pub(super) fn communication(
    subject: &Subject,
    setup: &Setup,
    group: &ProcessGroup,
) -> Result<(DeviceMesh, Vec<Event>)> {
    if setup.size_of(PIPELINE) > 1 {
        let reason =
            "the messages between stages cannot be simulated; give a budget to the model in one stage";
        return Err(candle_dist::Error::Unsupported(reason.into()).into());
    }
    let mut trainer = ModelTrainer::on(subject, setup, group)?;
    let (made, events) = Log::of(|| trainer.train(0));
    made?;
    Ok((trainer.whole, events))
}

impl<'a> ModelTrainer<'a> {
    fn new(subject: &'a Subject, setup: &'a Setup, ctx: &RankContext) -> Result<Self> {
        Self::on(subject, setup, ctx.group())
    }

    fn on(subject: &'a Subject, setup: &'a Setup, group: &ProcessGroup) -> Result<Self> {
        let axes: Vec<(&str, usize)> = setup.axes.iter().map(|(name, size)| (name.as_str(), *size)).collect();
        let whole = DeviceMesh::new(group, &axes)?;
        let outer = |name: &&str| [PIPELINE, REPLICAS].contains(name);
        let inner: Vec<&str> = axes.iter().map(|(name, _)| *name).filter(|name| !outer(name)).collect();
        let mesh = match inner.is_empty() {
            true => DeviceMesh::new(&group.subgroup(&[group.rank()])?, &[("rank", 1)])?,
            false => whole.axes(&inner)?,
        };
        let replicas = match setup.size_of(REPLICAS) {
            1 => None,
            _ => Some(whole.axis_group(REPLICAS)?.clone()),
        };
        let mut leaves = Vec::new();
        let at = (&whole, replicas.as_ref());
        let (model, parameters) = match &subject.program {
            ModelProgram::Layers(build) => {
                let vb = Self::builder(subject, setup, &mesh)?;
                (RankModel::Layers { loss: build(&vb)? }, vb.finish()?)
            }
            ModelProgram::Graph(declare) => {
                let vb = Self::builder(subject, setup, &mesh)?;
                // A stage may lack modules that the plan names.
                let (runtime, reduction) = Self::piped(subject, setup, at, declare(), &vb)?;
                (RankModel::Graph { runtime, reduction }, vb.built())
            }
            ModelProgram::PlainGraph(declare) => {
                let vb = plain_builder(subject.seed, &mesh, setup.dtype);
                let (runtime, reduction) = Self::piped(subject, setup, at, declare(), &vb)?;
                let parameters = Parameters::replicated(&mesh, &runtime.named_vars()?)?;
                (RankModel::Graph { runtime, reduction }, parameters)
            }
            ModelProgram::Function(_) => {
                let rows = setup.rows(0, replicas.as_ref().map_or(0, ProcessGroup::rank));
                let inputs = subject.on_mesh(setup, &mesh, &rows)?;
                let leaf = |(x, input): (DTensor, &ModelInput)| -> Result<DTensor> {
                    if !x.dtype().is_float() {
                        return Ok(x);
                    }
                    let (x, var) = x.to_var()?;
                    leaves.push((input.name.clone(), x.clone(), var));
                    Ok(x)
                };
                let inputs = inputs.into_iter().zip(&subject.inputs).map(leaf).collect::<Result<_>>()?;
                (RankModel::Function { inputs }, Parameters::default())
            }
        };
        let optimizer: Box<dyn Optimizer> = match &subject.optimizer {
            Some(make) => make(&parameters)?,
            None if matches!(setup.dtype, DType::F16 | DType::BF16) => {
                Box::new(AdamW::with_master_weights(&parameters, OPTIONS)?)
            }
            None => Box::new(AdamW::new(&parameters, OPTIONS)?),
        };
        if let Some(rounded) = setup.rounded {
            // Fresh weights of another dtype are other draws.
            let drawn = Setup { dtype: rounded, rounded: None, ..setup.clone() };
            let drawn = ModelTrainer::on(subject, &drawn, group)?;
            // Weights that stay codes in one dtype are parameters in others.
            let drawn: HashMap<&str, &Parameter> =
                drawn.parameters.iter().map(|from| (from.name.as_str(), from)).collect();
            for p in parameters.iter() {
                if let Some(from) = drawn.get(p.name.as_str()) {
                    p.var.set(&from.var.to_dtype(p.var.dtype())?)?;
                }
            }
        }
        let averages = matches!(model, RankModel::Layers { .. })
            || matches!(model, RankModel::Graph { .. }) && subject.is_beside;
        let average = match replicas.as_ref().filter(|_| averages) {
            Some(replicas) => {
                Some(DataParallel::new(replicas, &parameters.named_vars(), &DataParallelOptions::default())?)
            }
            None => None,
        };
        Ok(Self { subject, setup, whole, mesh, replicas, model, parameters, leaves, average, optimizer })
    }

    fn builder(subject: &Subject, setup: &Setup, mesh: &DeviceMesh) -> Result<MeshVarBuilder> {
        let (plan, device) = (subject.plans[setup.plan].clone(), mesh.axis_group(0)?.device());
        let vb = MeshVarBuilder::fresh(subject.seed, mesh, plan, setup.dtype, device)?;
        let options = subject.unit_options.param_dtype(setup.compute);
        Ok(subject.units.iter().try_fold(vb, |vb, axis| vb.fully_shard(axis, options))?)
    }

    /// Builds this rank's stages of a pipeline; returns how its loss is reduced, too.
    fn piped<B: Scope>(
        subject: &Subject,
        setup: &Setup,
        (whole, replicas): (&DeviceMesh, Option<&ProcessGroup>),
        graph: PipeBuilder<B>,
        scope: &B,
    ) -> Result<(Box<Runtime>, Option<LossReduction>)> {
        let (kind, microbatches, _) = setup.schedule.unwrap_or((super::FIRST, 1, KEEP));
        let schedule = kind.schedule(setup.size_of(PIPELINE), microbatches, kind.stages_per_rank())?;
        let pipe = graph.finish(EqualCount(schedule.stages()))?;
        let line = match whole.names().iter().any(|name| *name == PIPELINE) {
            true => whole.axis_group(PIPELINE)?.clone(),
            false => {
                let all = whole.group()?;
                all.subgroup(&[all.rank()])?
            }
        };
        let runtime = Runtime::new(&pipe, &schedule, &line, scope, line.device())?;
        let runtime = match replicas {
            Some(replicas) if subject.is_beside => runtime.beside(replicas)?,
            Some(replicas) => runtime.with_replicas(replicas, &DataParallelOptions::default())?,
            None => runtime,
        };
        let reduction = pipe.info().graph.loss.map(|loss| loss.reduction);
        Ok((Box::new(runtime), reduction))
    }

    /// Makes a step of the optimizer, and evaluates after it.
    fn step(&mut self, step: u64, trajectory: &mut Trajectory) -> Result<()> {
        let (loss, mut grads) = self.gradients(step)?;
        if let Some(loss) = loss {
            trajectory.number(format!("loss in step {step}"), loss);
        }
        // Every rank of the mesh has a gradient or none has.
        for p in self.parameters.iter() {
            // A table may keep its gradient by rows.
            let grad = match dense_rows(&p.var)? {
                Some(grad) => Some(DTensor::from_local_with_spec(grad, p.tensor.spec().clone())?),
                None => p.grad(&grads)?,
            };
            if let Some(grad) = grad {
                trajectory.whole(format!("gradient in step {step} of {}", p.name), &grad)?;
            }
        }
        for (name, x, var) in &self.leaves {
            if let Some(grad) = grads.get(var) {
                let grad =
                    DTensor::from_local_with_spec(grad.detach().to_dtype(x.dtype())?, x.spec().clone())?;
                trajectory.whole(format!("gradient of {name}"), &grad)?;
            }
        }
        if self.parameters.is_empty() && !matches!(self.model, RankModel::Graph { .. }) {
            return Ok(());
        }
        let norm = self.clip()?.clip(&self.parameters.named_vars(), &mut grads)?;
        trajectory.number(format!("norm of the gradients in step {step}"), norm);
        self.parameters.iter().try_for_each(|p| take_rows(&p.var, &mut grads))?;
        self.optimizer.step(&grads)?;
        if let Some(loss) = self.evaluate(step)? {
            trajectory.number(format!("evaluation after step {step}"), loss);
        }
        Ok(())
    }

    /// Makes a step of the optimizer, and nothing more.
    fn train(&mut self, step: u64) -> Result<()> {
        let (_, mut grads) = self.gradients(step)?;
        if !self.parameters.is_empty() {
            self.clip()?.clip(&self.parameters.named_vars(), &mut grads)?;
            self.parameters.iter().try_for_each(|p| take_rows(&p.var, &mut grads))?;
            self.optimizer.step(&grads)?;
        }
        Ok(())
    }

    /// Adds the values of the parameters.
    fn end(&self, trajectory: &mut Trajectory) -> Result<()> {
        for p in self.parameters.iter() {
            trajectory.whole(format!("value of {}", p.name), &p.tensor)?;
        }
        Ok(())
    }

    /// Returns the loss of the whole batch, where this rank knows it, and the complete gradients.
    fn gradients(&self, step: u64) -> Result<(Option<f64>, GradStore)> {
        let rows = self.rows(step);
        match &self.model {
            RankModel::Layers { loss } => {
                let mut first = rows.start;
                let (mut sum, mut losses) = (GradAccumulator::new(&self.parameters.vars()), 0.0);
                for len in microbatch_sizes(rows.len(), self.setup.passes) {
                    let inputs = self.inputs(&(first..first + len))?;
                    let made = self.strictly(|| loss(&inputs, Mode::TrainRows { step, first_row: first }))?;
                    losses += number(&made)? * len as f64;
                    first += len;
                    if !self.subject.is_unsynced {
                        sum.add_weighted(&self.parameters.backward(&made)?, len as f64)?;
                        continue;
                    }
                    // Passes count alike, so each loss has its share of the rows.
                    let share = (len * self.setup.passes) as f64 / rows.len() as f64;
                    let made = self.strictly(|| made.mul(share))?;
                    sum.add(&if first < rows.end { no_sync(|| made.backward()) } else { made.backward() }?)?;
                }
                let mut grads = sum.mean()?;
                if self.subject.is_unsynced {
                    self.parameters.reduce(&mut grads)?;
                }
                if let Some(average) = &self.average {
                    average.reduce_weighted(&mut grads, rows.len() as f64)?;
                }
                Ok((Some(self.all_rows(losses)? / self.setup.batch(step) as f64), grads))
            }
            RankModel::Function { inputs } => {
                let made = self.function(inputs)?;
                Ok((Some(number(&made)?), made.backward()?))
            }
            RankModel::Graph { runtime, reduction } => {
                let keep = self.setup.schedule.map_or(KEEP, |(_, _, keep)| keep).iter().copied().cycle();
                let keep: Vec<Keep> = keep.take(runtime.info().stages.len()).collect();
                let options = StepOptions::default().step(step).first_row(rows.start).keep(keep);
                let batch =
                    self.subject.microbatches(self.setup, &rows, self.mesh.axis_group(0)?.device())?;
                let mut made = self.strictly(|| runtime.forward_backward(&batch, &options))?;
                let loss = runtime.loss(&made)?;
                let made = &mut made.step;
                self.parameters.reduce(&mut made.grads)?;
                match (&self.average, reduction) {
                    // The mean of means over unlike numbers of rows.
                    (Some(average), Some(LossReduction::Mean)) => {
                        average.reduce_weighted(&mut made.grads, rows.len() as f64)?;
                    }
                    (Some(average), _) => average.reduce(&mut made.grads)?,
                    (None, _) => {}
                }
                Ok((Some(loss), std::mem::take(&mut made.grads)))
            }
        }
    }

    /// Returns the loss of the whole batch of a step in evaluation, where this rank knows it.
    fn evaluate(&self, step: u64) -> Result<Option<f64>> {
        let rows = self.rows(step);
        match &self.model {
            RankModel::Layers { loss } => {
                let inputs = self.inputs(&rows)?;
                let made = self.strictly(|| loss(&inputs, Mode::Eval))?;
                self.average.iter().try_for_each(DataParallel::share_changed_rows)?;
                let sum = self.all_rows(number(&made)? * rows.len() as f64)?;
                Ok(Some(sum / self.setup.batch(step) as f64))
            }
            RankModel::Function { .. } => Ok(None),
            RankModel::Graph { runtime, .. } => {
                let batch =
                    self.subject.microbatches(self.setup, &rows, self.mesh.axis_group(0)?.device())?;
                let made = runtime.evaluate(&batch, &StepOptions::default().first_row(rows.start))?;
                self.average.iter().try_for_each(DataParallel::share_changed_rows)?;
                runtime.share_changed_rows()?;
                Ok(Some(runtime.loss(&made)?))
            }
        }
    }

    /// Returns this replica's rows of the batch of a step.
    fn rows(&self, step: u64) -> Range<usize> {
        self.setup.rows(step, self.replicas.as_ref().map_or(0, ProcessGroup::rank))
    }

    /// Returns the sum over the replicas.
    fn all_rows(&self, sum: f64) -> Result<f64> {
        let Some(replicas) = &self.replicas else { return Ok(sum) };
        let all = replicas.all_reduce(&Tensor::new(&[sum], &Device::Cpu)?, ReduceOp::Sum)?;
        Ok(all.to_vec1::<f64>()?[0])
    }

    fn clip(&self) -> Result<ClipGradNorm> {
        let clip = self.parameters.clip_grad_norm(MOST)?;
        Ok(match &self.model {
            RankModel::Graph { runtime, .. } => runtime.clip_grad_norm(clip),
            _ => clip,
        })
    }

    fn function(&self, inputs: &[DTensor]) -> Result<DTensor> {
        let ModelProgram::Function(f) = &self.subject.program else {
            return Err(candle_core::Error::msg("a function without its code").into());
        };
        Ok(self.strictly(|| f(inputs))?)
    }

    fn strictly<R>(&self, f: impl FnOnce() -> R) -> R {
        if self.setup.strict { strict(f) } else { f() }
    }

    /// Returns these rows of the inputs on the mesh.
    fn inputs(&self, rows: &Range<usize>) -> Result<Vec<DTensor>> {
        self.subject.on_mesh(self.setup, &self.mesh, rows)
    }

    /// Saves the first replica.
    fn save(&self, folder: &Path) -> Result<()> {
        if self.replicas.as_ref().is_some_and(|replicas| replicas.rank() > 0) {
            return Ok(());
        }
        let tensors = [self.parameters.named_tensors(), self.optimizer.state()?].concat();
        match &self.model {
            RankModel::Graph { .. } => {
                // The ranks of all stages of this replica.
                let axes: Vec<&str> =
                    self.whole.names().iter().map(String::as_str).filter(|name| *name != REPLICAS).collect();
                Ok(checkpoint::save_stages(folder, self.whole.axes(&axes)?.group()?, &tensors)?)
            }
            _ => Ok(checkpoint::save(folder, &self.mesh, &tensors)?),
        }
    }

    fn load(&mut self, folder: &Path) -> Result<()> {
        self.parameters.load(folder)?;
        Ok(self.optimizer.load(folder)?)
    }
}

/// Returns a loss as a number. Every rank of its mesh calls it.
fn number(loss: &DTensor) -> Result<f64> {
    Ok(loss.detach().full_tensor()?.to_dtype(DType::F64)?.to_scalar::<f64>()?)
}
