//! Lowering of computations to programs.
use super::program::Contents;
use super::routes::Routes;
use super::walk::in_order;
use super::{Action, Edges, Flow, Program, Schedule};
use crate::action::StageRoute;
use crate::graph::{Edge, PipeInfo};
use crate::{Error, Result};
use itertools::Itertools;
use std::collections::BTreeMap;

/// The communication between the stages of a model.
///
/// ```
/// use candle_pipe::schedule::{Action, Edges, Lowering, ScheduleKind};
///
/// let schedule = ScheduleKind::GPipe.schedule(2, 1, 1)?;
/// let program = schedule.lower(&Lowering::new(Edges::chain(2)).shared([vec![0, 1]]).reduced())?;
/// let text = "0F0,0SEND_F0,0RECV_B0,0B0,0SHARED_REDUCE,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n\
///             1RECV_F0,1F0,1B0,1SEND_B0,0SHARED_REDUCE,1REDUCE_GRAD,1WAIT_REDUCE_GRAD\n";
/// assert_eq!(program.to_csv(), text);
/// # Ok::<(), candle_pipe::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Lowering {
    edges: Edges,
    /// The values that go along them, if they are known.
    values: Vec<Edge>,
    groups: Vec<Vec<usize>>,
    reduced: bool,
}

impl Lowering {
    /// Creates a lowering that sends only values and their gradients along these edges.
    pub fn new(edges: Edges) -> Self {
        Self { edges, values: vec![], groups: vec![], reduced: false }
    }

    /// Creates the lowering for a model: with its values, and the sums for its replicated parameters.
    ///
    /// # Errors
    /// If a value goes to a stage that is not a later one.
    pub fn of(info: &PipeInfo) -> Result<Self> {
        let pairs = info.edges.iter().flat_map(|edge| edge.to.iter().map(|&to| (edge.from, to)));
        // Neighbors without a value between them are still in order.
        let edges = Edges::new(info.num_stages(), pairs)?;
        let groups = info.replicated().map(|share| share.stages.clone());
        Ok(Self { values: info.edges.clone(), ..Self::new(edges).shared(groups) })
    }

    /// Adds the sums of the gradients of shared parameters; each group lists the stages that share them.
    pub fn shared(self, groups: impl IntoIterator<Item = Vec<usize>>) -> Self {
        Self { groups: groups.into_iter().collect(), ..self }
    }

    /// Adds the reduction of each stage's gradients over the replicas of the model.
    pub fn reduced(self) -> Self {
        Self { reduced: true, ..self }
    }
}

impl Schedule {
    /// Adds the communication to the schedule.
    ///
    /// After a computation come its sends and, at the same point, their receives on the other ranks. A shared group is
    /// reduced on all of its ranks after the last of its stages has finished, and a stage is reduced over the replicas
    /// after it and its groups have finished; at most one of these reductions runs at a time on a rank. So the list of
    /// each rank is part of one common order, and no ranks can wait for each other in a cycle. Stages on one rank need
    /// no message.
    ///
    /// # Errors
    /// If the edges are for another number of stages, or a group names a stage that does not exist.
    pub fn lower(&self, lowering: &Lowering) -> Result<Program> {
        let edges = &lowering.edges;
        edges.fit(self.stages())?;
        if let Some(stage) = lowering.groups.iter().flatten().find(|&&stage| stage >= self.stages()) {
            let said = format!("a shared group has stage {stage}, there are only {}", self.stages());
            return Err(Error::Schedule(said));
        }
        let routes = Routes { edges, stage_ranks: self.stage_ranks() };
        let mut lists = vec![vec![]; self.ranks().len()];
        let mut reductions = ReductionQueue::new(self, lowering);
        // A schedule is valid for a chain, whose order holds for all edges; so this cannot get stuck.
        let stuck = in_order(self.ranks(), edges, self.microbatches(), |rank, action| {
            lists[rank].push(*action);
            for &compute in action.computes() {
                for message in routes.after(compute) {
                    lists[rank].push(Action::Send(message));
                    lists[self.stage_ranks()[message.to]].push(Action::Recv(message));
                }
            }
            for compute in action.computes().iter().filter(|compute| compute.is_last()) {
                reductions.finish(compute.stage, &mut lists);
            }
        });
        debug_assert!(stuck.is_none(), "a schedule holds along all edges");
        reductions.wait(&mut lists);
        Ok(Program::new(lists, edges.clone())?.carrying(contents(routes, &lowering.values)))
    }
}

/// Returns what goes from each stage to others in each microbatch, also to those of its own rank.
///
/// Values come in the order in which they are made, and their gradients too.
fn contents(routes: Routes<'_>, values: &[Edge]) -> BTreeMap<StageRoute, Contents> {
    let mut all: BTreeMap<StageRoute, Contents> = BTreeMap::new();
    for Edge { value, from, to } in values {
        for &user in to {
            let message = routes.values_to(*from, user, 0);
            let there = all.entry((Flow::Activation, *from, message.to)).or_default();
            match there.last_mut().filter(|(last, _)| last == value) {
                Some((_, users)) => users.push(user),
                None => there.push((*value, vec![user])),
            }
            all.entry((Flow::Gradient, user, *from)).or_default().push((*value, vec![*from]));
        }
    }
    all
}

/// The reductions of gradients that are not yet in the lists.
struct ReductionQueue<'a> {
    stage_ranks: &'a [usize],
    groups: &'a [Vec<usize>],
    replicas: bool,
    /// The number of remaining backwards of each stage.
    left: Vec<usize>,
    /// The stages that are reduced, and the groups that are summed.
    reduced: Vec<bool>,
    summed: Vec<bool>,
    /// The stage whose reduction runs on each rank.
    pending: Vec<Option<usize>>,
}

impl<'a> ReductionQueue<'a> {
    fn new(schedule: &'a Schedule, lowering: &'a Lowering) -> Self {
        Self {
            stage_ranks: schedule.stage_ranks(),
            groups: &lowering.groups,
            replicas: lowering.reduced,
            left: vec![schedule.microbatches(); schedule.stages()],
            reduced: vec![false; schedule.stages()],
            summed: vec![false; lowering.groups.len()],
            pending: vec![None; schedule.ranks().len()],
        }
    }

    /// Counts a backward, and adds the reductions for which it was the last one.
    fn finish(&mut self, stage: usize, lists: &mut [Vec<Action>]) {
        self.left[stage] -= 1;
        if self.left[stage] > 0 {
            return;
        }
        for (group, members) in self.groups.iter().enumerate() {
            let whole = members.contains(&stage) && members.iter().all(|&stage| self.left[stage] == 0);
            if whole && !self.summed[group] {
                self.summed[group] = true;
                let ranks = members.iter().map(|&stage| self.stage_ranks[stage]).sorted().dedup();
                ranks.for_each(|rank| lists[rank].push(Action::SharedReduce(group)));
            }
        }
        for stage in 0..self.left.len() {
            if self.replicas && !self.reduced[stage] && self.whole(stage) {
                self.reduced[stage] = true;
                let rank = self.stage_ranks[stage];
                lists[rank].extend(self.pending[rank].replace(stage).map(Action::WaitReduceGrad));
                lists[rank].push(Action::ReduceGrad(stage));
            }
        }
    }

    /// Returns whether the gradients of a stage are complete and summed with those of its groups.
    fn whole(&self, stage: usize) -> bool {
        let mut groups = self.groups.iter().zip(&self.summed);
        self.left[stage] == 0 && groups.all(|(members, &summed)| summed || !members.contains(&stage))
    }

    /// Adds the waits for the reductions that run at the end.
    fn wait(self, lists: &mut [Vec<Action>]) {
        for (list, stage) in lists.iter_mut().zip(self.pending) {
            list.extend(stage.map(Action::WaitReduceGrad));
        }
    }
}
