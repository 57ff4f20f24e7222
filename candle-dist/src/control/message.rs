//! The messages between processes and rank 0.
use super::limits::{MAX_MESSAGE, clipped};
use super::signature::{MEMBERS, RoundEntry};
use crate::call::PROPERTIES;
use crate::error::End;
use crate::values::{ChangeOutcome, ValueChange};
use crate::{Cause, RankStatus};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A message from a process to rank 0.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum HubRequest {
    /// Digests of the arguments of this process, unless they may be unlike those of others. The world starts when all have come.
    Arguments(Option<Vec<String>>),
    /// Asks for a value, and waits until it is set.
    Get { id: u64, key: String },
    /// Withdraws a [`Get`](Self::Get), unless it was answered already.
    Forget { id: u64, key: String },
    /// Changes a value, with the payload as argument.
    Change { id: u64, key: String, change: ValueChange },
    /// This rank has entered a call, whose signature rank 0 compares.
    Enter(Box<RoundEntry>),
    /// This rank has made these calls of a group: rounds, with digests that rank 0 compares.
    Calls { group: u64, ranks: Vec<usize>, calls: Vec<(u64, u64)> },
    /// This rank has enqueued its part of the message `number` of a channel, whose other end is at `peer`.
    Post { peer: usize, channel: u64, number: u64, sends: bool },
    /// Some members have not entered a round after this time.
    Miss { group: u64, round: u64, after: Duration },
    /// Something went wrong.
    Fail(CauseRecord),
    /// The answer to [`Notice::Ask`].
    Report(String),
    /// This rank has dropped a group of `members` ranks, after these rounds on the group and its channels.
    Dropped { group: u64, members: usize, rounds: Vec<(u64, u64)>, is_all: bool },
    /// The rounds per group and channel before a goodbye, in several messages.
    Rounds(Vec<(u64, u64)>),
    /// This rank ends. It may still deliver messages.
    Goodbye { end: End },
    /// This rank has done all that others may need, and ends the connection.
    Gone,
}

/// A message from rank 0 to a process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Notice {
    /// All processes have joined.
    Ready,
    /// The world does not start, for this reason.
    NotStarted(String),
    /// The payload is the requested value.
    Value { id: u64 },
    /// The value is not set, and the request was withdrawn.
    Absent { id: u64 },
    /// The outcome of a change, with its payload.
    Changed { id: u64, outcome: ChangeOutcome },
    /// All members of the group made the same call.
    Agreed { group: u64, round: u64 },
    /// All members of the group made the same calls up to this round, except for those that were asked for.
    Equal { group: u64, round: u64 },
    /// Asks for the call of a round, whose digest came.
    Show { group: u64, round: u64 },
    /// The other end of a channel has enqueued its part of the message `number`.
    Posted { channel: u64, number: u64, sends: bool },
    /// A rank has ended, after these rounds per group and channel.
    Left { rank: usize, rounds: Vec<(u64, u64)>, is_all: bool },
    /// The world stops; asks what this rank is doing.
    Ask,
    /// The world has stopped.
    Stopped { fault: CauseRecord, ranks: Vec<StatusRecord> },
    /// The answer to a goodbye: this process may end.
    Bye,
}

/// A [`Cause`] in serializable form.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum CauseRecord {
    Mismatch { rank: usize, reference: usize, what: String },
    Returned { rank: usize },
    Failed { rank: usize, message: String },
    Panicked { rank: usize, message: String },
    Lost { rank: usize, how: String },
    Deadlock,
    TimedOut { rank: usize, after: Duration },
    Missing { ranks: Vec<usize>, after: Duration },
    Concurrent { rank: usize, sites: [String; 2] },
}

impl From<Cause> for CauseRecord {
    fn from(cause: Cause) -> Self {
        match cause {
            Cause::Mismatch { rank, reference, what } => {
                Self::Mismatch { rank, reference, what: what.to_string() }
            }
            Cause::Returned { rank } => Self::Returned { rank },
            Cause::Failed { rank, message } => Self::Failed { rank, message: clipped(message, MAX_MESSAGE) },
            Cause::Panicked { rank, message } => {
                Self::Panicked { rank, message: clipped(message, MAX_MESSAGE) }
            }
            Cause::Lost { rank, how } => Self::Lost { rank, how },
            Cause::Deadlock => Self::Deadlock,
            Cause::TimedOut { rank, after } => Self::TimedOut { rank, after },
            Cause::Missing { ranks, after } => Self::Missing { ranks, after },
            Cause::Concurrent { rank, sites } => {
                Self::Concurrent { rank, sites: sites.map(|site| clipped(site, MAX_MESSAGE)) }
            }
        }
    }
}

impl From<CauseRecord> for Cause {
    fn from(fault: CauseRecord) -> Self {
        match fault {
            CauseRecord::Mismatch { rank, reference, what } => {
                let known = PROPERTIES
                    .iter()
                    .map(|property| property.name)
                    .chain([MEMBERS])
                    .find(|known| *known == what);
                Self::Mismatch { rank, reference, what: known.unwrap_or("call") }
            }
            CauseRecord::Returned { rank } => Self::Returned { rank },
            CauseRecord::Failed { rank, message } => Self::Failed { rank, message },
            CauseRecord::Panicked { rank, message } => Self::Panicked { rank, message },
            CauseRecord::Lost { rank, how } => Self::Lost { rank, how },
            CauseRecord::Deadlock => Self::Deadlock,
            CauseRecord::TimedOut { rank, after } => Self::TimedOut { rank, after },
            CauseRecord::Missing { ranks, after } => Self::Missing { ranks, after },
            CauseRecord::Concurrent { rank, sites } => Self::Concurrent { rank, sites },
        }
    }
}

/// A [`RankStatus`] in serializable form.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum StatusRecord {
    Says(String),
    Ended(End),
    Lost(String),
    Silent,
}

impl From<StatusRecord> for RankStatus {
    fn from(state: StatusRecord) -> Self {
        match state {
            StatusRecord::Says(text) => Self::Says(text),
            StatusRecord::Ended(End::Returned) => Self::Returned,
            StatusRecord::Ended(End::Failed(message)) => Self::Failed(message),
            StatusRecord::Ended(End::Panicked(message)) => Self::Panicked(message),
            StatusRecord::Lost(how) => Self::Lost(how),
            StatusRecord::Silent => Self::Silent,
        }
    }
}
