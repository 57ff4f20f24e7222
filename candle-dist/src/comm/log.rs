//! Every call of a rank as an event.
use super::{Collect, Scope};
use crate::call::{Dims, Op};
use std::fmt;
use std::panic::Location;
use std::time::{Duration, Instant};

/// Which part of a call an event is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Part {
    /// All of it.
    #[default]
    Whole,
    /// Its start, see [`Pending`](crate::Pending).
    Start,
    /// The wait for what was started, which counts and bytes leave out.
    Wait,
}

/// One communication call, as one rank saw it.
#[derive(Debug, Clone)]
pub struct Event {
    /// What was done.
    pub op: Op,
    /// Which part of it.
    pub part: Part,
    /// The members of the group as ranks of the world, in group order.
    pub ranks: Dims,
    /// The root, or the other side of a point-to-point call, as a rank of the group.
    pub peer: Option<usize>,
    /// The bytes of this rank's input; none for a wait.
    pub bytes: usize,
    /// When the call began; comparable among the ranks of a process.
    pub start: Instant,
    /// How long it took, waiting for other ranks included.
    pub duration: Duration,
    /// Where the call was made; for a backward pass, where its forward step was.
    pub site: &'static Location<'static>,
}

impl Event {
    /// The op with its part, e.g. `all_reduce`, `all_reduce start` or `all_reduce wait`.
    pub fn name(&self) -> String {
        match self.part {
            Part::Whole => self.op.to_string(),
            Part::Start => format!("{} start", self.op),
            Part::Wait => format!("{} wait", self.op),
        }
    }
}

impl fmt::Display for Event {
    /// For example `all_reduce of 4096 B in [0, 1], 12.5µs at src/main.rs:7`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bytes, duration, .. } = self;
        let name = self.name();
        let (ranks, file, line) = (self.ranks.as_slice(), self.site.file(), self.site.line());
        write!(f, "{name} of {bytes} B in {ranks:?}, {duration:?} at {file}:{line}")
    }
}

impl Collect for Vec<Event> {
    fn add(&mut self, event: &Event) {
        self.push(event.clone());
    }
}

/// A log of the communication that this thread makes while the log lives.
///
/// Calls are noted when they end, also those that fail. Logs nest: an outer log has the events of an inner one too.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_dist::{Op, ReduceOp, World, comm::Log};
///
/// let ops = World::local(2).run(|ctx| -> candle_dist::Result<Vec<Op>> {
///     let x = Tensor::new(&[1f32, 2.0], &Device::Cpu)?;
///     let log = Log::start();
///     ctx.group().all_reduce(&x, ReduceOp::Sum)?;
///     ctx.group().barrier()?;
///     Ok(log.events().iter().map(|event| event.op).collect())
/// })?;
/// assert_eq!(ops[0], [Op::AllReduce, Op::Barrier]);
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
#[must_use = "a log ends when it is dropped"]
pub struct Log(Scope<Vec<Event>>);

impl Log {
    /// A log of what this thread communicates from here on.
    pub fn start() -> Self {
        Self(Scope::open())
    }

    /// Runs `f` and returns the communication that this thread made in it.
    pub fn of<R>(f: impl FnOnce() -> R) -> (R, Vec<Event>) {
        let log = Self::start();
        let result = f();
        (result, log.finish())
    }

    /// The events so far, in the order in which they ended.
    pub fn events(&self) -> Vec<Event> {
        self.0.0.borrow().clone()
    }

    /// Ends the log and returns its events.
    pub fn finish(self) -> Vec<Event> {
        self.0.0.take()
    }
}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Log({} events)", self.0.0.borrow().len())
    }
}
