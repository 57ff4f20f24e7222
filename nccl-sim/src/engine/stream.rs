//! Streams: queues of operations, with the events that mark points in them.
use super::{Exec, HardwareQueue};
use crate::abi::Thread;
use crate::clock::{Clock, Mark};
use crate::nccl::Launch;
use crate::report::Site;
use std::collections::VecDeque;
use std::sync::Arc;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum StreamKind {
    /// Waits for all blocking streams of the device, and they for it.
    Legacy,
    /// Blocking, and one for each host thread.
    PerThread(Thread),
    Blocking,
    NonBlocking,
}

/// What an operation does when its turn comes.
pub(crate) enum Work {
    /// Only marks a point, or waits.
    Nothing,
    /// Memory begins or ends, which takes no engine.
    Run(Box<dyn FnOnce(&mut Exec<'_>) + Send>),
    Copy(Box<dyn FnOnce(&mut Exec<'_>) + Send>),
    Kernel(Box<dyn FnOnce(&mut Exec<'_>) + Send>),
    Host(HostCall),
    Nccl(Box<Launch>),
}

impl Work {
    /// Returns whether the work takes its place in a hardware queue.
    pub(super) fn is_queued(&self) -> bool {
        !matches!(self, Self::Run(_) | Self::Copy(_))
    }
}

/// A host function with its argument.
pub(crate) struct HostCall(pub(crate) extern "C" fn(*mut std::ffi::c_void), pub(crate) usize);

pub(super) struct Op {
    pub(super) site: Arc<Site>,
    /// What the host had seen when it made the call.
    pub(super) host: Arc<Clock>,
    pub(super) waits: Vec<Mark>,
    pub(super) work: Work,
    pub(super) mark: Mark,
    /// Whether the hardware queue has given it to the device, or it takes none.
    pub(super) is_issued: bool,
    /// The time of the call on the timeline.
    pub(super) issued: f64,
}

pub(crate) struct Stream {
    pub(crate) device: usize,
    pub(crate) kind: StreamKind,
    pub(super) clock: Arc<Clock>,
    pub(super) queue: VecDeque<Op>,
    /// The last operation.
    pub(super) tail: Mark,
    /// Whether it is a copy, whose engine also marks events after it.
    pub(super) ends_with_copy: bool,
    /// The NCCL call that is still being enqueued by NCCL's thread; nothing else may be put on the stream.
    pub(crate) gap: Option<Arc<Site>>,
    pub(super) destroyed: bool,
    /// Where among the streams the seed puts it.
    pub(super) turn: u64,
    /// CUDA's priority of it.
    pub(crate) priority: i32,
    pub(super) line: HardwareQueue,
    /// The position among the agents of clocks.
    pub(super) agent: usize,
    /// The end of its work so far on the timeline.
    pub(super) free: f64,
}

/// An event: the point of its latest record, with the time at which it was passed.
#[derive(Clone, Default)]
pub(crate) struct Event {
    pub(crate) mark: Option<Mark>,
    /// Whether times between this event and others can be asked for.
    pub(crate) is_timed: bool,
}
