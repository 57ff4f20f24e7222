//! Calls under way.
use super::ProcessGroup;
use super::posted::Post;
use crate::backend::{Call, Fresh, Op, Unfinished};
use crate::{Error, Result, comm};
use candle_core::Tensor;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// A call under way, which this rank has entered and not waited for; `T` is what [`wait`](Self::wait) returns.
///
/// Other ranks can read this rank's tensors from now on; the result is made when it is waited for. Every rank starts its
/// calls in the same order; it may wait for them in any. Dropping it gives the result up and lets the others go on.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_dist::{Pending, ReduceOp, World};
///
/// World::local(2).run(|ctx| -> candle_dist::Result<()> {
///     let x = Tensor::new(&[1f32], &Device::Cpu)?;
///     let first = ctx.group().all_reduce_start(&x, ReduceOp::Sum)?;
///     let second = ctx.group().all_gather_start(&x, 0)?;
///     let done = Pending::wait_all([second, first])?;
///     assert_eq!(done[0].to_vec1::<f32>()?, [1.0, 1.0]);
///     assert_eq!(done[1].to_vec1::<f32>()?, [2.0]);
///     Ok(())
/// })?;
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
#[must_use = "the other ranks' results need this rank's tensors only, but this rank's result comes with `wait`"]
pub struct Pending<T = Tensor> {
    state: State,
    unpack: fn(Vec<Tensor>) -> Result<T>,
}

/// How long a wait for room looks for messages of other receives while none comes, before it waits for room alone.
const PATIENCE: Duration = Duration::from_secs(60);

/// A [`Pending`] of several tensors.
pub type PendingTensors = Pending<Vec<Tensor>>;

pub(super) enum State {
    Done(Vec<Tensor>),
    Open(Box<Open>),
    /// A receive, which the group makes in its turn.
    Posted(Arc<Post>, ProcessGroup),
}

/// A call that was started, for its wait.
pub(super) struct Open {
    pub(super) started: Box<dyn Unfinished>,
    pub(super) call: Call,
    pub(super) group: ProcessGroup,
}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.state {
            State::Done(_) => "done",
            State::Open(_) | State::Posted(..) => "open",
        };
        write!(f, "Pending({state})")
    }
}

/// The only tensor of a call.
pub(super) fn single(mut tensors: Vec<Tensor>) -> Result<Tensor> {
    tensors.pop().ok_or_else(|| Error::Unsupported("waiting for a call without a result".to_string()))
}

impl<T> Pending<T> {
    pub(super) fn new(state: State, unpack: fn(Vec<Tensor>) -> Result<T>) -> Self {
        Self { state, unpack }
    }

    /// Whether [`wait`](Self::wait) would return without waiting for another rank, with the result or an error.
    ///
    /// # Errors
    /// If the world has stopped, and for a receive over an engine that cannot probe for messages.
    pub fn is_ready(&self) -> Result<bool> {
        match &self.state {
            State::Done(_) => Ok(true),
            State::Open(open) => open.started.is_ready(),
            State::Posted(post, group) => group.has_come(post),
        }
    }

    /// The result, as soon as every rank has started the call.
    pub fn wait(self) -> Result<T> {
        self.finish(None)
    }

    /// Like [`wait`](Self::wait), for at most `timeout` in place of the timeout of the group or the world.
    ///
    /// # Errors
    /// When the time is over, the world stops with [`Cause::TimedOut`](crate::Cause::TimedOut) on all ranks. To look
    /// and go on, ask [`is_ready`](Self::is_ready).
    pub fn wait_timeout(self, timeout: Duration) -> Result<T> {
        self.finish(Some(timeout))
    }

    /// The results of all, in their order; the first error ends it.
    pub fn wait_all(pending: impl IntoIterator<Item = Self>) -> Result<Vec<T>> {
        pending.into_iter().map(Self::wait).collect()
    }

    fn finish(self, timeout: Option<Duration>) -> Result<T> {
        let tensors = match self.state {
            State::Done(tensors) => tensors,
            State::Open(open) => {
                let Open { mut started, call, group } = *open;
                // A send is over with its start.
                let _watched = (call.op != Op::Send).then(|| comm::watch_wait(&call, group.ranks()));
                if call.op == Op::Send {
                    let limit = timeout.or(group.timeout).unwrap_or(PATIENCE);
                    group.take_posted(limit, || started.is_ready())?;
                }
                if let Some(timeout) = timeout
                    && !started.set_timeout(timeout)
                {
                    group.poll(timeout, || started.is_ready())?;
                }
                started.finish()?.into_iter().map(Fresh::into_tensor).collect()
            }
            State::Posted(post, group) => vec![group.settle(&post, timeout)?],
        };
        (self.unpack)(tensors)
    }
}
