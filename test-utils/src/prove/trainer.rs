//! A model that trains in a set-up, on one rank.
use super::model::{Input, LossFn, Program};
use super::setup::Setup;
use super::trajectory::Trajectory;
use super::{PIPELINE, REPLICAS, TOKENS};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::comm::{Event, Log};
use candle_dist::{
    ClipGradNorm, DataParallel, DataParallelOptions, DeviceMesh, GradAccumulator, ProcessGroup, RankContext, ReduceOp,
};
use candle_nn::ParamsAdamW;
use candle_pipe::microbatch::{Microbatches, Splitter, TensorChunkSpec, microbatch_sizes};
use candle_pipe::{EqualCount, Keep, Kwargs, Reduction, Result, Runtime, StepOptions};
use candle_shard::fsdp::FullyShardOptions;
use candle_shard::nn::{AdamW, Mode, Parameters, ShardedVarBuilder};
use candle_shard::parallel::Plan;
use candle_shard::{DTensor, Placement, Replicate, Shard, checkpoint, observe, strict};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::Location;
use std::path::Path;
use std::rc::Rc;

/// What the runs of a proof have in common.
pub(super) struct Subject {
    pub(super) program: Program,
    pub(super) inputs: Vec<Input>,
    pub(super) plans: Vec<Plan>,
    /// The axes that shard the rows of inputs.
    pub(super) rows: Vec<String>,
    /// The axes that shard units.
    pub(super) units: Vec<String>,
    pub(super) unit_options: FullyShardOptions,
    pub(super) seed: u64,
}

/// The number of steps before a checkpoint.
const STEPS: u64 = 2;

/// The bound on the norm of the gradients.
const MOST: f64 = 0.5;

/// A large `eps`, so that gradients of roundings do not become steps of the size of the learning rate.
const OPTIONS: ParamsAdamW = ParamsAdamW { lr: 0.05, beta1: 0.9, beta2: 0.95, eps: 1e-2, weight_decay: 0.01 };

/// A model on this rank, with its optimizer.
struct Trainer<'a> {
    subject: &'a Subject,
    setup: &'a Setup,
    /// The mesh with all axes.
    whole: DeviceMesh,
    /// The mesh of the model, without the axes of stages and replicas.
    mesh: DeviceMesh,
    replicas: Option<ProcessGroup>,
    /// This replica's rows of the batch.
    rows: Range<usize>,
    model: Built,
    parameters: Parameters,
    /// The float inputs of a function, which get gradients.
    leaves: Vec<(String, DTensor, Var)>,
    optimizer: AdamW,
}

/// The model, built on this rank.
enum Built {
    Layers { loss: LossFn, average: Option<DataParallel> },
    Graph { runtime: Box<Runtime>, reduction: Option<Reduction> },
    Function { inputs: Vec<DTensor> },
}

/// Trains for some steps and saves the state in `folder`.
pub(super) fn train(subject: &Subject, setup: &Setup, folder: &Path, ctx: &RankContext) -> Result<Trajectory> {
    let mut trainer = Trainer::new(subject, setup, ctx)?;
    let mut trajectory = Trajectory::default();
    for step in 0..STEPS {
        trainer.step(step, &mut trajectory)?;
    }
    trainer.end(&mut trajectory)?;
    if setup.resume.is_some() {
        trainer.save(folder)?;
    }
    Ok(trajectory)
}

/// Makes one more step after those of [`train`], from its checkpoint if there is one, and otherwise from the start.
pub(super) fn resume(subject: &Subject, setup: &Setup, folder: Option<&Path>, ctx: &RankContext) -> Result<Trajectory> {
    let mut trainer = Trainer::new(subject, setup, ctx)?;
    let mut trajectory = Trajectory::default();
    match folder {
        Some(folder) => trainer.load(folder)?,
        None => (0..STEPS).try_for_each(|step| trainer.step(step, &mut Trajectory::default()))?,
    }
    trainer.step(STEPS, &mut trajectory)?;
    trainer.end(&mut trajectory)?;
    Ok(trajectory)
}

/// Runs only the forward pass of the first step, and returns the whole results of its ops with their names and lines.
pub(super) fn forward(subject: &Subject, setup: &Setup, ctx: &RankContext) -> Result<Trajectory> {
    let trainer = Trainer::new(subject, setup, ctx)?;
    let found = Rc::new(RefCell::new((Trajectory::default(), Ok(()))));
    let (list, mode) = (found.clone(), Mode::TrainRows { step: 0, first_row: trainer.rows.start });
    let see = move |op: &'static str, site: &'static Location<'static>, result: &DTensor| {
        let (trajectory, outcome) = &mut *list.borrow_mut();
        if outcome.is_ok() {
            let name = format!("result of op {}, {op} at {}:{}", trajectory.len(), site.file(), site.line());
            *outcome = trajectory.whole(name, result);
        }
    };
    observe(see, || match &trainer.model {
        Built::Layers { loss, .. } => Ok(loss(&trainer.inputs(&trainer.rows)?, mode).map(drop)?),
        Built::Function { inputs } => trainer.function(inputs).map(drop),
        Built::Graph { .. } => Ok(()),
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
        let reason = "the messages between stages cannot be simulated; give a budget to the model in one stage";
        return Err(candle_dist::Error::Unsupported(reason.into()).into());
    }
    let mut trainer = Trainer::on(subject, setup, group)?;
    let (made, events) = Log::of(|| trainer.train(0));
    made?;
    Ok((trainer.whole, events))
}

impl<'a> Trainer<'a> {
    fn new(subject: &'a Subject, setup: &'a Setup, ctx: &RankContext) -> Result<Self> {
        Self::on(subject, setup, ctx.group())
    }

    fn on(subject: &'a Subject, setup: &'a Setup, group: &ProcessGroup) -> Result<Self> {
        let axes: Vec<(&str, usize)> = setup.axes.iter().map(|(name, size)| (name.as_str(), *size)).collect();
        let whole = DeviceMesh::new(group, &axes)?;
        let outer = |name: &&str| [PIPELINE, REPLICAS].contains(name);
        let inner: Vec<&str> = axes.iter().map(|(name, _)| *name).filter(|name| !outer(name)).collect();
        let mesh = whole.axes(&inner)?;
        let replicas = match setup.size_of(REPLICAS) {
            1 => None,
            _ => Some(whole.axis_group(REPLICAS)?.clone()),
        };
        let sizes = microbatch_sizes(setup.batch, setup.size_of(REPLICAS));
        let at = replicas.as_ref().map_or(0, ProcessGroup::rank);
        let first: usize = sizes[..at].iter().sum();
        let rows = first..first + sizes[at];

        let plan = subject.plans[setup.plan].clone();
        let device = group.device();
        let vb = ShardedVarBuilder::fresh(subject.seed, &mesh, plan, setup.dtype, device)?;
        let options = subject.unit_options.param_dtype(setup.compute);
        let vb = subject.units.iter().try_fold(vb, |vb, axis| vb.fully_shard(axis, options))?;
        let mut leaves = Vec::new();
        let model = match &subject.program {
            Program::Layers(build) => Built::Layers { loss: build(&vb)?, average: None },
            Program::Graph(declare) => {
                let (kind, microbatches, _) = setup.schedule.unwrap_or((super::FIRST, 1, Keep::Activations));
                let schedule = kind.schedule(setup.size_of(PIPELINE), microbatches, kind.stages_per_rank())?;
                let pipe = declare().finish(EqualCount(schedule.stages()))?;
                let line = match axes.iter().any(|(name, _)| *name == PIPELINE) {
                    true => whole.axis_group(PIPELINE)?.clone(),
                    false => group.subgroup(&[group.rank()])?,
                };
                let runtime = Runtime::new(&pipe, &schedule, &line, &vb, device)?;
                let runtime = match &replicas {
                    Some(replicas) => runtime.with_replicas(replicas, &DataParallelOptions::default())?,
                    None => runtime,
                };
                Built::Graph {
                    runtime: Box::new(runtime),
                    reduction: pipe.info().graph.loss.map(|loss| loss.reduction),
                }
            }
            Program::Function(_) => {
                let inputs = Self::distribute(subject, setup, &mesh, device, &rows)?;
                let leaf = |(x, input): (DTensor, &Input)| -> Result<DTensor> {
                    if !x.dtype().is_float() {
                        return Ok(x);
                    }
                    let (x, var) = x.to_var()?;
                    leaves.push((input.name.clone(), x.clone(), var));
                    Ok(x)
                };
                Built::Function { inputs: inputs.into_iter().zip(&subject.inputs).map(leaf).collect::<Result<_>>()? }
            }
        };
        let parameters = match &model {
            // A stage may lack modules that the plan names.
            Built::Graph { .. } => vb.built(),
            _ => vb.finish()?,
        };
        let mut optimizer = AdamW::new(&parameters, OPTIONS)?;
        if matches!(setup.dtype, DType::F16 | DType::BF16) {
            optimizer = AdamW::with_master_weights(&parameters, OPTIONS)?;
        }
        if let Some(rounded) = setup.rounded {
            // Fresh weights of another dtype are other draws.
            let drawn = Setup { dtype: rounded, rounded: None, ..setup.clone() };
            let drawn = Trainer::on(subject, &drawn, group)?;
            for (p, from) in parameters.iter().zip(drawn.parameters.iter()) {
                p.var.set(&from.var.to_dtype(p.var.dtype())?)?;
            }
        }
        let mut trainer = Self { subject, setup, whole, mesh, replicas, rows, model, parameters, leaves, optimizer };
        if let (Built::Layers { average, .. }, Some(replicas)) = (&mut trainer.model, &trainer.replicas) {
            let named = trainer.parameters.named_vars();
            *average = Some(DataParallel::new(replicas, &named, &DataParallelOptions::default())?);
        }
        Ok(trainer)
    }

    /// Makes a step of the optimizer, and evaluates after it.
    fn step(&mut self, step: u64, trajectory: &mut Trajectory) -> Result<()> {
        let (loss, mut grads) = self.gradients(step)?;
        if let Some(loss) = loss {
            trajectory.number(format!("loss in step {step}"), loss);
        }
        // Every rank of the mesh has a gradient or none has.
        for p in self.parameters.iter() {
            if let Some(grad) = p.grad(&grads)? {
                trajectory.whole(format!("gradient in step {step} of {}", p.name), &grad)?;
            }
        }
        for (name, x, var) in &self.leaves {
            if let Some(grad) = grads.get(var) {
                let grad = DTensor::from_local_with_spec(grad.detach().to_dtype(x.dtype())?, x.spec().clone())?;
                trajectory.whole(format!("gradient of {name}"), &grad)?;
            }
        }
        if self.parameters.is_empty() && !matches!(self.model, Built::Graph { .. }) {
            return Ok(());
        }
        let norm = self.clip()?.clip(&self.parameters.named_vars(), &mut grads)?;
        trajectory.number(format!("norm of the gradients in step {step}"), norm);
        self.optimizer.step(&grads)?;
        if let Some(loss) = self.evaluate()? {
            trajectory.number(format!("evaluation after step {step}"), loss);
        }
        Ok(())
    }

    /// Makes a step of the optimizer, and nothing more.
    fn train(&mut self, step: u64) -> Result<()> {
        let (_, mut grads) = self.gradients(step)?;
        if !self.parameters.is_empty() {
            self.clip()?.clip(&self.parameters.named_vars(), &mut grads)?;
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
        match &self.model {
            Built::Layers { loss, average } => {
                let mut first = self.rows.start;
                let (mut sum, mut losses) = (GradAccumulator::new(&self.parameters.vars()), 0.0);
                for len in microbatch_sizes(self.rows.len(), self.setup.passes) {
                    let inputs = self.inputs(&(first..first + len))?;
                    let made = self.strictly(|| loss(&inputs, Mode::TrainRows { step, first_row: first }))?;
                    losses += number(&made)? * len as f64;
                    sum.add_weighted(&self.parameters.backward(&made)?, len as f64)?;
                    first += len;
                }
                let mut grads = sum.mean()?;
                if let Some(average) = average {
                    average.reduce_weighted(&mut grads, self.rows.len() as f64)?;
                }
                Ok((Some(self.all_rows(losses)? / self.setup.batch as f64), grads))
            }
            Built::Function { inputs } => {
                let made = self.function(inputs)?;
                Ok((Some(number(&made)?), made.backward()?))
            }
            Built::Graph { runtime, .. } => {
                let keep = self.setup.schedule.map_or(Keep::Activations, |(_, _, keep)| keep);
                let options = StepOptions::default().step(step).first_row(self.rows.start).keep(keep);
                let batch = self.batch()?;
                let mut made = self.strictly(|| runtime.forward_backward(&batch, &options))?.step;
                self.parameters.reduce(&mut made.grads)?;
                Ok((self.of_last_stage(&made)?, made.grads))
            }
        }
    }

    /// Returns the loss of the whole batch in evaluation, where this rank knows it.
    fn evaluate(&self) -> Result<Option<f64>> {
        match &self.model {
            Built::Layers { loss, average } => {
                let inputs = self.inputs(&self.rows)?;
                let made = self.strictly(|| loss(&inputs, Mode::Eval))?;
                average.iter().try_for_each(DataParallel::share_changed_rows)?;
                let sum = self.all_rows(number(&made)? * self.rows.len() as f64)?;
                Ok(Some(sum / self.setup.batch as f64))
            }
            Built::Function { .. } => Ok(None),
            Built::Graph { runtime, .. } => {
                let made = runtime.evaluate(&self.batch()?)?.step;
                runtime.share_changed_rows()?;
                self.of_last_stage(&made)
            }
        }
    }

    /// Returns the loss of a pipeline over all replicas, on the ranks of its last stage.
    fn of_last_stage(&self, step: &candle_pipe::StepResult) -> Result<Option<f64>> {
        let Ok(loss) = step.loss() else { return Ok(None) };
        let loss = loss.to_dtype(DType::F64)?.to_scalar::<f64>()?;
        let reduction = match &self.model {
            Built::Graph { reduction, .. } => *reduction,
            _ => None,
        };
        Ok(Some(match reduction {
            Some(Reduction::Mean) => self.all_rows(loss * self.rows.len() as f64)? / self.setup.batch as f64,
            Some(Reduction::Sum) => self.all_rows(loss)?,
            // A loss that counts is that of all replicas already.
            _ => loss,
        }))
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
            Built::Graph { runtime, .. } => runtime.clip_grad_norm(clip),
            _ => clip,
        })
    }

    fn function(&self, inputs: &[DTensor]) -> Result<DTensor> {
        let Program::Function(f) = &self.subject.program else {
            return Err(candle_core::Error::msg("a function without its code").into());
        };
        Ok(self.strictly(|| f(inputs))?)
    }

    fn strictly<R>(&self, f: impl FnOnce() -> R) -> R {
        if self.setup.strict { strict(f) } else { f() }
    }

    /// Returns these rows of the inputs on the mesh.
    fn inputs(&self, rows: &Range<usize>) -> Result<Vec<DTensor>> {
        let device = self.mesh.axis_group(0)?.device().clone();
        Self::distribute(self.subject, self.setup, &self.mesh, &device, rows)
    }

    fn distribute(
        subject: &Subject,
        setup: &Setup,
        mesh: &DeviceMesh,
        device: &Device,
        rows: &Range<usize>,
    ) -> Result<Vec<DTensor>> {
        let place = |input: &Input, name: &String| -> Placement {
            let dim = match name.as_str() {
                TOKENS => input.tokens,
                name if subject.rows.iter().any(|axis| axis == name) => input.rows,
                _ => None,
            };
            dim.map_or(Replicate, Shard)
        };
        let on_mesh = |input: &Input| -> Result<DTensor> {
            let places: Vec<Placement> = mesh.names().iter().map(|name| place(input, name)).collect();
            Ok(DTensor::distribute(&piece(input, rows, setup, device)?, mesh, &places)?)
        };
        subject.inputs.iter().map(on_mesh).collect()
    }

    /// Returns this replica's rows as microbatches of a pipeline.
    fn batch(&self) -> Result<Microbatches> {
        let device = self.mesh.axis_group(0)?.device().clone();
        let mut kwargs = Kwargs::new();
        let mut specs = BTreeMap::new();
        for input in &self.subject.inputs {
            kwargs.insert(input.name.clone(), piece(input, &self.rows, self.setup, &device)?.into());
            let spec = match input.rows {
                Some(dim) => TensorChunkSpec(dim as i64).into(),
                None => candle_pipe::microbatch::Replicate,
            };
            specs.insert(input.name.clone(), spec);
        }
        let microbatches = self.setup.schedule.map_or(1, |(_, microbatches, _)| microbatches);
        Splitter::new(microbatches).split(&[], &kwargs, None, Some(&specs))
    }

    /// Saves the first replica.
    fn save(&self, folder: &Path) -> Result<()> {
        if self.replicas.as_ref().is_some_and(|replicas| replicas.rank() > 0) {
            return Ok(());
        }
        let tensors = [self.parameters.named_tensors(), self.optimizer.state()?].concat();
        match &self.model {
            Built::Graph { .. } => {
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

/// Returns rows of an input in the dtype of the set-up.
fn piece(input: &Input, rows: &Range<usize>, setup: &Setup, device: &Device) -> Result<Tensor> {
    let some = match input.rows {
        Some(dim) => input.whole.narrow(dim, rows.start, rows.len())?,
        None => input.whole.clone(),
    };
    if !some.dtype().is_float() {
        return Ok(some.to_device(device)?);
    }
    let rounded = some.to_dtype(setup.rounded.unwrap_or(setup.dtype))?;
    Ok(rounded.to_dtype(setup.dtype)?.to_device(device)?)
}

/// Returns a loss as a number. Every rank of its mesh calls it.
fn number(loss: &DTensor) -> Result<f64> {
    Ok(loss.detach().full_tensor()?.to_dtype(DType::F64)?.to_scalar::<f64>()?)
}
