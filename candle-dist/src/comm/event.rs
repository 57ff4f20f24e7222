//! A call of a rank as an event.
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
