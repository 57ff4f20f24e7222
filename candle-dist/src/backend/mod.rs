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
pub mod local;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(any(feature = "nccl", test))]
pub mod nccl;
mod outputs;
pub(crate) mod overwrite;
mod ready;
mod recent;
mod reduce;
mod regions;
mod runs;
pub(crate) mod simulated;
mod sink;
mod started;
pub(crate) mod storage;
mod wrapping;

pub use crate::call::{Call, Dims, Factor, Form, Op, RAGGED, ReduceOp, called_from, line_of};
pub use crate::freeable::no_memory;
pub use collective::compute;
pub(crate) use fresh::bytes;
pub use fresh::{Fresh, Results, Tensors};
pub use outputs::Envelope;
pub use ready::Ready;
pub use started::StartedCall;
pub use wrapping::Wrapping;

use crate::{Cause, Result};
use candle_core::{Device, Tensor};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// A backend that moves tensors between the ranks of one group.
///
/// Ranks are counted within the group. Tensors are contiguous, detached and validated against `call`, which has the
/// dims and the piece sizes. Every result must be new memory. Implementations must return the same
/// [`Error::Group`](crate::Error::Group) on every rank for each failure.
///
/// The default methods work on every backend, or return the same `unsupported` error on all ranks. [`compute`] computes
/// the results of a collective from the tensors of all ranks. To wrap another backend, implement [`Wrapping`] instead.
pub trait Backend: Send + Sync + fmt::Debug {
    /// Returns the name of the backend, e.g. `"local"`.
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
    /// Runs the collective that `call` describes on this rank's `tensors`. Returns when they may change again.
    ///
    /// Returns one result per tensor, or none on ranks without result.
    fn run(&self, call: Call, tensors: Tensors) -> Result<Results>;
    /// Runs an all_reduce or a broadcast whose result overwrites `tensor`, which must be contiguous.
    fn run_in_place(&self, call: Call, tensor: &Tensor) -> Result<()>;
    /// Like [`run`](Self::run), but writes the results to `outputs`, one per result.
    ///
    /// Outputs are contiguous and have the shape, dtype and device of the results. Other ranks may run the same call
    /// with [`run`](Self::run).
    fn run_into(&self, call: Call, tensors: Tensors, outputs: &[Tensor]) -> Result<()> {
        outputs::fill(outputs, self.run(call, tensors)?)
    }
    /// Starts the collective without waiting. The tensors must not change until every rank has finished it.
    fn start(&self, call: Call, tensors: Tensors) -> Result<Box<dyn StartedCall>>;
    /// Returns whether [`send`](Self::send) copies a tensor of this many bytes before it returns.
    ///
    /// The memory of other tensors is read later, or arrives as it is, so [`ProcessGroup`](crate::ProcessGroup) copies them.
    fn copies_sent(&self, _bytes: usize) -> bool {
        false
    }
    /// Like [`start`](Self::start), but writes the results to `outputs` when the call finishes.
    fn start_into(&self, call: Call, tensors: Tensors, outputs: Tensors) -> Result<Box<dyn StartedCall>> {
        Ok(outputs::filling(self.start(call, tensors)?, outputs))
    }
    /// Sends to `call.peer`. Waits only if there is a limit on unread messages and it is reached.
    fn send(&self, call: Call, tensor: Tensor) -> Result<()>;
    /// Like [`send`](Self::send), but never waits at its start. The returned call finishes once the limit is kept.
    ///
    /// Programs that receive a message when they need it, not when it is sent, rely on this. Pipelines do: the proof
    /// that they end assumes sends that do not wait.
    fn start_send(&self, call: Call, tensor: Tensor) -> Result<Box<dyn StartedCall>> {
        self.send(call, tensor)?;
        Ok(outputs::done())
    }
    /// Receives the next tensor from `call.peer`.
    fn recv(&self, call: Call) -> Result<Tensor>;
    /// Like [`recv`](Self::recv), but writes the elements to `output`.
    fn recv_into(&self, call: Call, output: &Tensor) -> Result<()> {
        let message = self.recv(call)?;
        if message.device().same_device(output.device()) {
            return outputs::receive(output, &message);
        }
        outputs::receive(output, &message.to_device(output.device())?)?;
        // A failure of the world may have ended the transfer that the copy waited for.
        self.failure().map_or(Ok(()), |failure| Err(crate::Error::Group(failure)))
    }
    /// Receives the next tensor with `call.tag` from any rank, and returns the sender.
    fn recv_any(&self, _: Call) -> Result<(usize, Tensor)> {
        Err(outputs::unsupported(self.name(), "receive from any rank"))
    }
    /// Returns the oldest message with `call.tag` that has arrived but is unread. It is from `call.peer`, or from any
    /// rank if that is `None`. Never waits.
    fn probe(&self, _: &Call) -> Result<Option<Envelope>> {
        Err(outputs::unsupported(self.name(), "probe for messages"))
    }
    /// Returns whether rank `peer` is known to have returned, so that it sends no further messages.
    fn has_returned(&self, _peer: usize) -> bool {
        false
    }
    /// Returns whether calls respect their own [`Call::timeout`].
    fn has_call_timeouts(&self) -> bool {
        false
    }
    /// Runs a barrier that stops the world with [`Cause::Missing`] after `timeout`, instead of the timeout of the call.
    fn monitored_barrier(&self, _: Call, _timeout: Duration) -> Result<()> {
        Err(outputs::unsupported(self.name(), "name the ranks that are missing at a barrier"))
    }
    /// Ends what a rank that is a process still does for others. It has told them that it ends, and still hears of them.
    /// Returns the failure of the world if the rank's results depend on what has not ended well.
    fn finish(&self) -> Result<()> {
        Ok(())
    }
    /// Creates a group of some members, given as ranks of this group in the new order. Only these members call it.
    fn subgroup(&self, members: &[usize]) -> Result<Arc<dyn Backend>>;
    /// Stops this group's world, unless it has stopped. Every rank's failure then blames this rank.
    fn fail(&self, message: &str);
    /// Like [`fail`](Self::fail), but with any cause.
    fn stop(&self, cause: Cause) {
        self.fail(&cause.to_string());
    }
    /// Returns the failure that stopped this group's world, if any.
    fn failure(&self) -> Option<Arc<crate::GroupFailure>>;
}
