//! How a runtime is built: the stages of this rank, the parameters that stages share, and the copies of the model.
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use candle_core::{Device, Tensor, Var};
use candle_dist::row_changes::RowChanges;
use candle_dist::{
    DataParallel, DataParallelOptions, InitialSync, ProcessGroup, RankContext, Store, SyncOptions,
    sync_params,
};
use itertools::Itertools;

use super::buffers::Buffers;
use super::clock::Clock;
use super::notes::NoteBoard;
use super::{Runtime, credit, names, traffic};
use crate::graph::{Node, NodeKind, PipeInfo, Scope};
use crate::pipe::Pipe;
use crate::schedule::{Lowering, Program, Schedule};
use crate::tape::StageModule;
use crate::{Error, Result};

/// A replicated parameter, on the ranks that have copies of it.
pub(super) struct ReplicatedParameter {
    pub(super) name: String,
    /// These ranks in the order of their stages, if there are several and this is one of them.
    pub(super) ranks: Option<ProcessGroup>,
    /// The local copy.
    pub(super) parameters: Vec<Tensor>,
    /// What lookups change in place, of tables.
    pub(super) changes: Vec<Arc<RowChanges>>,
}

impl ReplicatedParameter {
    /// Sets the copies of all ranks to the values of the first. Every one of these ranks calls it.
    fn start(self) -> Result<Self> {
        if let Some(ranks) = &self.ranks {
            let name = &self.name;
            let copies = self.parameters.iter().enumerate();
            let copies = copies.map(|(i, copy)| Ok((format!("{name}[{i}]"), Var::from_tensor(copy)?)));
            let copies = copies.collect::<Result<Vec<_>>>()?;
            sync_params(ranks, &copies, &SyncOptions::default())?;
        }
        Ok(self)
    }
}

impl Runtime {
    /// Builds this rank's stages of `pipe` for `schedule`, whose ranks are those of `group`, on `device`.
    ///
    /// Every rank must call it with the same pipe and schedule, which the ranks compare. Copies of a replicated
    /// parameter start with the values of its first stage. A variable that stages of several ranks request by one name
    /// is such a parameter too, even undeclared: [`info`](Self::info) lists it, and a warning is logged. It must not have variables
    /// that change without a gradient, such as the running statistics of a batch norm: a training step refuses copies that have
    /// become unlike. That costs two small all_gathers a step for all parameters of the same ranks, if some have no gradient: of
    /// those of at most 64 KiB on the CPU in each step, of all in steps whose number is a power of two.
    ///
    /// # Errors
    /// Before any communication, if the schedule has other ranks than the group or other stages than the pipe, or if
    /// there is no loss; on all ranks alike, if their pipes or schedules differ, if a constructor of a node fails on
    /// one of them, or if their `MeshVarBuilder`s have unlike seeds. Patterns of a plan that matched no module of any stage are a
    /// warning.
    pub fn new<B: Scope>(
        pipe: &Pipe<B>,
        schedule: &Schedule,
        group: &ProcessGroup,
        scope: &B,
        device: &Device,
    ) -> Result<Self> {
        let mut info = pipe.info().clone();
        check(&info, schedule, group)?;
        let lower = |info: &PipeInfo| schedule.lower(&Lowering::of(info)?.reduced());
        let pipeline = description(&info, &lower(&info)?);
        group.agree(&pipeline)?;
        let mesh = scope.mesh();
        if let Some(mesh) = mesh.as_ref().filter(|mesh| mesh.size() > 1) {
            mesh.group()?.agree(&of_rank(group, &pipeline))?;
        }

        let mine = (0..info.num_stages()).filter(|&stage| schedule.stage_ranks()[stage] == group.rank());
        let (stages, found) = names::check(group, &info, pipe.build_stages(mine, scope, device))?;
        scope.check_stages(group)?;
        info.shares.extend(found);
        let (training, evaluation) = (lower(&info)?, schedule.forward_only().lower(&Lowering::of(&info)?)?);
        let shared = info.replicated().map(|share| {
            let ranks =
                share.stages.iter().map(|&stage| schedule.stage_ranks()[stage]).unique().collect_vec();
            let is_member = ranks.len() > 1 && ranks.contains(&group.rank());
            let here = share.stages.iter().filter_map(|stage| stages.get(stage));
            let copies = here.flat_map(|stage| stage.copy_of(&share.name)).map(|(_, copy)| copy);
            let parameters: Vec<Tensor> = copies.unique_by(Tensor::id).collect();
            let ranks = is_member.then(|| group.subgroup(&ranks)).transpose()?;
            let tables = parameters.iter().filter(|copy| ranks.is_some() && copy.rank() == 2);
            let changes = tables.map(RowChanges::watch).collect();
            ReplicatedParameter { name: share.name.clone(), ranks, parameters, changes }.start()
        });
        let shared = shared.collect::<Result<Vec<_>>>()?;
        Ok(Self {
            mesh,
            #[cfg(feature = "shard")]
            built: scope.parameters(),
            clock: Clock::settle(group)?,
            shared,
            ..Self::of(pipe, info, stages, [training, evaluation], group, device)
        })
    }

    /// Builds all stages of `pipe` for a process alone, which compares and shares nothing with others.
    /// `program` names its rank.
    pub(crate) fn alone<B: Scope>(
        pipe: &Pipe<B>,
        program: Program,
        scope: &B,
        device: &Device,
    ) -> Result<Self> {
        let stages =
            pipe.build_stages(0..pipe.num_stages(), scope, device)?.into_iter().enumerate().collect();
        let group = ProcessGroup::simulated(0, 1)?;
        Ok(Self::of(pipe, pipe.info().clone(), stages, [program.clone(), program], &group, device))
    }

    /// Creates a runtime of built stages that share nothing with other ranks.
    fn of<B: Scope>(
        pipe: &Pipe<B>,
        info: PipeInfo,
        stages: BTreeMap<usize, StageModule>,
        [training, evaluation]: [Program; 2],
        group: &ProcessGroup,
        device: &Device,
    ) -> Self {
        let memory =
            stages.values().flat_map(|stage| stage.parameters().values().chain(stage.variables().values()));
        let is_parameter = |node: &&Node| matches!(node.kind, NodeKind::Parameter(_));
        let constants = info.graph.nodes.iter().filter(is_parameter).flat_map(|node| node.outputs.clone());
        let outputs = info.graph.outputs.iter().map(|output| (output.value, output.name.clone()));
        Self {
            parameters: memory.map(traffic::address).collect(),
            constants: constants.collect(),
            outputs: outputs.into_group_map(),
            window: credit::window(&evaluation),
            signature: pipe.signature().clone(),
            group: group.clone(),
            device: device.clone(),
            clock: Clock::default(),
            buffers: Buffers::default(),
            replicas: BTreeMap::new(),
            shared: Vec::new(),
            copies: None,
            board: None,
            mesh: None,
            #[cfg(feature = "shard")]
            built: None,
            info,
            stages,
            training,
            evaluation,
        }
    }

    /// Averages the gradients of the stages over `replicas`: the ranks with the same stages in other copies of the
    /// model, which train on other rows. Every rank must call it.
    ///
    /// The gradients of a stage are averaged in buckets, while the backward passes of earlier stages run.
    ///
    /// The result is the gradient of the whole batch of all replicas. A loss that is a mean is one over all rows, so replicas
    /// may have unlike numbers of rows. One that is a sum is the sum over all replicas, and one that
    /// [counts](crate::LossReduction::Counted) is divided by the count of all. If you set
    /// [`weights`](field@crate::StepOptions::weights), gradients are plain means over the replicas.
    ///
    /// Variables that change without a gradient, such as running statistics, are those of the first replica after each training
    /// step, as in PyTorch's `DistributedDataParallel`. One of more than 64 KiB, or on a GPU, that has not changed in the first two
    /// steps is found in the next step whose number is a power of two; until then it is each replica's own.
    /// Replicas set the weights of losses in all or in none.
    ///
    /// A variable that no scope created, such as one that a function captures, has no name by which replicas could find it. A
    /// step that finds a gradient of one fails.
    ///
    /// # Errors
    /// Those of [`beside`](Self::beside) and of [`DataParallel::new`], on all ranks of the pipeline: for example if parameters
    /// are sharded over `replicas`.
    pub fn with_replicas(self, replicas: &ProcessGroup, options: &DataParallelOptions) -> Result<Self> {
        let beside = self.beside(replicas)?;
        let averages = beside.averages(replicas, options);
        let replicas = agreed(&beside.group, averages)?;
        Ok(Self { replicas, ..beside })
    }

    /// Returns the averages of the stages over `replicas`.
    fn averages(
        &self,
        replicas: &ProcessGroup,
        options: &DataParallelOptions,
    ) -> Result<BTreeMap<usize, DataParallel>> {
        if let InitialSync::Sync(_) = options.start {
            names::check_casts(replicas, &self.stages)?;
        }
        let average = |(&index, stage): (&usize, &StageModule)| {
            let variables = stage.variables().iter();
            let variables = variables.map(|(name, variable)| Ok((name, Var::from_tensor(variable)?)));
            Ok((index, DataParallel::new(replicas, &variables.collect::<Result<Vec<_>>>()?, options)?))
        };
        self.stages.iter().map(average).collect()
    }

    /// Runs the stages in step with `replicas`: the ranks with the same stages in other copies of the model. Their
    /// gradients are averaged by other means, such as fully sharded parameters. Every rank must call it.
    ///
    /// Variables that change without a gradient are each copy's own. All copies have the same number of microbatches in a step,
    /// because their stages may share calls. A loss that is a mean is one over the rows of its copy.
    ///
    /// A step that one copy cannot begin is an error on all of them, and a loss that [counts](crate::LossReduction::Counted)
    /// covers the batches of all copies. [`with_replicas`](Self::with_replicas) includes this.
    ///
    /// # Errors
    /// If `replicas` contains another rank of this pipeline; on all replicas alike, if their pipelines or their ranks
    /// within them differ.
    pub fn beside(self, replicas: &ProcessGroup) -> Result<Self> {
        let own: HashSet<usize> = self.group.ranks().iter().copied().collect();
        let twice = replicas.ranks().iter().filter(|rank| own.contains(rank)).copied().collect_vec();
        if twice != [self.group.ranks()[self.group.rank()]] {
            let (own, given) = (self.group.ranks(), replicas.ranks());
            let reason =
                format!("ranks {given:?} are not replicas of one rank of the pipeline on ranks {own:?}");
            return Err(Error::Pipe(format!(
                "{reason}; give the group of ranks with its stages in other copies"
            )));
        }
        let pipeline = description(&self.info, &self.training);
        replicas.agree(&of_rank(&self.group, &pipeline))?;
        Ok(Self { copies: Some(replicas.clone()), ..self })
    }

    /// Returns the same stages, which exchange the heads of their messages through the world's store
    /// ([`RankContext::store`](candle_dist::RankContext::store)). Every rank must call it.
    ///
    /// This is for ranks on GPUs, whose backend sends host tensors through the device: a head then arrives only after
    /// all computations that were launched before on the sender's device, and the receiver launches nothing until then.
    /// The store is on the host. For ranks on the CPU it is slower than messages. It has not run with GPUs yet.
    ///
    /// # Errors
    /// If the store or the group fails.
    pub fn heads_in_store(self, store: &Store) -> Result<Self> {
        Ok(Self { board: Some(NoteBoard::new(&self.group, store)?), ..self })
    }

    /// Returns the same stages, set up for the device of the rank: with [`heads_in_store`](Self::heads_in_store) on a
    /// GPU. Every rank must call it.
    ///
    /// # Errors
    /// Those of [`heads_in_store`](Self::heads_in_store).
    pub fn for_device_of(self, ctx: &RankContext) -> Result<Self> {
        if ctx.device().is_cpu() { Ok(self) } else { self.heads_in_store(ctx.store()) }
    }
}

/// Returns the value of this rank, unless another rank has an error: then all return one.
fn agreed<T>(group: &ProcessGroup, mine: Result<T>) -> Result<T> {
    if matches!(mine, Err(Error::Dist(candle_dist::Error::Group(_)))) {
        return mine;
    }
    let texts = group.all_gather_text(&mine.as_ref().err().map_or_else(String::new, Error::to_string))?;
    let first = texts.iter().position(|text| !text.is_empty());
    let value = mine?;
    match first {
        Some(rank) => {
            Err(Error::Pipe(format!("rank {} cannot be a replica: {}", group.ranks()[rank], texts[rank])))
        }
        None => Ok(value),
    }
}

/// Returns the text that must be equal on all ranks of a stage, and of its copies.
fn of_rank(group: &ProcessGroup, pipeline: &str) -> String {
    format!("rank {} of {pipeline}", group.rank())
}

/// Returns a text that must be equal on all ranks.
fn description(info: &PipeInfo, program: &Program) -> String {
    format!("a pipeline of\n{info}\nby\n{}", program.to_csv())
}

/// Refuses a schedule that does not fit the pipe or the group.
fn check(info: &PipeInfo, schedule: &Schedule, group: &ProcessGroup) -> Result<()> {
    let refuse = |reason: String| Err(Error::Schedule(reason));
    let (ranks, stages) = (schedule.ranks().len(), schedule.stages());
    if ranks != group.size() {
        return refuse(format!(
            "it has {ranks} ranks, the group has {}; make it for that many",
            group.size()
        ));
    }
    if stages != info.num_stages() {
        return refuse(format!(
            "it has {stages} stages, the pipe has {}; cut the pipe into as many",
            info.num_stages()
        ));
    }
    if info.graph.loss.is_none() && schedule.has_backward() {
        return refuse(
            "it has backward passes, but the pipe has no loss; declare one, or use its forward_only()".into(),
        );
    }
    Ok(())
}
