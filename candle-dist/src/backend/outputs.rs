//! Results in given memory, and default methods of backends.
use super::fresh::{Fresh, Results, Tensors};
use super::overwrite::overwrite;
use super::started::StartedCall;
use super::storage::share_memory;
use crate::{Error, Result};
use candle_core::{DType, Shape, Tensor};
use std::time::Duration;

/// The properties of a message that has not been received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Envelope {
    /// The sender, as a rank of the group.
    pub from: usize,
    /// The tag of the message.
    pub tag: u32,
    /// The dtype of the elements.
    pub dtype: DType,
    /// The shape.
    pub shape: Shape,
}

/// Returns the error for a missing feature of a backend, the same on all ranks.
pub(crate) fn unsupported(backend: &str, what: &str) -> Error {
    Error::Unsupported(format!("the {backend} backend cannot {what}"))
}

/// Moves results to the given memory, from any device.
pub(super) fn fill(outputs: &[Tensor], results: Results) -> Result<()> {
    let mut pairs = outputs.iter().zip(results);
    pairs.try_for_each(|(output, made)| overwrite(output, &[&made.into_tensor().to_device(output.device())?]))
}

/// Moves a message to the given memory.
///
/// Ranks that are threads may have sent a tensor in that same memory.
pub(super) fn receive(output: &Tensor, message: &Tensor) -> Result<()> {
    match share_memory(output, message) {
        true => overwrite(output, &[&Fresh::copy_of(message)?.into_tensor()]),
        false => overwrite(output, &[message]),
    }
}

/// A started call whose results are written to given memory when it finishes.
struct Filling {
    started: Box<dyn StartedCall>,
    outputs: Tensors,
}

pub(super) fn filling(started: Box<dyn StartedCall>, outputs: Tensors) -> Box<dyn StartedCall> {
    Box::new(Filling { started, outputs })
}

impl StartedCall for Filling {
    fn is_ready(&self) -> Result<bool> {
        self.started.is_ready()
    }

    fn finish(self: Box<Self>) -> Result<Results> {
        fill(&self.outputs, self.started.finish()?)?;
        Ok(Results::new())
    }

    fn set_timeout(&mut self, timeout: Duration) -> bool {
        self.started.set_timeout(timeout)
    }
}

/// A started call that is already complete.
struct Done;

pub(super) fn done() -> Box<dyn StartedCall> {
    Box::new(Done)
}

impl StartedCall for Done {
    fn is_ready(&self) -> Result<bool> {
        Ok(true)
    }

    fn finish(self: Box<Self>) -> Result<Results> {
        Ok(Results::new())
    }

    fn set_timeout(&mut self, _: Duration) -> bool {
        true
    }
}
