//! The actions of each rank, communication included.
use super::routes::{Need, Routes};
use super::validate::error;
use super::walk::Done;
use super::{Action, Compute, Edges, Flow, Message, Schedule};
use crate::{Error, Result};
use itertools::Itertools;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// A schedule with all of its communication.
///
/// It runs to its end even if every send waits for its receive, as on transports without buffers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "Parts", try_from = "Parts")]
pub struct Program {
    schedule: Schedule,
    edges: Edges,
    ranks: Vec<Vec<Action>>,
}

/// The serialized form of a program.
#[derive(Serialize, Deserialize)]
struct Parts {
    edges: Edges,
    ranks: Vec<Vec<Action>>,
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
        Ok(Self { schedule, edges, ranks })
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

    /// Returns the message that brings values of stage `from` to stage `to` on another rank.
    pub(crate) fn values_to(&self, from: usize, to: usize, microbatch: usize) -> Message {
        let routes = Routes { edges: &self.edges, stage_ranks: self.schedule.stage_ranks() };
        routes.values_to(from, to, microbatch)
    }
}

impl From<Program> for Parts {
    fn from(program: Program) -> Self {
        Self { edges: program.edges, ranks: program.ranks }
    }
}

impl TryFrom<Parts> for Program {
    type Error = Error;

    fn try_from(parts: Parts) -> Result<Self> {
        Self::new(parts.ranks, parts.edges)
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

/// Runs all ranks in lockstep, where a send and its receive happen at once, and so does the reduction of a shared
/// group.
fn run(schedule: &Schedule, edges: &Edges, ranks: &[Vec<Action>]) -> Result<()> {
    let routes = Routes { edges, stage_ranks: schedule.stage_ranks() };
    let mut state = State {
        routes,
        ranks,
        next: vec![0; ranks.len()],
        done: Done::nothing(edges, schedule.microbatches()),
        arrived: BTreeSet::new(),
    };
    loop {
        let mut moved = false;
        for rank in 0..ranks.len() {
            moved |= state.step(rank)?;
        }
        if !moved {
            break;
        }
    }
    let stuck = (0..ranks.len()).find_map(|rank| Some((rank, state.head(rank)?)));
    stuck.map_or(Ok(()), |(rank, action)| Err(error(rank, state.next[rank], action, &state.reason(action))))
}

struct State<'a> {
    routes: Routes<'a>,
    ranks: &'a [Vec<Action>],
    /// The number of finished actions of each rank.
    next: Vec<usize>,
    done: Done<'a>,
    arrived: BTreeSet<Message>,
}

impl<'a> State<'a> {
    fn head(&self, rank: usize) -> Option<&'a Action> {
        self.ranks[rank].get(self.next[rank])
    }

    /// Runs the next action of a rank, if it can run now.
    fn step(&mut self, rank: usize) -> Result<bool> {
        let Some(action) = self.head(rank) else { return Ok(false) };
        let moved = match *action {
            Action::Compute(_) | Action::Overlap(_) => {
                let ready = action.computes().iter().all(|&compute| self.lacks(compute).is_none());
                if ready {
                    action.computes().iter().for_each(|&compute| self.done.add(compute));
                    self.next[rank] += 1;
                }
                ready
            }
            Action::Send(message) => {
                self.sendable(message).map_err(|said| error(rank, self.next[rank], action, &said))?;
                let to = self.routes.stage_ranks[message.to];
                let met = self.head(to) == Some(&Action::Recv(message));
                if met {
                    self.arrived.insert(message);
                    self.next[rank] += 1;
                    self.next[to] += 1;
                }
                met
            }
            // Runs together with its send.
            Action::Recv(_) => false,
            Action::SharedReduce(_) => {
                let members = (0..self.ranks.len()).filter(|&rank| self.ranks[rank].contains(action)).collect_vec();
                let met = members.iter().all(|&rank| self.head(rank) == Some(action));
                if met {
                    members.into_iter().for_each(|rank| self.next[rank] += 1);
                }
                met
            }
            Action::WaitSend(_)
            | Action::Unshard(_)
            | Action::Reshard(_)
            | Action::ReduceGrad(_)
            | Action::WaitReduceGrad(_) => {
                self.next[rank] += 1;
                true
            }
        };
        Ok(moved)
    }

    /// Returns the reason if a message may not be sent now.
    fn sendable(&self, message: Message) -> Result<(), String> {
        let Message { flow, from, to, microbatch } = message;
        if microbatch >= self.done.microbatches() || !self.done.has(flow, from, microbatch) {
            return Err("misplaced, it is not computed yet".to_owned());
        }
        let pass = match flow {
            Flow::Activation => super::Pass::Forward,
            Flow::Gradient => super::Pass::Backward,
        };
        if !self.routes.after(Compute { stage: from, pass, microbatch }).contains(&message) {
            return Err(format!("stage {to} does not need it from this message"));
        }
        if self.arrived.contains(&message) { Err("duplicate".to_owned()) } else { Ok(()) }
    }

    /// Returns a missing input of a computation, if there is one.
    fn lacks(&self, compute: Compute) -> Option<String> {
        self.routes.before(compute).into_iter().find_map(|need| match need {
            Need::Local { flow, stage } => {
                (!self.done.has(flow, stage, compute.microbatch)).then(|| format!("stage {stage}"))
            }
            Need::Message(message) => (!self.arrived.contains(&message)).then(|| Action::Recv(message).to_string()),
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
