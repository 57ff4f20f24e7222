//! Communication events.
use crate::call::{Dims, Op};
use std::fmt;
use std::panic::Location;
use std::time::{Duration, Instant};

/// The part of a call that an event describes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Part {
    /// The whole call.
    #[default]
    Whole,
    /// The start of a started call; see [`Pending`](crate::Pending).
    Start,
    /// The wait for a started call. Counts and bytes exclude it.
    Wait,
}

/// One communication call of one rank.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Event {
    /// The operation.
    pub op: Op,
    /// The part of the call.
    pub part: Part,
    /// The members of the group as ranks of the world, in group order.
    pub ranks: Dims,
    /// The root, or the other rank of a point-to-point call, as a rank of the group.
    pub peer: Option<usize>,
    /// The bytes of this rank's input; 0 for a wait.
    pub bytes: usize,
    /// The time when the call began; comparable between the ranks of a process.
    pub start: Instant,
    /// The duration, including the wait for other ranks.
    pub duration: Duration,
    /// The source location of the call; for a backward pass, that of its forward step.
    pub site: &'static Location<'static>,
}

impl Event {
    /// Returns the op with its part, e.g. `all_reduce`, `all_reduce start` or `all_reduce wait`.
    pub fn name(&self) -> String {
        match self.part {
            Part::Whole => self.op.to_string(),
            Part::Start => format!("{} start", self.op),
            Part::Wait => format!("{} wait", self.op),
        }
    }
}

impl fmt::Display for Event {
    /// Formats the event, e.g. `all_reduce of 4096 B in [0, 1], 12.5µs at src/main.rs:7`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bytes, duration, .. } = self;
        let name = self.name();
        let (ranks, file, line) = (self.ranks.as_slice(), self.site.file(), self.site.line());
        write!(f, "{name} of {bytes} B in {ranks:?}, {duration:?} at {file}:{line}")
    }
}
