//! Sends values from stage to stage: tensors without copies, everything else in a header.
//!
//! A message is a fixed head (flow, stages and microbatch), an outline of the values if it differs from the
//! previous one on the same way, and the tensors. So shapes may change from microbatch to microbatch, nothing
//! is probed, and usually an action costs one small message in addition to its tensors. Heads and outlines
//! are notes (`notes.rs`).
use super::notes::Notes;
use super::outline::Outline;
use crate::action::StageRoute;
use crate::schedule::{Action, Flow, Message};
use crate::tape::Activation;
use crate::{Error, Result};
use candle_core::{Shape, Tensor};
use candle_dist::{Collective, DeviceMesh, ProcessGroup};
use std::collections::HashMap;

/// The numbers in a head: the identity of the message, and the length of the chain of computations before it. The text
/// of the head is the outline.
const HEAD: usize = 5;
/// The tag of heads and tensors.
const TAG: u32 = 0;

/// Returns the identity of a message as numbers.
fn numbers(Message { flow, from, to, microbatch }: Message) -> [i64; 4] {
    [i64::from(flow == Flow::Gradient), from as i64, to as i64, microbatch as i64]
}

/// One rank's end of all ways between stages, for one step.
#[derive(Debug)]
pub(super) struct StageWire<'a> {
    group: &'a ProcessGroup,
    notes: Notes,
    /// Where sharded tensors lie on this rank.
    mesh: Option<&'a DeviceMesh>,
    sent: HashMap<StageRoute, Vec<Outline>>,
    received: HashMap<StageRoute, Vec<Outline>>,
}

impl<'a> StageWire<'a> {
    pub(super) fn new(group: &'a ProcessGroup, notes: Notes, mesh: Option<&'a DeviceMesh>) -> Self {
        Self { group, notes, mesh, sent: HashMap::new(), received: HashMap::new() }
    }

    /// Sends values to a rank, without waiting for it and without copying contiguous tensors.
    ///
    /// The tensors' memory must not be written afterwards. `path` is the length of the longest chain of computations up
    /// to these values.
    #[track_caller]
    pub(super) fn send(
        &mut self,
        to: usize,
        message: Message,
        path: usize,
        values: &[Activation],
    ) -> Result<()> {
        let mut tensors = Vec::new();
        let outline = |sent: &Activation| {
            let mut tracked = sent.tracked.iter();
            Outline::of(&sent.value, &mut |tensor| {
                tensors.push(tensor.clone());
                tracked.next().copied().unwrap_or(false)
            })
        };
        let outlines: Vec<Outline> = values.iter().map(outline).collect();
        let known = self.sent.get(&message.way()) == Some(&outlines);
        let text = if known { Vec::new() } else { serde_json::to_vec(&outlines).map_err(unreadable)? };
        let head = [&numbers(message)[..], &[path as i64]].concat();
        self.notes.send(self.group, to, TAG, &head, text)?;
        if !known {
            self.sent.insert(message.way(), outlines);
        }
        tensors.into_iter().try_for_each(|tensor| self.start(tensor.detach(), to))
    }

    /// Starts a send. A blocking one could deadlock: the receiver may first send a message to this rank, and take this
    /// one afterwards.
    #[track_caller]
    fn start(&self, tensor: Tensor, to: usize) -> Result<()> {
        drop(self.group.call(Collective::Send { to, tag: TAG }).owned().start_all(&[tensor])?);
        Ok(())
    }

    /// Receives the next message from a rank, which must be `message`; returns its path and its values.
    #[track_caller]
    pub(super) fn receive(&mut self, from: usize, message: Message) -> Result<(usize, Vec<Activation>)> {
        let (head, text) = self.notes.receive(self.group, from, TAG, HEAD)?;
        if head[..4] != numbers(message) {
            let (got, want) = (&head[..4], Action::Recv(message));
            let reason = format!(
                "rank {from} sent {got:?} (gradients?, from stage, to stage, microbatch) where {want}"
            );
            return Err(Error::Schedule(format!(
                "{reason} was expected; run the same schedule on all ranks"
            )));
        }
        if !text.is_empty() {
            self.received.insert(message.way(), serde_json::from_slice(&text).map_err(unreadable)?);
        }
        let unknown = || Error::Pipe(format!("rank {from} refers to a message that did not arrive"));
        let outlines = self.received.get(&message.way()).ok_or_else(unknown)?;
        let value = |outline: &Outline| {
            let mut tracked = Vec::new();
            let value = outline.value(self.mesh, &mut |tensor| {
                tracked.push(tensor.tracked);
                Ok(self.group.recv(Shape::from(tensor.dims.as_slice()), tensor.dtype()?, from)?)
            })?;
            Ok(Activation { value, tracked })
        };
        Ok((head[4] as usize, outlines.iter().map(value).collect::<Result<_>>()?))
    }
}

fn unreadable(error: serde_json::Error) -> Error {
    Error::Pipe(format!("a message between stages: {error}"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::{Notes, StageWire};
    use crate::schedule::{Flow, Message};
    use crate::tape::Activation;
    use crate::{Result, Value};
    use candle_core::{DType, Device, Tensor};
    use candle_dist::{World, comm};
    use std::collections::BTreeMap;

    fn message(rows: usize) -> Vec<Activation> {
        let x = Tensor::arange(0f64, rows as f64, &Device::Cpu).unwrap();
        let map = BTreeMap::from([
            ("a".to_string(), Value::Float(f64::NAN)),
            ("b".into(), Value::Text("é".into())),
        ]);
        let nested = Value::List(vec![
            Value::Map(map),
            Value::Tuple(vec![Value::Int(-7), Value::Bool(true), Value::None]),
        ]);
        let pair = Value::List(vec![x.to_dtype(DType::BF16).unwrap().into(), Value::None, (&x).into()]);
        let values = [(Value::Tensor(x), vec![true]), (nested, vec![]), (pair, vec![false, true])];
        values.map(|(value, tracked)| Activation { value, tracked }).into()
    }

    #[test]
    fn values_arrive_as_they_were_and_outlines_are_sent_where_they_change() {
        World::threads(2)
            .run(|ctx| -> Result<()> {
                let mut wire = StageWire::new(ctx.group(), Notes::default(), None);
                for (microbatch, rows) in [3, 3, 0, 2].into_iter().enumerate() {
                    let label = Message { flow: Flow::Activation, from: 1, to: 2, microbatch };
                    if ctx.rank() == 0 {
                        let (sent, counts) = comm::record(|| wire.send(1, label, microbatch, &message(rows)));
                        sent?;
                        assert_eq!(counts.total(), if microbatch == 1 { 4 } else { 5 });
                    } else {
                        let (path, got) = wire.receive(0, label)?;
                        assert_eq!(path, microbatch);
                        assert_eq!(got.len(), 3);
                        for (got, want) in got.iter().zip(message(rows)) {
                            assert!(got.value.same(&want.value)?, "{got:?}, sent {want:?}");
                            assert_eq!(got.tracked, want.tracked);
                        }
                    }
                }
                Ok(())
            })
            .unwrap();
    }

    #[test]
    fn another_message_than_the_expected_one_is_an_error() {
        let texts = World::threads(2).run(|ctx| -> Result<String> {
            let mut wire = StageWire::new(ctx.group(), Notes::default(), None);
            let label = |microbatch| Message { flow: Flow::Gradient, from: 2, to: 1, microbatch };
            if ctx.rank() == 0 {
                wire.send(1, label(1), 0, &message(1))?;
                return Ok(String::new());
            }
            Ok(wire.receive(0, label(0)).unwrap_err().to_string())
        });
        assert!(texts.unwrap()[1].contains("1RECV_B0 was expected"));
    }
}
