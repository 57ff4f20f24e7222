//! The messages of one rank in one step: those that wait to be sent, and those that are still expected.
use super::Runtime;
use super::credit::Credit;
use super::notes::Notes;
use super::wire::StageWire;
use crate::graph::ValueId;
use crate::schedule::{Flow, Message, Program};
use crate::tape::Activation;
use crate::{Error, Result, Value};
use candle_core::Tensor;
use candle_dist::TensorTree;
use std::collections::{HashMap, HashSet, VecDeque};

/// The messages of one rank to and from the others.
pub(super) struct Traffic<'a> {
    runtime: &'a Runtime,
    program: &'a Program,
    wire: StageWire<'a>,
    /// In an evaluation, the bound on unacknowledged messages.
    credit: Option<Credit<'a>>,
    /// What waits for its message to be sent.
    outgoing: HashMap<Message, Vec<Activation>>,
    /// The parameters that were sent to other ranks, which keep them for the rest of the step.
    sent: HashSet<(ValueId, usize)>,
    /// The parameters from other ranks.
    constants: HashMap<ValueId, Activation>,
    /// The messages still expected from each rank, in order; they are received when needed, so that no rank waits
    /// earlier.
    awaited: HashMap<usize, VecDeque<Message>>,
}

impl<'a> Traffic<'a> {
    /// Creates the traffic of a step; `is_bounded` in an evaluation.
    pub(super) fn new(runtime: &'a Runtime, program: &'a Program, notes: &Notes, is_bounded: bool) -> Self {
        let credit = is_bounded.then(|| Credit::new(&runtime.group, notes.clone(), runtime.window));
        let wire = StageWire::new(&runtime.group, notes.clone(), runtime.mesh.as_ref());
        let (outgoing, sent, constants, awaited) = Default::default();
        Self { runtime, program, wire, credit, outgoing, sent, constants, awaited }
    }

    /// Keeps what a message carries until it is sent.
    pub(super) fn put(&mut self, message: Message, values: Vec<Activation>) {
        self.outgoing.insert(message, values);
    }

    /// Sends a message. `path` is the length of the longest chain of computations before it.
    pub(super) fn send(&mut self, message: Message, path: usize) -> Result<()> {
        let nothing = || Error::Schedule("there is nothing to send".into());
        let mut values = self.outgoing.remove(&message).ok_or_else(nothing)?;
        let to = self.runtime.rank_of(message.to);
        for (sent, (id, _)) in values.iter_mut().zip(self.program.contents(message)) {
            let is_known = self.is_constant(message, *id) && !self.sent.insert((*id, to));
            sent.value = if is_known { Value::None } else { aliases(&sent.value, &self.runtime.parameters)? };
        }
        self.credit.as_mut().map_or(Ok(()), |credit| credit.before_send(to))?;
        self.wire.send(to, message, path, &values)
    }

    /// Adds a message to those that are expected.
    pub(super) fn expect(&mut self, message: Message) {
        self.awaited.entry(self.runtime.rank_of(message.from)).or_default().push_back(message);
    }

    /// Receives the next message from the rank that sends this one, if this one has not come yet. Returns it
    /// with its path and what it carries.
    pub(super) fn next_before(
        &mut self,
        message: Message,
    ) -> Result<Option<(Message, usize, Vec<Activation>)>> {
        let rank = self.runtime.rank_of(message.from);
        let awaited = self.awaited.get_mut(&rank).filter(|awaited| awaited.contains(&message));
        let Some(next) = awaited.and_then(VecDeque::pop_front) else { return Ok(None) };
        let (path, mut values) = self.wire.receive(rank, next)?;
        self.credit.as_mut().map_or(Ok(()), |credit| credit.after_receive(rank))?;
        let contents = self.program.contents(next);
        if values.len() != contents.len() {
            return Err(Error::Schedule(format!(
                "{} values arrived, {} were expected",
                values.len(),
                contents.len()
            )));
        }
        for (value, (id, _)) in values.iter_mut().zip(contents) {
            // A parameter came with the first message, and is not sent again.
            if self.is_constant(next, *id) {
                *value = self.constants.entry(*id).or_insert_with(|| value.clone()).clone();
            }
        }
        Ok(Some((next, path, values)))
    }

    /// Returns whether a message carries a value that is a parameter, equal in all microbatches.
    fn is_constant(&self, message: Message, id: ValueId) -> bool {
        message.flow == Flow::Activation && self.runtime.constants.contains(&id)
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

/// Returns the address of a tensor's memory.
pub(super) fn address(tensor: &Tensor) -> usize {
    std::ptr::from_ref(&*tensor.storage_and_layout().0).addr()
}

/// Copies those tensors of a value that lie in the memory of a parameter: an optimizer writes there while
/// another rank may still read the tensor.
pub(super) fn aliases(value: &Value, parameters: &HashSet<usize>) -> Result<Value> {
    value.map_tensors(|tensor| -> Result<Tensor> {
        match parameters.contains(&address(tensor)) {
            true => Ok(tensor.force_contiguous()?),
            false => Ok(tensor.clone()),
        }
    })
}
