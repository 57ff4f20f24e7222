//! The contract between a [`ProcessGroup`](crate::ProcessGroup) and the engine that moves its bytes.
mod collective;
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
mod reduce;
mod regions;
mod runs;
pub(crate) mod simulated;
mod sink;
pub(crate) mod storage;
mod unfinished;
mod wrapping;

pub use crate::call::{Call, Dims, Factor, Form, Op, RAGGED, ReduceOp};
pub use collective::compute;
pub(crate) use fresh::bytes;
pub use fresh::{Fresh, Results, Tensors};
pub use outputs::Envelope;
pub use ready::Ready;
pub use unfinished::Unfinished;
pub use wrapping::Wrapping;

use crate::{Cause, Result};
use candle_core::{Device, Tensor};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// An engine that moves tensors among the ranks of one group.
///
/// Ranks are counted within the group. Tensors come in contiguous, detached and validated against `call`, which names
/// the dims and the piece sizes; every result is fresh memory. Implementations turn each failure into the same
/// [`Error::Group`](crate::Error::Group) on every rank.
///
/// Methods with a default work on every engine, or return the same `unsupported` error on all ranks. [`compute`] makes
/// the results of a collective from the tensors of all ranks. An engine around another one implements [`Wrapping`]
/// instead.
pub trait Backend: Send + Sync + fmt::Debug {
    /// The engine's name, e.g. `"local"`.
    fn name(&self) -> &'static str;
    /// This rank within the group.
    fn rank(&self) -> usize;
    /// The members as ranks of the world, in group order.
    fn ranks(&self) -> &[usize];
    /// The device that this rank computes on, unless its program chooses another.
    fn device(&self) -> &Device {
        static HOST: Device = Device::Cpu;
        &HOST
    }
    /// Makes the collective that `call` describes with this rank's `tensors`, and returns when they may change again.
    ///
    /// One result for each tensor; none on ranks that get none.
    fn run(&self, call: Call, tensors: Tensors) -> Result<Results>;
    /// Makes an all_reduce or a broadcast whose result takes the place of `tensor`, which must be contiguous.
    fn run_in_place(&self, call: Call, tensor: &Tensor) -> Result<()>;
    /// Like [`run`](Self::run), with the results written to `outputs`, one for each result.
    ///
    /// Outputs are contiguous and have the shape, dtype and device of the results. Other ranks may make the same call
    /// with [`run`](Self::run).
    fn run_into(&self, call: Call, tensors: Tensors, outputs: &[Tensor]) -> Result<()> {
        outputs::fill(outputs, self.run(call, tensors)?)
    }
    /// Starts the collective without waiting; the tensors must not change before every rank has finished it.
    fn start(&self, call: Call, tensors: Tensors) -> Result<Box<dyn Unfinished>>;
    /// Whether what a rank sends arrives as the same memory.
    fn shares_memory(&self) -> bool {
        true
    }
    /// Like [`start`](Self::start), with the results written to `outputs` when the call is finished.
    fn start_into(&self, call: Call, tensors: Tensors, outputs: Tensors) -> Result<Box<dyn Unfinished>> {
        Ok(outputs::filling(self.start(call, tensors)?, outputs))
    }
    /// Sends to `call.peer` without waiting for it, unless there is a bound on unread messages and it is reached.
    fn send(&self, call: Call, tensor: Tensor) -> Result<()>;
    /// Like [`send`](Self::send) without waiting at all, however much is unread; what is returned is finished once the bound
    /// is kept.
    ///
    /// Programs that receive when they need a message, not when it is sent, rely on it. Pipelines do: they are proved to end
    /// for sends that do not wait.
    fn start_send(&self, call: Call, tensor: Tensor) -> Result<Box<dyn Unfinished>> {
        self.send(call, tensor)?;
        Ok(outputs::done())
    }
    /// Receives the next tensor from `call.peer`.
    fn recv(&self, call: Call) -> Result<Tensor>;
    /// Like [`recv`](Self::recv), with the tensor's elements written to `output`.
    fn recv_into(&self, call: Call, output: &Tensor) -> Result<()> {
        outputs::receive(output, &self.recv(call)?)
    }
    /// Receives the next tensor with `call.tag` from any rank, and returns the sender.
    fn recv_any(&self, _: Call) -> Result<(usize, Tensor)> {
        Err(outputs::unsupported(self.name(), "receive from any rank"))
    }
    /// The oldest message with `call.tag` that is here and not received yet, from `call.peer` or, if it is `None`, from
    /// any rank; never waits.
    fn probe(&self, _: &Call) -> Result<Option<Envelope>> {
        Err(outputs::unsupported(self.name(), "probe for messages"))
    }
    /// Whether rank `peer` is known to have returned: what it has not sent before never comes.
    fn has_returned(&self, _peer: usize) -> bool {
        false
    }
    /// Whether calls keep their own [`Call::timeout`].
    fn has_call_timeouts(&self) -> bool {
        false
    }
    /// This engine's own barrier that stops the world with [`Cause::Missing`] after `timeout`, if it has one; otherwise the
    /// group makes one of messages.
    fn monitored_barrier(&self, _: &Call, _: Duration) -> Option<Result<()>> {
        None
    }
    /// A group of some members, given as ranks of this group in the new order; only they call this.
    fn subgroup(&self, members: &[usize]) -> Result<Arc<dyn Backend>>;
    /// Stops this group's world, unless it has stopped: every rank's failure is that of this one.
    fn fail(&self, message: &str);
    /// Like [`fail`](Self::fail) for a cause that is more than a message.
    fn stop(&self, cause: Cause) {
        self.fail(&cause.to_string());
    }
    /// The failure that stopped this group's world, if one did.
    fn failure(&self) -> Option<Arc<crate::GroupFailure>>;
}
