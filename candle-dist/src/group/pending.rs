//! Started calls.
use super::ProcessGroup;
use super::posted::PostedReceive;
use crate::backend::{Backend, Call, Fresh, Op, StartedCall, Tensors};
use crate::{Error, Result, comm};
use candle_core::Tensor;
use std::fmt;
use std::sync::Arc;
use std::thread::ThreadId;
use std::time::Duration;

/// A started call, for which this rank has not waited yet; `T` is the result of [`wait`](Self::wait).
///
/// Other ranks can read this rank's tensors, as they are now, from now on; the result is computed in the wait. Every rank starts its
/// calls in the same order, but may wait for them in any order. Dropping it discards the result and does not block
/// other ranks.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_dist::{Collective, Cut, Pending, ReduceOp, World};
///
/// World::threads(2).run(|ctx| -> candle_dist::Result<()> {
///     let x = Tensor::new(&[1f32], &Device::Cpu)?;
///     let first = ctx.group().call(Collective::AllReduce(ReduceOp::Sum)).start(&x)?;
///     let second = ctx.group().call(Collective::all_gather(Cut::new(0, &[1, 1]))).start(&x)?;
///     let done = Pending::wait_all([second, first])?;
///     assert_eq!(done[0].to_vec1::<f32>()?, [1.0, 1.0]);
///     assert_eq!(done[1].to_vec1::<f32>()?, [2.0]);
///     Ok(())
/// })?;
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
#[must_use = "the other ranks' results need this rank's tensors only, but this rank's result comes with `wait`"]
pub struct Pending<T = Tensor> {
    state: PendingState,
    unpack: fn(Vec<Tensor>) -> Result<T>,
}

/// How long a wait for room looks for messages of other receives while none comes, before it only waits for room.
const PATIENCE: Duration = Duration::from_secs(60);

/// A [`Pending`] of several tensors.
pub type PendingTensors = Pending<Vec<Tensor>>;

pub(super) enum PendingState {
    Done(Vec<Tensor>),
    Open(Box<OpenCall>),
    /// A receive, which the group runs in its turn.
    Posted(Arc<PostedReceive>, ProcessGroup),
}

/// A started call, for its wait.
pub(super) struct OpenCall {
    started: Box<dyn StartedCall>,
    call: Call,
    /// The memory for the results; empty for new memory.
    outputs: Tensors,
    group: ProcessGroup,
    /// The thread that started it.
    thread: ThreadId,
}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.state {
            PendingState::Done(_) => "done",
            PendingState::Open(_) | PendingState::Posted(..) => "open",
        };
        write!(f, "Pending({state})")
    }
}

/// Returns the only tensor of a call.
pub(super) fn single(mut tensors: Vec<Tensor>) -> Result<Tensor> {
    tensors.pop().ok_or_else(|| Error::Unsupported("a call without a result".to_string()))
}

impl<T> Pending<T> {
    pub(super) fn new(state: PendingState, unpack: fn(Vec<Tensor>) -> Result<T>) -> Self {
        Self { state, unpack }
    }

    /// Returns the same call with another form of its result.
    pub(super) fn with<U>(self, unpack: fn(Vec<Tensor>) -> Result<U>) -> Pending<U> {
        Pending { state: self.state, unpack }
    }

    /// Returns whether [`wait`](Self::wait) would return without waiting for another rank, with the result or an error.
    ///
    /// # Errors
    /// If the world has stopped, and for a receive over a backend that cannot probe for messages.
    pub fn is_ready(&self) -> Result<bool> {
        match &self.state {
            PendingState::Done(_) => Ok(true),
            PendingState::Open(open) => open.started.is_ready(),
            PendingState::Posted(post, group) => group.has_come(post),
        }
    }

    /// Waits until every rank has started the call, and returns the result.
    pub fn wait(self) -> Result<T> {
        self.finish(None)
    }

    /// Like [`wait`](Self::wait), for at most `timeout` instead of the timeout of the group or the world.
    ///
    /// # Errors
    /// When the timeout expires, the world stops with [`Cause::TimedOut`](crate::Cause::TimedOut) on all ranks. To
    /// check without waiting, call [`is_ready`](Self::is_ready).
    pub fn wait_timeout(self, timeout: Duration) -> Result<T> {
        self.finish(Some(timeout))
    }

    /// Waits for all and returns their results in order; stops at the first error.
    pub fn wait_all(pending: impl IntoIterator<Item = Self>) -> Result<Vec<T>> {
        pending.into_iter().map(Self::wait).collect()
    }

    fn finish(self, timeout: Option<Duration>) -> Result<T> {
        let tensors = match self.state {
            PendingState::Done(tensors) => tensors,
            PendingState::Open(open) => {
                let OpenCall { mut started, call, outputs, group, thread } = *open;
                let is_mine = call.op() != Op::Send && thread == std::thread::current().id();
                let entered = is_mine.then(|| group.under_way.enter_wait(call.site)).transpose();
                let _entered = entered.map_err(|other| group.overlap(other, call.site))?;
                // A send is complete when it has started.
                let _watched = (call.op() != Op::Send).then(|| comm::watch_wait(&call, group.ranks()));
                if call.op() == Op::Send {
                    let limit = timeout.or(group.timeout).unwrap_or(PATIENCE);
                    group.take_posted(limit, || started.is_ready())?;
                }
                if let Some(timeout) = timeout
                    && !started.set_timeout(timeout)
                {
                    group.poll(timeout, || started.is_ready())?;
                }
                let made = started.finish()?;
                match outputs.is_empty() {
                    true => made.into_iter().map(Fresh::into_tensor).collect(),
                    false => outputs.to_vec(),
                }
            }
            PendingState::Posted(post, group) => {
                let is_mine = post.thread == std::thread::current().id();
                let entered = is_mine.then(|| group.under_way.enter_receive(&post.call)).transpose();
                let _entered = entered.map_err(|other| group.overlap(other, post.call.site))?;
                vec![group.settle(&post, timeout)?]
            }
        };
        (self.unpack)(tensors)
    }
}

impl ProcessGroup {
    /// Starts a call on inputs of `size` bytes, and keeps what its wait needs.
    pub(super) fn open(
        &self,
        call: Call,
        size: usize,
        outputs: Tensors,
        start: impl FnOnce(&dyn Backend, Call) -> Result<Box<dyn StartedCall>>,
    ) -> Result<PendingState> {
        let started = self.engage(call.clone(), size, start)?;
        let (group, thread) = (self.clone(), std::thread::current().id());
        Ok(PendingState::Open(Box::new(OpenCall { started, call, outputs, group, thread })))
    }
}
