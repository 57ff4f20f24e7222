//! Stages run on the ranks of a group, as a schedule says.
//!
//! Every rank lowers the same schedule to the same program and runs its list of it (`execute.rs`). Tensors are handed over
//! (`wire.rs`); gradients of what stages share, and of replicas of the model, are reduced where the program says
//! (`reduce.rs`). Nothing is probed or agreed upon while it runs: the program, whose sends and receives are in one common
//! order, decides everything.
mod execute;
mod post;
mod reduce;
mod wire;

use crate::graph::{Inputs, Pipe, PipeInfo, Reduction, Scope, Share, Signature, ValueId};
use crate::microbatch::{ChunkSpec, Microbatches, Splitter};
use crate::schedule::{Edges, Lowering, Program, Schedule, Span};
use crate::tape::{Keep, StageModule};
use crate::{Error, Kwargs, Result, Value};
use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor};
use candle_dist::ProcessGroup;
use execute::{Execution, Made};
use itertools::Itertools;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;

/// This rank's stages of a pipe, ready to train and to evaluate.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_dist::World;
/// use candle_nn::{VarBuilder, VarMap};
/// use candle_pipe::graph::{In, PipeBuilder, SplitSpec};
/// use candle_pipe::schedule::ScheduleKind;
/// use candle_pipe::{Kwargs, Result, Runtime};
/// # fn main() -> Result<(), candle_dist::WorldError> {
/// let losses = World::local(2).run(|ctx| -> Result<Option<f32>> {
///     # todo!()
/// })?;
/// # Ok(())
/// # }
/// ```
pub struct Runtime {
    info: PipeInfo,
    signature: Signature,
    stages: BTreeMap<usize, StageModule>,
    training: Program,
    evaluation: Program,
    group: ProcessGroup,
    replicas: Option<ProcessGroup>,
    shared: Vec<Shared>,
    /// Where the parameters lie.
    parameters: HashSet<usize>,
    /// The values that the caller gets.
    results: HashSet<ValueId>,
    splitter: Splitter,
    keep: Keep,
    steps: u64,
}

/// A replicated parameter on the ranks that have copies of it.
struct Shared {
    /// Those ranks, if they are several and this is one of them.
    ranks: Option<ProcessGroup>,
    /// The copy here.
    parameters: Vec<Tensor>,
}

/// What a step gives on one rank.
#[derive(Debug, Default)]
pub struct Step {
    /// The loss of the batch, on the rank of the stage that makes it.
    pub loss: Option<Tensor>,
    /// The model's outputs by name, on the ranks of the stages that make them.
    pub outputs: BTreeMap<String, Value>,
    /// The gradients of this rank's parameters; none after an evaluation.
    pub grads: GradStore,
    /// What this rank computed, in seconds since the step began.
    pub spans: Vec<Span>,
    /// The most passes of stages over microbatches that were open at once: forward done, backward not yet.
    pub peak_activations: usize,
}

/// The inputs of every microbatch.
struct Batch {
    inputs: Vec<Inputs>,
    rows: Vec<Range<usize>>,
}

impl Batch {
    fn new(signature: &Signature, cut: &Microbatches) -> Result<Self> {
        let inputs = cut.iter().map(|(args, kwargs)| signature.bind(args, kwargs)).collect::<Result<_>>()?;
        let ends = cut.rows().iter().scan(0, |end, rows| {
            *end += rows;
            Some(*end - rows..*end)
        });
        Ok(Self { inputs, rows: ends.collect() })
    }

    fn len(&self) -> usize {
        self.rows.len()
    }

    fn rows(&self, microbatch: usize) -> Range<usize> {
        self.rows[microbatch].clone()
    }

    fn input(&self, microbatch: usize, value: ValueId) -> Result<Value> {
        let missing = || Error::Pipe(format!("input {value} is missing"));
        self.inputs[microbatch].get(&value).cloned().ok_or_else(missing)
    }
}

impl Runtime {
    /// Builds this rank's stages of `pipe` for `schedule`, whose ranks are those of `group`, on `device`.
    ///
    /// Every rank calls it, with the same pipe and schedule, which the ranks compare.
    ///
    /// # Errors
    /// Before anything is sent if the schedule has other ranks than the group or other stages than the pipe, or there is
    /// no loss; on all ranks alike if theirs differ; those of the constructors of nodes.
    pub fn new<B: Scope>(
        pipe: &Pipe<B>,
        schedule: &Schedule,
        group: &ProcessGroup,
        scope: &B,
        device: &Device,
    ) -> Result<Self> {
        let info = pipe.info().clone();
        check(&info, schedule, group)?;
        let edges = info.edges.iter().flat_map(|edge| edge.to.iter().map(|&to| (edge.from, to)));
        // Neighbours without a value between them still are in order.
        let edges = Edges::new(info.num_stages(), edges)?;
        let replicated = info.shares.iter().filter(|share| share.share == Share::Replicate).collect_vec();
        let lowering = Lowering::new(edges.clone()).shared(replicated.iter().map(|share| share.stages.clone())).reduced();
        let training = schedule.lower(&lowering)?;
        let evaluation = schedule.forward_only().lower(&Lowering::new(edges))?;
        group.agree(&format!("a pipeline of\n{info}\nby\n{}", training.to_csv()))?;

        let mine = (0..info.num_stages()).filter(|&stage| schedule.stage_ranks()[stage] == group.rank());
        let built = pipe.build_stages(mine, scope, device)?;
        let stages: BTreeMap<usize, StageModule> = built.into_iter().map(|stage| (stage.def().index, stage)).collect();
        let shared = replicated.iter().map(|share| {
            let ranks = share.stages.iter().map(|&stage| schedule.stage_ranks()[stage]).sorted().dedup().collect_vec();
            let is_member = ranks.len() > 1 && ranks.contains(&group.rank());
            let copies = share.stages.iter().filter_map(|stage| stages.get(stage)?.parameters().get(&share.name));
            Ok(Shared {
                ranks: is_member.then(|| group.subgroup(&ranks)).transpose()?,
                parameters: copies.unique_by(|copy| copy.id()).cloned().collect(),
            })
        });
        let shared = shared.collect::<Result<_>>()?;
        let parameters = stages.values().flat_map(|stage| stage.parameters().values()).map(post::address).collect();
        let results = info.graph.outputs.iter().map(|output| output.value).chain(info.graph.loss.map(|loss| loss.value));
        Ok(Self {
            results: results.collect(),
            signature: pipe.signature().clone(),
            splitter: Splitter::default(),
            group: group.clone(),
            replicas: None,
            keep: Keep::default(),
            steps: 0,
            info,
            stages,
            training,
            evaluation,
            shared,
            parameters,
        })
    }

    /// The same stages, whose gradients are averaged over `replicas`: the ranks that have the same stages of other copies
    /// of the model, which train on other rows.
    pub fn with_replicas(self, replicas: &ProcessGroup) -> Self {
        Self { replicas: Some(replicas.clone()), ..self }
    }

    /// The same stages, which keep no more than `keep` says between the passes of a microbatch.
    pub fn with_keep(self, keep: Keep) -> Self {
        Self { keep, ..self }
    }

    /// The same stages, with batches cut so.
    pub fn with_splitter(self, splitter: Splitter) -> Self {
        Self { splitter, ..self }
    }

    /// This rank's stages.
    pub fn stages(&self) -> impl Iterator<Item = &StageModule> {
        self.stages.values()
    }

    /// What all ranks do in a training step.
    pub fn program(&self) -> &Program {
        &self.training
    }

    /// Loss, outputs and gradients of a batch, the whole of which every rank gives.
    ///
    /// # Errors
    /// If the batch cannot be cut into the schedule's microbatches; those of nodes and of communication, which name rank,
    /// stage, microbatch and action. Then all ranks fail.
    pub fn step(&mut self, args: &[Value], kwargs: &Kwargs) -> Result<Step> {
        let step = self.run(args, kwargs, true)?;
        self.steps += 1;
        Ok(step)
    }

    /// Loss and outputs of a batch, without anything random and without gradients.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn evaluate(&self, args: &[Value], kwargs: &Kwargs) -> Result<Step> {
        self.run(args, kwargs, false)
    }

    fn run(&self, args: &[Value], kwargs: &Kwargs, training: bool) -> Result<Step> {
        let program = if training { &self.training } else { &self.evaluation };
        let microbatches = program.schedule().microbatches();
        let cut = self.splitter.split(args, kwargs, microbatches)?;
        if cut.len() != microbatches {
            let reason = format!("{} rows are too few for the {microbatches} microbatches of the schedule", cut.len());
            return Err(Error::Microbatches(reason));
        }
        let batch = Batch::new(&self.signature, &cut)?;
        let made = Execution::new(self, program, &batch, training).run()?;
        self.finish(&batch, &cut, made)
    }

    /// Joins what the microbatches gave.
    fn finish(&self, batch: &Batch, cut: &Microbatches, made: Made) -> Result<Step> {
        let Made { results, grads, spans, peak } = made;
        let all = |value: ValueId| results.iter().map(|made| made.get(&value).cloned()).collect::<Option<Vec<_>>>();
        let mut outputs = BTreeMap::new();
        for output in &self.info.graph.outputs {
            if let Some(values) = all(output.value) {
                outputs.insert(output.name.clone(), cut.merge(&values, None::<&ChunkSpec>)?);
            }
        }
        let losses = self.info.graph.loss.and_then(|loss| all(loss.value)).unwrap_or_default();
        let weighted = losses.iter().enumerate().map(|(microbatch, loss)| {
            Ok((loss.tensor()?.detach() * self.weight(batch, microbatch))?)
        });
        let loss = weighted.reduce(|sum: Result<Tensor>, part| Ok((sum? + part?)?)).transpose()?;
        Ok(Step { loss, outputs, grads, spans, peak_activations: peak })
    }

    fn stage(&self, stage: usize) -> Result<&StageModule> {
        let elsewhere = || Error::Schedule(format!("stage {stage} is not on rank {}", self.group.rank()));
        self.stages.get(&stage).ok_or_else(elsewhere)
    }

    fn rank_of(&self, stage: usize) -> usize {
        self.training.schedule().stage_ranks()[stage]
    }

    /// Stages by their ranks.
    fn by_rank(&self, stages: &[usize]) -> BTreeMap<usize, Vec<usize>> {
        stages.iter().map(|&stage| (self.rank_of(stage), stage)).into_group_map().into_iter().collect()
    }

    /// What the loss of a microbatch counts in that of the batch.
    fn weight(&self, batch: &Batch, microbatch: usize) -> f64 {
        let mean = self.info.graph.loss.is_some_and(|loss| loss.reduction == Reduction::Mean);
        let rows = batch.rows.last().map_or(0, |rows| rows.end);
        if mean { batch.rows[microbatch].len() as f64 / rows as f64 } else { 1.0 }
    }
}

/// Refuses a schedule that is not one of the pipe on the group.
fn check(info: &PipeInfo, schedule: &Schedule, group: &ProcessGroup) -> Result<()> {
    let refuse = |reason: String| Err(Error::Schedule(reason));
    let (ranks, stages) = (schedule.ranks().len(), schedule.stages());
    if ranks != group.size() {
        return refuse(format!("it has {ranks} ranks, the group has {}; make it for those", group.size()));
    }
    if stages != info.num_stages() {
        return refuse(format!("it has {stages} stages, the pipe has {}; cut the pipe so", info.num_stages()));
    }
    if info.graph.loss.is_none() && schedule != &schedule.forward_only() {
        return refuse("it has backward passes, and the pipe no loss; declare one, or take its forward_only()".into());
    }
    Ok(())
}
