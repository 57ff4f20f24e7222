//! The actions of each rank, communication included.
use super::routes::Routes;
use super::validate::error;
use super::walk::{DryRun, StageProgress};
use super::{Action, Compute, Edges, Flow, Message, Pass, Schedule};
use crate::action::StageRoute;
use crate::graph::ValueId;
use crate::{Error, Result};
use itertools::Itertools;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// What goes from one stage to others of a rank in each microbatch: values, or the values whose gradients,
/// each with the stages that it is for.
pub(crate) type Contents = Vec<(ValueId, Vec<usize>)>;

/// A schedule with all of its communication.
///
/// It runs to its end even if every send waits for its receive, as on transports without buffers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "ProgramRecord", try_from = "ProgramRecord")]
pub struct Program {
    schedule: Schedule,
    edges: Edges,
    ranks: Vec<Vec<Action>>,
    contents: BTreeMap<StageRoute, Contents>,
}

/// The serialized form of a program.
#[derive(Serialize, Deserialize)]
struct ProgramRecord {
    edges: Edges,
    ranks: Vec<Vec<Action>>,
    #[serde(default)]
    contents: Vec<(StageRoute, Contents)>,
}

impl Program {
    /// Creates a program from the actions of each rank, for stages with these edges.
    ///
    /// # Errors
    /// Those of [`Schedule::new`] for the computations. Also if a message is not needed, is duplicated, or is sent
    /// before its content is computed; if needed content does not arrive in time; if an action names a stage of another
    /// rank; if gradients are reduced before they are complete; or if the ranks would wait for each other forever.
    pub fn new(ranks: Vec<Vec<Action>>, edges: Edges) -> Result<Self> {
        let computes = |actions: &Vec<Action>| {
            actions.iter().filter(|action| !action.computes().is_empty()).copied().map(Some).collect()
        };
        let schedule = Schedule::new(ranks.iter().map(computes).collect())?;
        edges.fit(schedule.stages())?;
        for (rank, actions) in ranks.iter().enumerate() {
            in_place(&schedule, rank, actions)?;
        }
        run(&schedule, &edges, &ranks)?;
        Ok(Self { schedule, edges, ranks, contents: BTreeMap::new() })
    }

    /// Sets what messages carry.
    pub(super) fn carrying(self, contents: impl IntoIterator<Item = (StageRoute, Contents)>) -> Self {
        Self { contents: contents.into_iter().collect(), ..self }
    }

    /// Returns the list of each rank.
    pub fn ranks(&self) -> &[Vec<Action>] {
        &self.ranks
    }

    /// Returns only the computations.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Returns the stages that use values of each stage.
    pub fn edges(&self) -> &Edges {
        &self.edges
    }

    /// Returns the messages between the stages.
    pub(crate) fn routes(&self) -> Routes<'_> {
        Routes { edges: &self.edges, stage_ranks: self.schedule.stage_ranks() }
    }

    /// Returns what a message carries; nothing if the program was not lowered for a model.
    pub(crate) fn contents(&self, message: Message) -> &[(ValueId, Vec<usize>)] {
        self.contents.get(&message.way()).map_or(&[], Vec::as_slice)
    }
}

impl From<Program> for ProgramRecord {
    fn from(program: Program) -> Self {
        Self { edges: program.edges, ranks: program.ranks, contents: program.contents.into_iter().collect() }
    }
}

impl TryFrom<ProgramRecord> for Program {
    type Error = Error;

    fn try_from(parts: ProgramRecord) -> Result<Self> {
        Ok(Self::new(parts.ranks, parts.edges)?.carrying(parts.contents))
    }
}

/// Checks what does not depend on other ranks: that actions name stages of this rank, and that reductions come at the
/// right time.
fn in_place(schedule: &Schedule, rank: usize, actions: &[Action]) -> Result<()> {
    let lasts = || schedule.computes(rank).filter(|compute| compute.is_last());
    let mut left = lasts().counts_by(|compute| compute.stage);
    let (mut reduced, mut pending, mut shared, mut unsent) =
        (BTreeSet::new(), BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for (position, action) in actions.iter().enumerate() {
        let refuse = |said: &str| Err(error(rank, position, action, said));
        let stage = match *action {
            Action::Send(message) | Action::WaitSend(message) => Some(message.from),
            Action::Recv(message) => Some(message.to),
            Action::Unshard(stage)
            | Action::Reshard(stage)
            | Action::ReduceGrad(stage)
            | Action::WaitReduceGrad(stage) => Some(stage),
            Action::Compute(_) | Action::Overlap(_) | Action::SharedReduce(_) => None,
        };
        if let Some(stage) = stage.filter(|&stage| schedule.stage_ranks().get(stage) != Some(&rank)) {
            return refuse(&format!("stage {stage} is not on this rank"));
        }
        match *action {
            Action::ReduceGrad(stage) if left.get(&stage).is_some_and(|&left| left > 0) => {
                return refuse("misplaced, the stage has not finished its backwards");
            }
            Action::ReduceGrad(stage) if !reduced.insert(stage) => return refuse("duplicate"),
            Action::ReduceGrad(stage) => _ = pending.insert(stage),
            Action::WaitReduceGrad(stage) if !pending.remove(&stage) => return refuse("waits for nothing"),
            Action::SharedReduce(group) if !shared.insert(group) => return refuse("duplicate"),
            Action::Send(message) => _ = unsent.insert(message),
            Action::WaitSend(message) if !unsent.remove(&message) => return refuse("waits for nothing"),
            _ => {}
        }
        for compute in action.computes().iter().filter(|compute| compute.is_last()) {
            if let Some(left) = left.get_mut(&compute.stage) {
                *left -= 1;
            }
        }
    }
    match pending.first() {
        Some(stage) => Err(Error::Schedule(format!("rank {rank} does not wait for {stage}REDUCE_GRAD"))),
        None => Ok(()),
    }
}

/// Runs all ranks in lockstep, where a send waits for its receive, and a reduction of a shared group for all
/// of its ranks.
fn run(schedule: &Schedule, edges: &Edges, ranks: &[Vec<Action>]) -> Result<()> {
    let routes = Routes { edges, stage_ranks: schedule.stage_ranks() };
    let done = StageProgress::nothing(edges, schedule.microbatches());
    let (arrived, taken, summed) = Default::default();
    let mut state = Lockstep { routes, ranks, done, arrived, taken, summed };
    let stuck = DryRun::run(ranks, |walk, rank, action| state.visit(walk, rank, action))?;
    stuck.map_or(Ok(()), |stuck| {
        Err(error(stuck.rank, stuck.position, stuck.action, &state.reason(stuck.action)))
    })
}

struct Lockstep<'a> {
    routes: Routes<'a>,
    ranks: &'a [Vec<Action>],
    done: StageProgress<'a>,
    /// The messages whose sends have met their receives, and those whose receives have ended.
    arrived: BTreeSet<Message>,
    taken: BTreeSet<Message>,
    /// The groups that have met.
    summed: BTreeSet<usize>,
}

impl Lockstep<'_> {
    /// Runs the next action of a rank, if it can run now.
    fn visit(&mut self, walk: &DryRun<'_, Action>, rank: usize, action: &Action) -> Result<bool> {
        Ok(match *action {
            Action::Compute(_) | Action::Overlap(_) => {
                let is_ready = action.computes().iter().all(|&compute| self.lacks(compute).is_none());
                if is_ready {
                    action.computes().iter().for_each(|&compute| self.done.add(compute));
                }
                is_ready
            }
            Action::Send(message) => {
                self.sendable(message).map_err(|said| error(rank, walk.position(rank), action, &said))?;
                let has_met = walk.head(self.routes.stage_ranks[message.to]) == Some(&Action::Recv(message));
                has_met && self.arrived.insert(message)
            }
            Action::Recv(message) => self.arrived.contains(&message) && self.taken.insert(message),
            Action::SharedReduce(group) => {
                let mut members = (0..self.ranks.len()).filter(|&rank| self.ranks[rank].contains(action));
                let has_met =
                    self.summed.contains(&group) || members.all(|rank| walk.head(rank) == Some(action));
                if has_met {
                    self.summed.insert(group);
                }
                has_met
            }
            Action::WaitSend(_)
            | Action::Unshard(_)
            | Action::Reshard(_)
            | Action::ReduceGrad(_)
            | Action::WaitReduceGrad(_) => true,
        })
    }

    /// Returns the reason if a message may not be sent now.
    fn sendable(&self, message: Message) -> Result<(), String> {
        let Message { flow, from, to, microbatch } = message;
        if !self.done.has(flow, from, microbatch) {
            return Err("misplaced, it is not computed yet".to_owned());
        }
        let pass = match flow {
            Flow::Activation => Pass::Forward,
            Flow::Gradient => Pass::Backward,
        };
        if !self.routes.after(Compute { stage: from, pass, microbatch }).contains(&message) {
            return Err(format!("stage {to} does not need it from this message"));
        }
        if self.arrived.contains(&message) { Err("duplicate".to_owned()) } else { Ok(()) }
    }

    /// Returns a missing input of a computation, if there is one.
    fn lacks(&self, compute: Compute) -> Option<String> {
        self.routes.needed(compute).into_iter().find_map(|message| {
            let Message { flow, from, microbatch, .. } = message;
            match self.routes.is_local(message) {
                true => (!self.done.has(flow, from, microbatch)).then(|| format!("stage {from}")),
                false => (!self.arrived.contains(&message)).then(|| Action::Recv(message).to_string()),
            }
        })
    }

    /// Returns why an action cannot run.
    fn reason(&self, action: &Action) -> String {
        match action {
            Action::Send(message) => format!("waits for {} forever", Action::Recv(*message)),
            Action::Recv(message) => format!("waits for {} forever", Action::Send(*message)),
            Action::SharedReduce(_) => "waits for the other ranks of the group forever".to_owned(),
            _ => {
                let lacks = action.computes().iter().find_map(|&compute| self.lacks(compute));
                format!("waits for {} forever", lacks.unwrap_or_default())
            }
        }
    }
}
