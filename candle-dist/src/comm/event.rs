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
    /// A [comparison](crate::ProcessGroup::compare) of what must be equal on all ranks. Counts and bytes exclude it.
    Check,
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
    /// Returns whether counts include it: a wait was counted when it was started, and a check is not the program's call.
    pub fn is_counted(&self) -> bool {
        !matches!(self.part, Part::Wait | Part::Check)
    }

    /// Returns the op with its part, e.g. `all_reduce`, `all_reduce start`, `all_reduce wait` or `all_gather check`.
    pub fn name(&self) -> String {
        match self.part {
            Part::Whole => self.op.to_string(),
            Part::Start => format!("{} start", self.op),
            Part::Wait => format!("{} wait", self.op),
            Part::Check => format!("{} check", self.op),
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
