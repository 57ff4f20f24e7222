//! The interface between a [`ProcessGroup`](crate::ProcessGroup) and the backend that moves its data.
//!
#![doc = include_str!("README.md")]

mod collective;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod device;
mod element;
mod fresh;
mod guards;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(any(feature = "nccl", test))]
pub mod nccl;
mod outputs;
pub(crate) mod overwrite;
mod recent;
mod reduce;
mod regions;
mod runs;
pub(crate) mod simulated;
mod sink;
mod started;
pub(crate) mod storage;
mod strips;
pub mod threads;
mod wrapping;

pub use crate::call::{
    Call, Collective, Cut, Cuts, Dims, Factor, Form, Op, RAGGED, ReduceOp, called_from, line_of,
};
pub use crate::freeable::no_memory;
pub use collective::compute;
pub(crate) use device::joined;
pub(crate) use fresh::bytes;
pub use fresh::{Fresh, Ready, Results, Tensors};
pub use outputs::{Envelope, completed, fill, filled};
pub use started::StartedCall;
pub use wrapping::BackendWrapper;
#[doc(hidden)]
pub use wrapping::Wrapping;

use crate::{Cause, Result};
use candle_core::{Device, Tensor};
use std::fmt;
use std::sync::Arc;

/// A backend that moves tensors between the ranks of one group.
///
/// Ranks are counted within the group. A call has one [`Collective`], whose cuts have been checked. Tensors are
/// contiguous and detached. Implementations must return the same [`Error::Group`](crate::Error::Group) on every rank for
/// each failure.
///
/// The default methods work on every backend, or return the same `unsupported` error on all ranks. [`compute`] computes
/// the results of a collective from the tensors of all ranks. To wrap another backend, implement [`BackendWrapper`] instead.
pub trait Backend: Send + Sync + fmt::Debug {
    /// Returns the name of the backend, e.g. `"threads"`.
    fn name(&self) -> &'static str;
    /// Returns this rank within the group.
    fn rank(&self) -> usize;
    /// Returns the members as ranks of the world, in group order.
    fn ranks(&self) -> &[usize];
    /// Returns the device of this rank, unless its program uses another one.
    fn device(&self) -> &Device {
        static HOST: Device = Device::Cpu;
        &HOST
    }
    /// Runs a collective, or sends a message, on this rank's `tensors`. Returns when they may change again.
    ///
    /// Returns one result per tensor in new memory, or none on ranks without result. If there are `outputs`, it writes the
    /// results there instead and returns none; they are contiguous and have the shape, dtype and device of the results.
    /// Other ranks may run the same call without outputs. A call [in place](Form::InPlace) has its tensor as its output. A
    /// [monitored](Form::Monitored) barrier stops the world with [`Cause::Missing`] after its timeout.
    ///
    /// A message waits only if there is a limit on unread messages and it is reached.
    fn run(&self, call: Call, tensors: Tensors, outputs: Tensors) -> Result<Results>;
    /// Starts what [`run`](Self::run) runs, without waiting. The tensors must not change until every rank has finished it.
    ///
    /// The started call writes to the outputs when it finishes. That of a message finishes once the limit on unread
    /// messages is kept. Programs that receive a message when they need it, not when it is sent, rely on a start that never
    /// waits. Pipelines do: the proof that they end assumes it.
    fn start(&self, call: Call, tensors: Tensors, outputs: Tensors) -> Result<Box<dyn StartedCall>>;
    /// Receives the next tensor from the sender that the call names, or from any rank, into `output` if there is one.
    ///
    /// Returns the sender and the tensor.
    fn recv(&self, call: Call, output: Option<&Tensor>) -> Result<(usize, Tensor)>;
    /// Returns the oldest message for a receive that has arrived but is unread. Never waits.
    fn probe(&self, _: &Call) -> Result<Option<Envelope>> {
        Err(outputs::unsupported(self.name(), "probe for messages"))
    }
    /// Returns whether a message of this many bytes is copied before [`run`](Self::run) or [`start`](Self::start) returns.
    ///
    /// The memory of other tensors is read later, or arrives as it is, so [`ProcessGroup`](crate::ProcessGroup) copies them.
    fn copies_sent(&self, _bytes: usize) -> bool {
        false
    }
    /// Returns whether rank `peer` is known to have returned, so that it sends no further messages.
    fn has_returned(&self, _peer: usize) -> bool {
        false
    }
    /// Returns whether calls respect their own [`Call::timeout`].
    fn has_call_timeouts(&self) -> bool {
        false
    }
    /// Ends what a rank still does for others. It has told them that it ends, and still hears of them.
    /// Returns the failure of the world if the rank's results depend on what has not ended well.
    fn finish(&self) -> Result<()> {
        Ok(())
    }
    /// Creates a group of some members, given as ranks of this group in the new order. Only these members call it.
    fn subgroup(&self, members: &[usize]) -> Result<Arc<dyn Backend>>;
    /// Stops this group's world, unless it has stopped. Every rank's failure then has this cause.
    fn stop(&self, cause: Cause);
    /// Returns the failure that stopped this group's world, if any.
    fn failure(&self) -> Option<Arc<crate::GroupFailure>>;
}

impl dyn Backend {
    /// Stops this group's world, unless it has stopped. Every rank's failure then blames this rank.
    pub fn fail(&self, message: &str) {
        self.stop(Cause::Failed { rank: self.ranks()[self.rank()], message: message.to_string() });
    }
}
