//! Values from stage to stage: tensors are handed over, everything else travels in a header.
//!
//! A message is a fixed head (what it is, for which stage and microbatch), an outline of the values where it differs from
//! the last one on the same way, and the tensors. So shapes may change from microbatch to microbatch, nothing is probed, and
//! in the common case an action costs one small message more than its tensors.
use crate::schedule::{Action, Flow, Message};
use crate::{Error, Result, Value};
use candle_core::{DType, Device, Shape, Tensor};
use candle_dist::ProcessGroup;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};

/// The numbers in a head: what identifies the message, the computations before it, and the bytes of an outline.
const HEAD: usize = 6;

/// What identifies a message, in numbers.
fn numbers(Message { flow, from, to, microbatch }: Message) -> [i64; 4] {
    [i64::from(flow == Flow::Gradient), from as i64, to as i64, microbatch as i64]
}

/// A value without the elements of its tensors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Outline {
    Tensor(Vec<usize>, String),
    Int(i64),
    /// By its bits, which JSON would not keep.
    Float(u64),
    Bool(bool),
    Text(String),
    None,
    List(Vec<Outline>),
    Tuple(Vec<Outline>),
    Map(BTreeMap<String, Outline>),
}

impl Outline {
    /// The outline of a value, whose tensors go to `tensors`.
    fn of(value: &Value, tensors: &mut Vec<Tensor>) -> Self {
        let mut all = |values: &[Value]| values.iter().map(|value| Self::of(value, tensors)).collect();
        match value {
            Value::List(values) => Self::List(all(values)),
            Value::Tuple(values) => Self::Tuple(all(values)),
            Value::Map(values) => {
                Self::Map(values.iter().map(|(key, value)| (key.clone(), Self::of(value, tensors))).collect())
            }
            Value::Tensor(tensor) => {
                tensors.push(tensor.clone());
                Self::Tensor(tensor.dims().to_vec(), tensor.dtype().as_str().into())
            }
            Value::Int(number) => Self::Int(*number),
            Value::Float(number) => Self::Float(number.to_bits()),
            Value::Bool(truth) => Self::Bool(*truth),
            Value::Text(text) => Self::Text(text.clone()),
            Value::None => Self::None,
        }
    }

    /// The value, whose tensors `next` gives in order.
    fn value(&self, next: &mut dyn FnMut(&[usize], DType) -> Result<Tensor>) -> Result<Value> {
        let mut all = |outlines: &[Self]| outlines.iter().map(|outline| outline.value(next)).collect::<Result<_>>();
        Ok(match self {
            Self::List(outlines) => Value::List(all(outlines)?),
            Self::Tuple(outlines) => Value::Tuple(all(outlines)?),
            Self::Map(outlines) => {
                let value = |(key, outline): (&String, &Self)| Ok((key.clone(), outline.value(next)?));
                Value::Map(outlines.iter().map(value).collect::<Result<_>>()?)
            }
            Self::Tensor(dims, dtype) => {
                let dtype = dtype.parse().map_err(|_| Error::Pipe(format!("a message with {dtype} tensors")))?;
                Value::Tensor(next(dims, dtype)?)
            }
            Self::Int(number) => Value::Int(*number),
            Self::Float(bits) => Value::Float(f64::from_bits(*bits)),
            Self::Bool(truth) => Value::Bool(*truth),
            Self::Text(text) => Value::Text(text.clone()),
            Self::None => Value::None,
        })
    }
}

/// A way between two stages: messages that are likely to be alike.
type Way = (Flow, usize, usize);

/// One rank's end of all ways, for one step.
#[derive(Debug)]
pub(super) struct Wire<'a> {
    group: &'a ProcessGroup,
    sent: HashMap<Way, Vec<Outline>>,
    received: HashMap<Way, Vec<Outline>>,
}

impl<'a> Wire<'a> {
    pub(super) fn new(group: &'a ProcessGroup) -> Self {
        Self { group, sent: HashMap::new(), received: HashMap::new() }
    }

    /// Hands values to a rank, without waiting for it and without copying those that are contiguous.
    ///
    /// Nobody may write to the tensors' memory afterwards. `path` is how many computations came one after the other until
    /// this was made.
    #[track_caller]
    pub(super) fn send(&mut self, to: usize, message: Message, path: usize, values: &[Value]) -> Result<()> {
        let mut tensors = Vec::new();
        let outlines: Vec<Outline> = values.iter().map(|value| Outline::of(value, &mut tensors)).collect();
        let way = (message.flow, message.from, message.to);
        let known = self.sent.get(&way) == Some(&outlines);
        let text = if known { Vec::new() } else { serde_json::to_vec(&outlines).map_err(unreadable)? };
        let head = [&numbers(message)[..], &[path as i64, text.len() as i64]].concat();
        self.start(Tensor::from_vec(head, HEAD, &Device::Cpu)?, to)?;
        if !known {
            self.start(Tensor::from_vec(text.clone(), text.len(), &Device::Cpu)?, to)?;
            self.sent.insert(way, outlines);
        }
        tensors.into_iter().try_for_each(|tensor| self.start(tensor.detach(), to))
    }

    /// A send that waited for its receiver could wait forever: that one may take it only after it has sent to this rank.
    #[track_caller]
    fn start(&self, tensor: Tensor, to: usize) -> Result<()> {
        drop(self.group.send_owned_start(tensor, to, 0)?);
        Ok(())
    }

    /// The next message of a rank, which must be this one, behind its path.
    #[track_caller]
    pub(super) fn receive(&mut self, from: usize, message: Message) -> Result<(usize, Vec<Value>)> {
        let head = self.group.recv(HEAD, DType::I64, from)?.to_vec1::<i64>()?;
        if head[..4] != numbers(message) {
            let (got, want) = (&head[..4], Action::Recv(message));
            let reason =
                format!("rank {from} sent {got:?} (gradients?, from stage, to stage, microbatch) where {want}");
            return Err(Error::Schedule(format!("{reason} was to come; run the same schedule on all ranks")));
        }
        let way = (message.flow, message.from, message.to);
        if head[5] > 0 {
            let text = self.group.recv(head[5] as usize, DType::U8, from)?.to_vec1::<u8>()?;
            self.received.insert(way, serde_json::from_slice(&text).map_err(unreadable)?);
        }
        let unknown = || Error::Pipe(format!("rank {from} refers to a message that did not come"));
        let outlines = self.received.get(&way).ok_or_else(unknown)?;
        let mut next = |dims: &[usize], dtype| Ok(self.group.recv(Shape::from(dims), dtype, from)?);
        let values = outlines.iter().map(|outline| outline.value(&mut next)).collect::<Result<_>>()?;
        Ok((head[4] as usize, values))
    }
}

fn unreadable(error: serde_json::Error) -> Error {
    Error::Pipe(format!("a message between stages: {error}"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::Wire;
    use crate::schedule::{Flow, Message};
    use crate::{Result, Value};
    use candle_core::{DType, Device, Tensor};
    use candle_dist::{World, comm};
    use std::collections::BTreeMap;

    fn message(rows: usize) -> Vec<Value> {
        let x = Tensor::arange(0f64, rows as f64, &Device::Cpu).unwrap();
        let map = BTreeMap::from([("a".to_string(), Value::Float(f64::NAN)), ("b".into(), Value::Text("é".into()))]);
        let nested =
            Value::List(vec![Value::Map(map), Value::Tuple(vec![Value::Int(-7), Value::Bool(true), Value::None])]);
        vec![Value::Tensor(x.clone()), nested, Value::Tensor(x.to_dtype(DType::BF16).unwrap())]
    }

    #[test]
    fn values_arrive_as_they_were_and_outlines_are_sent_where_they_change() {
        World::local(2)
            .run(|ctx| -> Result<()> {
                let mut wire = Wire::new(ctx.group());
                for (microbatch, rows) in [3, 3, 0, 2].into_iter().enumerate() {
                    let label = Message { flow: Flow::Activation, from: 1, to: 2, microbatch };
                    if ctx.rank() == 0 {
                        let (sent, counts) = comm::record(|| wire.send(1, label, microbatch, &message(rows)));
                        sent?;
                        assert_eq!(counts.total(), if microbatch == 1 { 3 } else { 4 });
                    } else {
                        let (path, got) = wire.receive(0, label)?;
                        assert_eq!(path, microbatch);
                        assert_eq!(got.len(), 3);
                        for (got, want) in got.iter().zip(message(rows)) {
                            assert!(got.same(&want)?, "{got}, sent {want}");
                        }
                    }
                }
                Ok(())
            })
            .unwrap();
    }

    #[test]
    fn another_message_than_the_expected_one_is_an_error() {
        let texts = World::local(2).run(|ctx| -> Result<String> {
            let mut wire = Wire::new(ctx.group());
            let label = |microbatch| Message { flow: Flow::Gradient, from: 2, to: 1, microbatch };
            if ctx.rank() == 0 {
                wire.send(1, label(1), 0, &message(1))?;
                return Ok(String::new());
            }
            Ok(wire.receive(0, label(0)).unwrap_err().to_string())
        });
        assert!(texts.unwrap()[1].contains("1RECV_B0 was to come"));
    }
}
