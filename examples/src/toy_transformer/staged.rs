//! Training with pipeline and data parallelism, and stages on meshes of their own.

use std::collections::BTreeMap;

use anyhow::Context;
use candle_core::DType;
use candle_dist::comm::{self, CommCounts};
use candle_dist::{DataParallelOptions, RankContext};
use candle_nn::Optimizer;
use candle_pipe::schedule::{Schedule, Span};
use candle_pipe::{Pipeline, Result, Runtime, StepOptions, Value};
use candle_shard::fsdp::FullyShardOptions;
use candle_shard::nn::MeshVarBuilder;
use serde::{Deserialize, Serialize};
use test_utils::toy::Transformer;

use super::args::{Args, RunName};
use super::corpus::Corpus;
use super::outcome::RunOutcome;
use super::sharded::whole_grads;
use super::training::{Training, optimizer};
use crate::comm::CommStat;
use crate::launch::{Bits, Ranks, gather};
use crate::pipeline;
use crate::progress::Progress;

/// The last steps whose times are kept.
const MEASURED_STEPS: usize = 50;

/// Trains the model on the mesh of `args`; rank 0 returns the outcome. The pipeline axis is the outermost, and the
/// tensor-parallel ranks have adjacent numbers.
pub fn train(
    name: RunName,
    args: &Args,
    corpus: &Corpus,
    ranks: &Ranks<'_>,
) -> anyhow::Result<Option<RunOutcome>> {
    let pipeline = args.pipeline();
    let run = StagedRun { name, args, corpus, pipeline, schedule: pipeline.schedule()? };
    let train = |ctx: &RankContext| gather(ctx.group(), run.train_rank(ctx)?);
    let world = args.pipeline_ranks().context("more ranks than numbers")?;
    ranks.run(world, train)?.flatten().map(|all| run.outcome(&all)).transpose()
}

/// One run of the program, as every rank knows it.
struct StagedRun<'a> {
    name: RunName,
    args: &'a Args,
    corpus: &'a Corpus,
    pipeline: Pipeline,
    schedule: Schedule,
}

/// The report of one rank.
#[derive(Serialize, Deserialize)]
struct RankOutcome {
    /// The bits of the losses of its replica, if the rank has the loss.
    losses: Option<Vec<u64>>,
    ms_per_step: f64,
    page_faults_per_step: Option<f64>,
    /// The logits, if the rank has the output layer of the first pipeline.
    logits: Option<Bits>,
    /// The whole gradients of the first step; empty outside of the first pipeline.
    first_grads: BTreeMap<String, Bits>,
    params: usize,
    comm: Vec<CommStat>,
    /// The computations of the rank in each of the last steps.
    spans: Vec<Vec<Span>>,
    peak: usize,
}

impl StagedRun<'_> {
    /// Combines the reports of the ranks.
    fn outcome(&self, ranks: &[RankOutcome]) -> anyhow::Result<RunOutcome> {
        // The tensor-parallel ranks of a stage know the same loss of their replica.
        let losses: Vec<&[u64]> = ranks.iter().filter_map(|rank| rank.losses.as_deref()).collect();
        let loss = |losses: &&[u64], step: usize| f64::from_bits(losses[step]);
        let mean =
            |step: usize| losses.iter().map(|losses| loss(losses, step)).sum::<f64>() / losses.len() as f64;
        let logits =
            ranks.iter().find_map(|rank| rank.logits.as_ref()).context("no rank has the output layer")?;
        let first_pipeline: Vec<&RankOutcome> =
            self.pipeline.first_pipeline(ranks.len()).map(|rank| &ranks[rank]).collect();
        let measured: Vec<_> = first_pipeline.iter().map(|rank| (rank.spans.clone(), rank.peak)).collect();
        let mut first_grads = BTreeMap::new();
        for (name, grad) in first_pipeline.iter().flat_map(|rank| &rank.first_grads) {
            first_grads.insert(name.clone(), grad.tensor()?);
        }
        Ok(RunOutcome {
            name: self.name,
            world: ranks.len(),
            losses: (0..self.args.steps).map(mean).collect(),
            ms_per_step: ranks.iter().map(|rank| rank.ms_per_step).fold(0.0, f64::max),
            page_faults_per_step: ranks.iter().filter_map(|rank| rank.page_faults_per_step).reduce(f64::max),
            logits: logits.tensor()?,
            first_grads,
            params_per_rank: ranks.iter().map(|rank| rank.params).collect(),
            comm_per_step: ranks[0].comm.clone(),
            pictures: Vec::new(),
            pipeline: Some(pipeline::stat(&self.pipeline, &measured)?),
        })
    }

    fn train_rank(&self, ctx: &RankContext) -> Result<RankOutcome> {
        let (args, Pipeline { pp, dp, .. }, device) = (self.args, self.pipeline, ctx.device());
        let axes = args.stage_axes();
        let mesh = ctx.mesh(&[&[("pp", pp), ("dp", dp)], &axes[..]].concat())?;
        let stage = mesh.axes(&axes.map(|(axis, _)| axis))?;
        let replica = mesh.local_rank("dp")?;
        let is_sequence_parallel = self.name.is_sequence_parallel();
        let plan = Transformer::plan_of(&args.model_args(), "tp", is_sequence_parallel);
        let vb = MeshVarBuilder::fresh(args.seed, &stage, plan, DType::F32, device)?;
        let vb = vb.fully_shard("fsdp", FullyShardOptions::default())?;
        let pipe = args.pipe(is_sequence_parallel).cut(self.pipeline.stages())?;
        let runtime = Runtime::new(&pipe, &self.schedule, mesh.axis_group("pp")?, &vb, device)?;
        let runtime = runtime
            .for_device_of(ctx)?
            .with_replicas(mesh.axis_group("dp")?, &DataParallelOptions::default())?;
        let parameters = vb.built();
        let clip = match args.clip_norm {
            Some(norm) => Some(runtime.clip_grad_norm(parameters.clip_grad_norm(norm)?)),
            None => None,
        };
        let named = parameters.named_vars();
        let mut optimizer = optimizer(parameters.vars(), args)?;
        let has_loss = runtime.stages().any(|stage| stage.loss_output().is_some());
        let is_first_pipeline = replica == 0 && stage.coordinate().iter().all(|&rank| rank == 0);
        let progress = if has_loss && is_first_pipeline {
            Progress::new(self.name.as_str(), args.steps)
        } else {
            Progress::silent()
        };

        let (mut first_grads, mut comm) = (BTreeMap::new(), CommCounts::default());
        let (mut spans, mut peak) = (Vec::new(), 0);
        let training = Training::run(args, self.corpus, device, &progress, |step, batch| {
            let (made, counts) = comm::record(|| -> Result<_> {
                let (batch, options) = batch.part(replica, dp, self.pipeline.microbatches, step)?;
                let mut made = runtime.forward_backward(&batch, &options)?;
                let grads = &mut made.step.grads;
                parameters.reduce(grads)?;
                if step == 0 {
                    first_grads = whole_grads(&parameters, grads)?;
                }
                if let Some(clip) = &clip {
                    clip.clip(&named, grads)?;
                }
                optimizer.step(grads)?;
                Ok(made)
            });
            let made = made?;
            comm = counts;
            peak = peak.max(made.peak_activations);
            if step as usize + MEASURED_STEPS >= args.steps {
                spans.push(made.spans);
            }
            match made.step.loss() {
                Ok(loss) => Ok(f64::from(loss.to_scalar::<f32>()?)),
                Err(_) => Ok(f64::NAN),
            }
        })?;
        progress.finish();

        let held_out = self.corpus.held_out(device)?.cut(self.pipeline.microbatches)?;
        let outputs = runtime.evaluate(&held_out, &StepOptions::default())?.step.outputs;
        let parts: Vec<Value> =
            outputs.iter().filter_map(|output| output.get("logits").ok().cloned()).collect();
        let logits = match parts.is_empty() || !is_first_pipeline {
            true => None,
            false => Some(Bits::of(held_out.merge(&parts, None)?.tensor()?)?),
        };
        // All ranks made these whole; only the first pipeline reports them.
        let grads = first_grads.into_iter().filter(|_| is_first_pipeline);
        Ok(RankOutcome {
            losses: has_loss.then(|| training.losses.into_iter().map(f64::to_bits).collect()),
            ms_per_step: training.ms_per_step,
            page_faults_per_step: training.page_faults_per_step,
            logits,
            first_grads: grads.map(|(name, grad)| Ok((name, Bits::of(&grad)?))).collect::<Result<_>>()?,
            params: parameters.local_elem_count(),
            comm: CommStat::all(&comm),
            spans,
            peak,
        })
    }
}
