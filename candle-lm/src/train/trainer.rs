//! The training loop of one rank.

use std::cell::Cell;
use std::fs;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor};
use candle_dist::{
    ClipGradNorm, DataParallelOptions, DeviceMesh, GradAccumulator, InitialSync, ProcessGroup, RankContext,
    ReduceOp, comm,
};
use candle_nn::ParamsAdamW;
use candle_pipe::microbatch::microbatch_sizes;
use candle_pipe::{Pipeline, Runtime};
use candle_shard::fsdp::FullyShardOptions;
use candle_shard::nn::{AdamW, MeshVarBuilder, ParamGroup, Parameter, Parameters};
use serde::{Deserialize, Deserializer, Serialize};

use super::data::{BatchPart, TrainingData};
use super::folder::SaveFolder;
use super::job::Job;
use super::local::{self, LocalReplica};
use super::loop_state::{BestLoss, LoopState};
use super::metrics::UpdateNorm;
use super::preference;
use super::valid;
use crate::adapter::AdapterConfig;
use crate::agree::{self, agreed};
use crate::dtype::DTypeName;
use crate::model::Decoder;
use crate::{EXPERT_AXIS, LAYER_AXIS, TOKEN_AXIS};

/// One step, as all ranks know it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepOutput {
    /// Its number, the first being 0.
    pub step: usize,
    /// The mean loss of all tokens of the batch, before the step; of those of this replica, if replicas train apart.
    #[serde(deserialize_with = "number")]
    pub loss: f64,
    /// The norm of the gradients, before they were bounded.
    #[serde(deserialize_with = "number")]
    pub grad_norm: f64,
    /// The norm of the change of the parameters, relative to their norm, if the job asks for it; 0 for a step that was left out.
    pub update_norm: Option<f64>,
    /// The learning rate.
    pub rate: f64,
    /// The seconds it took.
    pub seconds: f64,
    /// The steps that were left out so far, perhaps this one too: their loss or a gradient was no finite number.
    pub skipped: usize,
    /// The factor of the loss in this step, in f16.
    pub loss_scale: Option<f64>,
    /// Whether a rank was asked to stop.
    pub stops: bool,
    /// The mean loss of the text of `--valid` after the step, where it is due.
    pub valid: Option<f64>,
}

/// Why a training ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TrainEnd {
    /// All steps are made.
    #[default]
    Steps,
    /// The loss of `--valid` was no lower for `--patience` times.
    Patience,
    /// A rank was asked to stop.
    Signal,
}

/// What a rank did.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TrainOutput {
    /// The loss of each step, the same on all ranks.
    #[serde(deserialize_with = "numbers")]
    pub losses: Vec<f64>,
    /// The norm of the gradients of each step, before they were bounded.
    #[serde(deserialize_with = "numbers")]
    pub grad_norms: Vec<f64>,
    /// The loss of the text of `--valid`, each with the steps that were made before.
    #[serde(deserialize_with = "numbers_of_steps")]
    pub valid: Vec<(usize, f64)>,
    /// The seconds in which this rank's part of the model was read.
    pub load: f64,
    /// The seconds of all steps, without saving.
    pub seconds: f64,
    /// The bytes that this rank gave to communication in all steps.
    pub sent: usize,
    /// The parameters that this rank holds as floats.
    pub parameters: usize,
    /// The bytes of all weights that this rank holds, those in blocks too.
    pub weight_bytes: usize,
    /// The gradients of weights that could not be put off where the schedule does so.
    pub weights_at_once: usize,
    /// Why it ended.
    pub end: TrainEnd,
    /// The steps that were left out, also before a stop.
    pub skipped: usize,
    /// The least loss of the text of `--valid`, also before a stop.
    pub best: Option<BestLoss>,
}

/// Reads a number of JSON, which has null for those that are not finite.
fn number<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::NAN))
}

/// Reads numbers as [`number`] does.
fn numbers<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<f64>, D::Error> {
    let read = Vec::<Option<f64>>::deserialize(from)?;
    Ok(read.into_iter().map(|number| number.unwrap_or(f64::NAN)).collect())
}

fn numbers_of_steps<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<(usize, f64)>, D::Error> {
    let read = Vec::<(usize, Option<f64>)>::deserialize(from)?;
    Ok(read.into_iter().map(|(steps, number)| (steps, number.unwrap_or(f64::NAN))).collect())
}

/// Makes all steps of the job, and saves when it is due; shows to `show` that the model is read, and then each step. It ends earlier
/// where the job says so, with a checkpoint.
///
/// Every rank calls it.
///
/// # Errors
/// On every rank: if the loss or the gradients are no numbers any more, or a checkpoint cannot be written; those of the
/// model and of `show`.
pub fn train(
    ctx: &RankContext,
    job: &Job,
    mut show: impl FnMut(Option<StepOutput>) -> Result<()>,
) -> Result<TrainOutput> {
    let began = Instant::now();
    let mut trainer = Trainer::new(ctx, job)?;
    let load = began.elapsed().as_secs_f64();
    show(None)?;
    let (mut losses, mut grad_norms, mut valid) = (Vec::new(), Vec::new(), Vec::new());
    let (mut seconds, mut sent, mut end) = (0.0, 0, TrainEnd::Steps);
    if let Some(made) = late_validation(&mut trainer)? {
        show(Some(made))?;
        valid.extend(made.valid.map(|loss| (job.start, loss)));
        // The checkpoint that the training goes on from has all that ended here.
        end = trainer.end_after(&made, job.start);
    }
    for step in job.steps() {
        if end != TrainEnd::Steps {
            break;
        }
        let (made, counts) = comm::record(|| trainer.step(step));
        let mut made = made?;
        sent += counts.total_bytes();
        losses.push(made.loss);
        grad_norms.push(made.grad_norm);
        seconds += made.seconds;
        let steps = step + 1;
        let mut is_best = false;
        trainer.progress.unvalidated = None;
        if let Some(text) = job.validates_after(steps) {
            // Who is asked to stop has no time for more.
            let loss = if made.stops { None } else { trainer.validation_loss(text)? };
            valid.extend(loss.map(|loss| (steps, loss)));
            (made.valid, made.stops) = (loss, loss.is_none());
            is_best = loss.is_some_and(|loss| trainer.progress.validate(steps, loss));
            trainer.progress.unvalidated = loss.is_none().then_some(made);
        }
        show(Some(made))?;
        end = trainer.end_after(&made, steps);
        let is_kept = end != TrainEnd::Steps || is_best && job.retention.best;
        if job.saves_after(steps) || is_kept && job.save.is_some() {
            trainer.save(steps)?;
        }
    }
    if job.is_local() {
        let replicas = trainer.mesh.axis_group("dp")?;
        losses = local::means(replicas, &losses)?;
        grad_norms = local::means(replicas, &grad_norms)?;
    }
    Ok(TrainOutput {
        losses,
        grad_norms,
        valid,
        load,
        seconds,
        sent,
        parameters: trainer.parameters.local_elem_count(),
        weight_bytes: trainer.weight_bytes,
        weights_at_once: trainer.weights_at_once.get(),
        end,
        skipped: trainer.progress.skipped,
        best: trainer.progress.best,
    })
}

/// Makes up for a validation that a signal left out before the checkpoint, and returns the step that it follows.
fn late_validation(trainer: &mut Trainer<'_>) -> Result<Option<StepOutput>> {
    let job = trainer.job;
    let (Some(made), Some((text, _))) = (job.unvalidated(), &job.valid) else { return Ok(None) };
    let valid = trainer.validation_loss(text)?;
    if let Some(loss) = valid {
        trainer.progress.validate(job.start, loss);
        trainer.progress.unvalidated = None;
    }
    Ok(Some(StepOutput { valid, stops: valid.is_none(), ..made }))
}

/// One rank's part of a model that learns.
pub struct Trainer<'a> {
    pub(super) job: &'a Job,
    pub(super) world: ProcessGroup,
    pub(super) mesh: DeviceMesh,
    /// The axes of it that parameters lie on.
    pub(super) model: DeviceMesh,
    runtime: Runtime,
    pub(super) parameters: Parameters,
    clip: ClipGradNorm,
    pub(super) optimizer: AdamW,
    weight_bytes: usize,
    /// How this replica meets the others, if they train apart.
    pub(super) replica: Option<LocalReplica>,
    /// The ranks that compute the gradients of a step together.
    together: ProcessGroup,
    update_norm: Option<UpdateNorm>,
    pub(super) progress: LoopState,
    /// Where rank 0 saves to.
    pub(super) saves: Option<SaveFolder>,
    weights_at_once: Cell<usize>,
}

impl<'a> Trainer<'a> {
    /// How the training ends after the last of so many steps; [`TrainEnd::Steps`] if it goes on, too.
    fn end_after(&self, made: &StepOutput, steps: usize) -> TrainEnd {
        let has_patience = self.job.patience.is_none_or(|most| self.progress.validations_since_best < most);
        let is_last = steps == self.job.recipe.rate.steps;
        // A loss of the validation text that is owed is one of another run.
        if self.progress.unvalidated.is_some() || made.stops && !is_last {
            TrainEnd::Signal
        } else if made.valid.is_some() && !has_patience && !is_last {
            TrainEnd::Patience
        } else {
            TrainEnd::Steps
        }
    }

    /// Builds this rank's part on the mesh of the job, and takes up what a checkpoint has.
    ///
    /// # Errors
    /// Those of the model and its files.
    pub fn new(ctx: &RankContext, job: &'a Job) -> Result<Self> {
        let (recipe, pipeline) = (&job.recipe, job.pipeline);
        // Before anything is read, since another training may save to the folder.
        let place = job.save.as_ref().filter(|_| ctx.rank() == 0);
        let hold = |folder: &Path| {
            let mut saves = SaveFolder::hold(folder, job.start, &job.damaged)?;
            if job.retention.best {
                saves.check_link()?;
            }
            // The training before may have ended between a checkpoint and its name.
            saves.name_best(&job.retention, job.progress.best.map(|best| best.steps))?;
            Ok(saves)
        };
        let saves = place.map(|(folder, _)| hold(folder)).transpose();
        let mut saves = agreed(ctx.group(), saves)?;
        if let Some((folder, _)) = &job.save {
            // Hosts that have a folder of their own under this name would find out after the training.
            let (probe, is_made) = Self::begin(saves.as_mut(), ctx.group(), folder, job.start)?;
            agreed(ctx.group(), if is_made { Ok(fs::remove_dir(&probe)?) } else { Ok(()) })?;
        }
        ensure_alike(ctx.group(), job)?;
        let Pipeline { pp, dp, cp, ep, tp, .. } = pipeline;
        let mesh =
            ctx.mesh(&[("pp", pp), ("dp", dp), (TOKEN_AXIS, cp), (EXPERT_AXIS, ep), (LAYER_AXIS, tp)])?;
        let plan = Decoder::training_plan(&job.files.config, LAYER_AXIS).with_shares(job.shares.clone());
        let (weights, device) = (job.files.weights.clone(), ctx.device());
        let (seed, dtype) = (recipe.seed, recipe.dtype.into());
        let axes = [("dp", job.fsdp), (TOKEN_AXIS, cp > 1), (EXPERT_AXIS, ep > 1), (LAYER_AXIS, true)];
        let axes: Vec<&str> = axes.into_iter().filter(|(_, has)| *has).map(|(axis, _)| axis).collect();
        let model = mesh.axes(&axes)?;
        let mut vb = MeshVarBuilder::from_weights(weights, seed, &model, plan, dtype, device)?;
        if job.fsdp {
            let options = FullyShardOptions::default().reduce_dtype(DType::F32).foreign_writes(false);
            vb = vb.fully_shard("dp", options)?;
        }
        if !recipe.freeze.is_empty() {
            let frozen = recipe.freeze.clone();
            vb = vb.frozen_where(move |name| frozen.contains(name));
        }
        if !job.files.adapters.is_empty() {
            vb = vb.with_adapters(job.files.adapters.clone())?;
        }
        // Where parameters are cut over the replicas, these compute together; others may train apart.
        let replicas = (!job.fsdp && !job.is_local()).then(|| mesh.axis_group("dp")).transpose()?;
        let pipe = job.declare(replicas)?;
        let runtime = Runtime::new(&pipe, &pipeline.schedule()?, mesh.axis_group("pp")?, &vb, device)?;
        let mut runtime = runtime.for_device_of(ctx)?;
        // Where parameters are cut over the replicas, gradients are those of the whole batch.
        if let Some(replicas) = replicas {
            // Replicas have read the same files.
            let options = DataParallelOptions::default().start(InitialSync::Verify);
            runtime = runtime.with_replicas(replicas, &options)?;
        }
        let parameters = vb.built();
        let bytes = |of: &Parameter| of.var.elem_count() * of.var.dtype().size_in_bytes();
        let weight_bytes = parameters.iter().map(bytes).sum::<usize>() + vb.quantized_bytes();
        let clip = |norm| -> Result<_> { Ok(runtime.clip_grad_norm(parameters.clip_grad_norm(norm)?)) };
        let norm = clip(f64::MAX)?;
        // Without a bound the norm still tells whether the gradients are numbers.
        let clip = if recipe.clip_norm > 0.0 { clip(recipe.clip_norm)? } else { norm.clone() };
        // As Llama 2 was trained.
        let weight_decay = recipe.weight_decay;
        let params = ParamsAdamW { lr: recipe.rate.peak, beta1: 0.9, beta2: 0.95, eps: 1e-5, weight_decay };
        // As PEFT has it: factors `B`, magnitudes and what else has one dim. Tables have factors of other names.
        let is_fast = |of: &Parameter| of.name.contains(".lora_B.") || of.tensor.dims().len() == 1;
        let groups = match recipe.lora_plus {
            None => vec![ParamGroup::new(&parameters, params)],
            Some(ratio) => {
                let (fast, slow) = parameters.partition(is_fast);
                let raised = ParamsAdamW { lr: params.lr * ratio, ..params.clone() };
                vec![ParamGroup::new(&slow, params), ParamGroup::new(&fast, raised)]
            }
        };
        let mut optimizer = AdamW::from_groups(groups.into_iter().map(|group| match recipe.dtype {
            DTypeName::F32 => group,
            DTypeName::Bf16 | DTypeName::F16 => group.with_master_weights(),
        }))?;
        let own = local::load_own(job, &mesh, &parameters)?;
        if let Some(state) = own.as_ref().or(job.optimizer.as_ref()) {
            // The options are those of the recipe, which flags may have changed since.
            let mut lacking = optimizer.load_partial(state)?;
            lacking.retain(|name| !job.thawed.contains(name));
            ensure!(lacking.is_empty(), "{}: there is no state of {}", state.display(), lacking.join(", "));
        }
        let replica = LocalReplica::open(job, [&mesh, &model], &parameters, &optimizer)?;
        let together = match replica {
            Some(_) => mesh.axes(&["pp", TOKEN_AXIS, EXPERT_AXIS, LAYER_AXIS])?.group()?.clone(),
            None => ctx.group().clone(),
        };
        let update_norm = job.update_norm.then(|| UpdateNorm::new(&parameters, &optimizer, norm));
        let mut progress = job.progress;
        if recipe.dtype == DTypeName::F16 {
            progress.scaler.get_or_insert_default();
        }
        Ok(Self {
            job,
            world: ctx.group().clone(),
            mesh,
            model,
            runtime,
            parameters,
            clip,
            optimizer,
            weight_bytes,
            replica,
            together,
            update_norm,
            progress,
            saves,
            weights_at_once: Cell::new(0),
        })
    }

    /// The mean loss of a text that nothing is learned from; `None` if a rank is asked to stop before.
    fn validation_loss(&self, text: &TrainingData) -> Result<Option<f64>> {
        valid::loss(self.job, text, &self.world, &self.mesh, &self.runtime)
    }

    /// What this rank holds.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// The optimizer of what this rank holds.
    pub fn optimizer(&self) -> &AdamW {
        &self.optimizer
    }

    /// What the loop knows after the last step.
    pub fn progress(&self) -> &LoopState {
        &self.progress
    }

    /// The mean loss of the whole batch of a step, and the gradients of what this rank holds, which are complete. The batch is that of
    /// this replica, if replicas train apart.
    ///
    /// # Errors
    /// Those of the runtime.
    pub fn gradients(&self, step: usize) -> Result<(f64, GradStore)> {
        let (Job { recipe, accumulate, .. }, pipeline) = (self.job, self.job.pipeline);
        let batch = self.job.text.batch(recipe, step, self.world.device())?;
        let (own, stages) = (part_of(&self.mesh, self.job)?, self.mesh.axis_group("pp")?);
        let (own, replicas, all, mut first) = match &self.replica {
            None => (own, pipeline.parts(), recipe.batch, 0),
            Some(_) => {
                let all = recipe.batch / pipeline.dp;
                (own.within_replica(pipeline.ep), pipeline.ep, all, self.mesh.local_rank("dp")? * all)
            }
        };
        let batch = if self.replica.is_some() { batch.counted_in(first..first + all)? } else { batch };
        let scale = self.progress.scaler.map_or(1.0, |scaler| scaler.scale());
        let (mut accumulator, mut loss) = (GradAccumulator::new(&self.parameters.vars()), 0.0);
        for rows in microbatch_sizes(all, *accumulate) {
            let share = rows as f64 / all as f64;
            let (cut, options) =
                preference::part(&self.runtime, stages, &batch, first..first + rows, &own, step as u64)?;
            let options = options.loss_scale(scale).outputs(false);
            first += rows;
            let made = self.runtime.forward_backward(&cut, &options)?;
            self.weights_at_once.set(self.weights_at_once.get() + made.weights_at_once);
            let made = made.step;
            if let Ok(part) = made.loss() {
                loss += share * f64::from(part.to_scalar::<f32>()?);
            }
            accumulator.add_weighted(&made.grads, share)?;
        }
        let mut grads = accumulator.mean()?;
        self.parameters.reduce(&mut grads)?;
        if scale != 1.0 {
            for var in self.parameters.vars() {
                if let Some(grad) = grads.get(&var) {
                    let grad = grad.affine(1.0 / scale, 0.0)?;
                    grads.insert(&var, grad);
                }
            }
        }
        // All ranks of the last stages have a loss: their replica's share of the mean, or the mean if they compute together.
        let losses = self.together.all_reduce(&Tensor::new(loss, self.world.device())?, ReduceOp::Sum)?;
        Ok((losses.to_scalar::<f64>()? / (replicas * pipeline.cp * pipeline.tp) as f64, grads))
    }

    /// Makes a step. If the loss or a gradient is no finite number on some rank, all ranks leave the step out, which changes neither the
    /// model nor the optimizer.
    ///
    /// # Errors
    /// On all ranks, if more steps in a row were left out than the job allows; those of the runtime.
    pub fn step(&mut self, step: usize) -> Result<StepOutput> {
        let began = Instant::now();
        let loss_scale = self.progress.scaler.map(|scaler| scaler.scale());
        let (loss, mut grads) = self.gradients(step)?;
        let grad_norm = self.clip.clip(&self.parameters.named_vars(), &mut grads)?;
        let is_finite = loss.is_finite() && grad_norm.is_finite();
        let stops = self.job.stop.load(Ordering::Relaxed);
        let [skips, stops, is_lost] = any(&self.world, [!is_finite, stops, !loss.is_finite()])?;
        // Replicas that train apart have numbers of their own, and decide by those that are none.
        let told = |number: f64, is_none: bool| if is_none && number.is_finite() { f64::NAN } else { number };
        let rate = self.job.recipe.rate.at(step);
        let mut update_norm = self.update_norm.as_ref().map(|_| 0.0);
        if skips {
            let numbers = [told(loss, is_lost), told(grad_norm, !is_lost)];
            self.progress.skip(step, numbers, self.job.skip_nonfinite)?;
        } else {
            let rates = [rate].into_iter().chain(self.job.recipe.lora_plus.map(|ratio| rate * ratio));
            self.optimizer.set_learning_rates(&rates.collect::<Vec<_>>())?;
            match &self.update_norm {
                Some(measured) => update_norm = Some(measured.step(&mut self.optimizer, &grads)?),
                None => self.optimizer.step(&grads)?,
            }
            self.progress.make();
        }
        if let Some(replica) = &mut self.replica {
            let met = replica.step(step + 1 == self.job.recipe.rate.steps);
            met.with_context(|| format!("replicas cannot meet after step {step}"))?;
        }
        let (skipped, seconds) = (self.progress.skipped, began.elapsed().as_secs_f64());
        Ok(StepOutput {
            step,
            loss,
            grad_norm,
            update_norm,
            rate,
            seconds,
            skipped,
            loss_scale,
            stops,
            valid: None,
        })
    }
}

/// Returns what holds on any rank.
pub(super) fn any<const N: usize>(world: &ProcessGroup, mine: [bool; N]) -> Result<[bool; N]> {
    let mine = Tensor::new(mine.map(|is| f32::from(u8::from(is))).as_slice(), world.device())?;
    let all = world.all_reduce(&mine, ReduceOp::Max)?.to_vec1::<f32>()?;
    Ok(std::array::from_fn(|at| all.get(at).is_some_and(|is| *is > 0.0)))
}

/// Refuses hosts that have other files under the names of the job.
///
/// # Errors
/// On every rank alike, with the file and the first rank that has another one.
fn ensure_alike(world: &ProcessGroup, job: &Job) -> Result<()> {
    let mut files = agreed(world, job.files.traits())?;
    let of_adapter = job.lora.clone().map(|lora| AdapterConfig { base: None, ..lora });
    files.extend([
        (job.text.flag().into(), serde_json::to_string(&job.text.stamp())?),
        ("the adapter".into(), format!("{of_adapter:?}")),
        ("the model that the adapter changes".into(), serde_json::to_string(&job.base)?),
        ("--adapter".into(), serde_json::to_string(&job.begins_with)?),
    ]);
    if let Some((text, _)) = &job.valid {
        files.push(("--valid".into(), serde_json::to_string(&text.stamp())?));
    }
    agree::ensure_alike(world, &files)
}

/// Which part of a batch this rank of the mesh has.
pub(super) fn part_of(mesh: &DeviceMesh, job: &Job) -> Result<BatchPart> {
    BatchPart::of(mesh, &job.pipeline, job.fsdp, job.is_packed(), job.recipe.dpo)
}
