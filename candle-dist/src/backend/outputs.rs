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

/// Moves results to the given memory, from any device; without given memory they are returned.
pub fn fill(outputs: &[Tensor], results: Results) -> Result<Results> {
    if outputs.is_empty() {
        return Ok(results);
    }
    let mut pairs = outputs.iter().zip(results);
    pairs.try_for_each(|(output, made)| {
        overwrite(output, &[&made.into_tensor().to_device(output.device())?])
    })?;
    Ok(Results::new())
}

/// Moves a message to the given memory, or returns it, with its sender.
///
/// Ranks that are threads may have sent a tensor in that same memory.
pub(super) fn deliver(from: usize, message: Tensor, output: Option<&Tensor>) -> Result<(usize, Tensor)> {
    let Some(output) = output else { return Ok((from, message)) };
    let message = message.to_device(output.device())?;
    match share_memory(output, &message) {
        true => overwrite(output, &[&Fresh::copy_of(&message)?.into_tensor()])?,
        false => overwrite(output, &[&message])?,
    }
    Ok((from, output.clone()))
}

/// A started call whose results are written to given memory when it finishes.
struct OutputCall {
    started: Box<dyn StartedCall>,
    outputs: Tensors,
}

/// Returns a started call that writes its results to the given memory, if there is some, when it finishes.
pub fn filled(started: Box<dyn StartedCall>, outputs: Tensors) -> Box<dyn StartedCall> {
    match outputs.is_empty() {
        true => started,
        false => Box::new(OutputCall { started, outputs }),
    }
}

impl StartedCall for OutputCall {
    fn is_ready(&self) -> Result<bool> {
        self.started.is_ready()
    }

    fn finish(self: Box<Self>) -> Result<Results> {
        fill(&self.outputs, self.started.finish()?)
    }

    fn set_timeout(&mut self, timeout: Duration) -> bool {
        self.started.set_timeout(timeout)
    }
}

/// A started call that is complete.
struct CompletedCall(Results);

/// Returns a started call that is complete, with these results.
pub fn completed(results: Results) -> Box<dyn StartedCall> {
    Box::new(CompletedCall(results))
}

impl StartedCall for CompletedCall {
    fn is_ready(&self) -> Result<bool> {
        Ok(true)
    }

    fn finish(self: Box<Self>) -> Result<Results> {
        Ok(self.0)
    }

    fn set_timeout(&mut self, _: Duration) -> bool {
        true
    }
}
