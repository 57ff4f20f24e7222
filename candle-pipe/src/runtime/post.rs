//! Packs the values that stages exchange.
use super::notes::Notes;
use super::wire::Wire;
use crate::schedule::Message;
use crate::tape::{Activation, Gradient};
use crate::{Error, Result, Value};
use candle_core::Tensor;
use candle_dist::{DeviceMesh, ProcessGroup, TensorTree};
use std::collections::HashSet;

/// One rank's messages to and from the others.
pub(super) struct Post<'a> {
    wire: Wire<'a>,
}

impl<'a> Post<'a> {
    pub(super) fn new(group: &'a ProcessGroup, notes: Notes, mesh: Option<&'a DeviceMesh>) -> Self {
        Self { wire: Wire::new(group, notes, mesh) }
    }

    /// Packs a value together with flags for its tensors that require a gradient.
    pub(super) fn pack(activation: &Activation) -> Value {
        let tracked = activation.tracked.iter().copied().map(Value::Bool).collect();
        Value::Tuple(vec![activation.value.clone(), Value::List(tracked)])
    }

    pub(super) fn unpack(packed: &Value) -> Result<Activation> {
        let tracked = packed.at(1)?.items()?.iter().map(Value::bool).collect::<Result<_>>()?;
        Ok(Activation { value: packed.at(0)?.clone(), tracked })
    }

    pub(super) fn pack_gradient(gradient: Gradient) -> Value {
        Value::List(gradient.0.into_iter().map(|part| part.map_or(Value::None, Value::Tensor)).collect())
    }

    pub(super) fn unpack_gradient(packed: &Value) -> Result<Gradient> {
        let part = |part: &Value| match part {
            Value::Tensor(tensor) => Ok(Some(tensor.clone())),
            Value::None => Ok(None),
            other => Err(Error::Pipe(format!("{other} for a gradient"))),
        };
        Ok(Gradient(packed.items()?.iter().map(part).collect::<Result<_>>()?))
    }

    pub(super) fn send(&mut self, to: usize, message: Message, path: usize, values: &[Value]) -> Result<()> {
        self.wire.send(to, message, path, values)
    }

    pub(super) fn receive(&mut self, from: usize, message: Message) -> Result<(usize, Vec<Value>)> {
        self.wire.receive(from, message)
    }
}

/// Returns the address of a tensor's memory.
pub(super) fn address(tensor: &Tensor) -> usize {
    std::ptr::from_ref(&*tensor.storage_and_layout().0).addr()
}

/// Copies those tensors of a value that lie in the memory of a parameter: an optimizer writes there while another rank
/// may still read the tensor.
pub(super) fn aliases(value: &Value, parameters: &HashSet<usize>) -> Result<Value> {
    value.map_tensors(|tensor| -> Result<Tensor> {
        match parameters.contains(&address(tensor)) {
            true => Ok(tensor.force_contiguous()?),
            false => Ok(tensor.clone()),
        }
    })
}
