//! Results in memory that the caller gives, and the parts of engines that need no engine.
use super::fresh::{Fresh, Results, Tensors};
use super::overwrite::overwrite;
use super::storage::share_memory;
use super::unfinished::Unfinished;
use crate::{Error, Result};
use candle_core::{DType, Shape, Tensor};
use std::time::Duration;

/// What is known of a message before it is received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Envelope {
    /// The sender, counted in the group.
    pub from: usize,
    /// The tag that it was sent with.
    pub tag: u32,
    /// The dtype of its elements.
    pub dtype: DType,
    /// The shape.
    pub shape: Shape,
}

/// The error of engines that lack something, alike on all ranks.
pub(crate) fn unsupported(engine: &str, what: &str) -> Error {
    Error::Unsupported(format!("the engine {engine} cannot {what}"))
}

/// Moves results to the memory that was given for them, from whatever device the engine makes them on.
pub(super) fn fill(outputs: &[Tensor], results: Results) -> Result<()> {
    let mut pairs = outputs.iter().zip(results);
    pairs.try_for_each(|(output, made)| overwrite(output, &[&made.into_tensor().to_device(output.device())?]))
}

/// Moves a message to the memory that was given for it.
///
/// Ranks that are threads may have sent a tensor of that very memory.
pub(super) fn receive(output: &Tensor, message: &Tensor) -> Result<()> {
    match share_memory(output, message) {
        true => overwrite(output, &[&Fresh::copy_of(message)?.into_tensor()]),
        false => overwrite(output, &[message]),
    }
}

/// A call whose results go to given memory when it is finished.
struct Filling {
    started: Box<dyn Unfinished>,
    outputs: Tensors,
}

pub(super) fn filling(started: Box<dyn Unfinished>, outputs: Tensors) -> Box<dyn Unfinished> {
    Box::new(Filling { started, outputs })
}

impl Unfinished for Filling {
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

/// Nothing to wait for.
struct Done;

pub(super) fn done() -> Box<dyn Unfinished> {
    Box::new(Done)
}

impl Unfinished for Done {
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
