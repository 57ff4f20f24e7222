//! The messages of one rank in one step: what each carries, and which are still expected.
//!
//! `schedule/routes.rs` says which messages there are. [`contents`] says what each carries, and in which order; the sender and
//! the receiver both read it there, so messages name no values.
use super::Runtime;
use super::credit::Credit;
use super::notes::Notes;
use super::post::{Post, aliases};
use crate::graph::ValueId;
use crate::schedule::{Flow, Message, Program};
use crate::{Error, Result, Value};
use itertools::Itertools;
use std::collections::{HashMap, HashSet, VecDeque};

/// Returns the values, or the values whose gradients, a message carries, each with the stages that it is for.
///
/// Values come in the order of the outputs of the stage that made them, and are for all users on the rank of the receiver.
/// Gradients come in the order of the inputs of the stage that computed them, and are for the stage that made the values.
fn contents(runtime: &Runtime, message: Message) -> Result<Vec<(ValueId, Vec<usize>)>> {
    let stage = runtime.info.stage(message.from)?;
    Ok(match message.flow {
        Flow::Activation => {
            let rank = runtime.rank_of(message.to);
            let there =
                |stages: &[usize]| stages.iter().copied().filter(|&stage| runtime.rank_of(stage) == rank).collect_vec();
            let values = stage.outputs.iter().map(|output| (output.value, there(&output.consumers)));
            values.filter(|(_, stages)| !stages.is_empty()).collect()
        }
        Flow::Gradient => {
            let inputs = stage.inputs.iter().filter(|input| input.from == Some(message.to));
            inputs.map(|input| (input.value, vec![message.to])).collect()
        }
    })
}

/// The messages of one rank to and from the others.
pub(super) struct Traffic<'a> {
    runtime: &'a Runtime,
    program: &'a Program,
    post: Post<'a>,
    /// In an evaluation, the bound on unacknowledged messages.
    credit: Option<Credit<'a>>,
    /// The packed values and gradients that wait for their message to be sent.
    outgoing: HashMap<Message, HashMap<ValueId, Value>>,
    /// The parameters that were sent to other ranks, which keep them for the rest of the step.
    sent: HashSet<(ValueId, usize)>,
    /// The parameters from other ranks.
    constants: HashMap<ValueId, Value>,
    /// The messages still expected from each rank, in order; they are received when needed, so that no rank waits
    /// earlier.
    awaited: HashMap<usize, VecDeque<Message>>,
}

/// A message that has arrived.
pub(super) struct Arrived {
    pub(super) message: Message,
    /// The length of the longest chain of computations before it.
    pub(super) path: usize,
    /// Its values or gradients, packed, with the stages that they are for.
    pub(super) values: Vec<(ValueId, Vec<usize>, Value)>,
}

impl<'a> Traffic<'a> {
    /// Creates the traffic of a step; `is_bounded` in an evaluation.
    pub(super) fn new(runtime: &'a Runtime, program: &'a Program, notes: &Notes, is_bounded: bool) -> Self {
        let credit = is_bounded.then(|| Credit::new(&runtime.group, notes.clone(), runtime.window));
        let post = Post::new(&runtime.group, notes.clone(), runtime.mesh.as_ref());
        let (outgoing, sent, constants, awaited) = Default::default();
        Self { runtime, program, post, credit, outgoing, sent, constants, awaited }
    }

    /// Keeps a packed value of stage `from` for its message to the rank of stage `to`.
    pub(super) fn put_value(&mut self, from: usize, to: usize, microbatch: usize, id: ValueId, packed: Value) {
        let message = self.program.values_to(from, to, microbatch);
        self.outgoing.entry(message).or_default().insert(id, packed);
    }

    /// Keeps a packed gradient, which stage `from` computed, for its message to stage `to`.
    pub(super) fn put_gradient(&mut self, from: usize, to: usize, microbatch: usize, id: ValueId, packed: Value) {
        let message = Message { flow: Flow::Gradient, from, to, microbatch };
        self.outgoing.entry(message).or_default().insert(id, packed);
    }

    /// Sends a message. `path` is the length of the longest chain of computations before it.
    pub(super) fn send(&mut self, message: Message, path: usize) -> Result<()> {
        let nothing = || Error::Schedule("there is nothing to send".into());
        let mut values = self.outgoing.remove(&message).ok_or_else(nothing)?;
        let to = self.runtime.rank_of(message.to);
        let mut packed = Vec::with_capacity(values.len());
        for (id, _) in contents(self.runtime, message)? {
            let value = values.remove(&id).ok_or_else(nothing)?;
            let is_known =
                message.flow == Flow::Activation && self.runtime.constants.contains(&id) && !self.sent.insert((id, to));
            packed.push(if is_known { Value::None } else { aliases(&value, &self.runtime.parameters)? });
        }
        self.credit.as_mut().map_or(Ok(()), |credit| credit.before_send(to))?;
        self.post.send(to, message, path, &packed)
    }

    /// Adds a message to those that are expected.
    pub(super) fn expect(&mut self, message: Message) {
        self.awaited.entry(self.runtime.rank_of(message.from)).or_default().push_back(message);
    }

    /// Receives the next message from a rank.
    pub(super) fn next_from(&mut self, rank: usize) -> Result<Arrived> {
        let nothing = || Error::Schedule(format!("no more messages are expected from rank {rank}"));
        let message = self.awaited.get_mut(&rank).and_then(VecDeque::pop_front).ok_or_else(nothing)?;
        let (path, values) = self.post.receive(rank, message)?;
        self.credit.as_mut().map_or(Ok(()), |credit| credit.after_receive(rank))?;
        let expected = contents(self.runtime, message)?;
        if values.len() != expected.len() {
            return Err(Error::Schedule(format!("{} values arrived, {} were expected", values.len(), expected.len())));
        }
        let values = expected.into_iter().zip(values).map(|((id, stages), packed)| {
            let is_constant = message.flow == Flow::Activation && self.runtime.constants.contains(&id);
            // A parameter came with the first message, and is not sent again.
            let packed = if is_constant { self.constants.entry(id).or_insert(packed).clone() } else { packed };
            (id, stages, packed)
        });
        Ok(Arrived { message, path, values: values.collect() })
    }

    /// Returns whether messages are left that were not sent or not received.
    pub(super) fn is_left(&self) -> bool {
        !self.outgoing.is_empty() || self.awaited.values().any(|messages| !messages.is_empty())
    }

    /// Receives the remaining acknowledgements.
    pub(super) fn end(&mut self) -> Result<()> {
        self.credit.as_mut().map_or(Ok(()), Credit::end)
    }
}
