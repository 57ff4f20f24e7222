//! Bounds how far a rank runs ahead of the ranks that it sends to in an evaluation.
//!
//! A training step needs no such bound: a rank holds each microbatch until its backward pass. In an evaluation of many
//! microbatches a slow rank could be sent all of them. So a receiver acknowledges every few messages, and a sender
//! waits while too many are unacknowledged.
use super::notes::Notes;
use crate::Result;
use crate::schedule::{Action, DryRun, Message, Program};
use candle_dist::ProcessGroup;
use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;

/// The minimum window of unacknowledged messages between two ranks.
const FEWEST: usize = 4;
/// The tag of acknowledgements; messages between stages have another one.
const TAG: u32 = 1;

/// Returns the window of unacknowledged messages between two ranks: the least power of two with which the program runs
/// to its end.
pub(super) fn window(program: &Program) -> usize {
    let most: usize = program.ranks().iter().map(Vec::len).sum();
    let mut window = FEWEST;
    while window < most && !ends(program, window) {
        window *= 2;
    }
    window
}

/// Returns the number of messages per acknowledgement.
const fn every(window: usize) -> usize {
    window / 2
}

/// The messages from one rank to another in a dry run.
#[derive(Default)]
struct Backlog {
    /// Those that the receiver still expects, in order.
    awaited: VecDeque<Message>,
    sent: usize,
    taken: usize,
}

impl Backlog {
    fn send(&mut self, window: usize) -> bool {
        let acknowledged = self.taken / every(window) * every(window);
        let has_room = self.sent - acknowledged < window;
        self.sent += usize::from(has_room);
        has_room
    }

    /// Takes messages up to this one, as far as they were sent; returns whether it has been taken.
    fn take(&mut self, message: Message) -> bool {
        while self.awaited.contains(&message) && self.taken < self.sent {
            self.awaited.pop_front();
            self.taken += 1;
        }
        !self.awaited.contains(&message)
    }
}

/// Returns whether a program, run without its computations, ends with at most a window of messages between
/// two ranks.
fn ends(program: &Program, window: usize) -> bool {
    let mut backlogs: HashMap<[usize; 2], Backlog> = HashMap::new();
    let ends_of =
        |message: Message| [message.from, message.to].map(|stage| program.schedule().stage_ranks()[stage]);
    let Ok(stuck) = DryRun::run(program.ranks(), |_, _, action| {
        Ok::<_, Infallible>(match *action {
            Action::Recv(message) => {
                backlogs.entry(ends_of(message)).or_default().awaited.push_back(message);
                true
            }
            Action::Send(message) => backlogs.entry(ends_of(message)).or_default().send(window),
            _ => {
                let mut messages =
                    action.computes().iter().flat_map(|&compute| program.routes().before(compute));
                messages.all(|message| backlogs.entry(ends_of(message)).or_default().take(message))
            }
        })
    });
    stuck.is_none()
}

/// The message counts of one rank, to and from the others.
pub(super) struct Credit<'a> {
    group: &'a ProcessGroup,
    notes: Notes,
    window: usize,
    sent: HashMap<usize, usize>,
    acknowledged: HashMap<usize, usize>,
    taken: HashMap<usize, usize>,
}

impl<'a> Credit<'a> {
    pub(super) fn new(group: &'a ProcessGroup, notes: Notes, window: usize) -> Self {
        let (sent, acknowledged, taken) = Default::default();
        Self { group, notes, window, sent, acknowledged, taken }
    }

    /// Waits until one more message may be sent to a rank.
    pub(super) fn before_send(&mut self, to: usize) -> Result<()> {
        while self.unacknowledged(to) >= self.window {
            self.hear(to)?;
        }
        *self.sent.entry(to).or_default() += 1;
        Ok(())
    }

    /// Counts a received message, and acknowledges it when due.
    pub(super) fn after_receive(&mut self, from: usize) -> Result<()> {
        let taken = self.taken.entry(from).or_default();
        *taken += 1;
        if taken.is_multiple_of(every(self.window)) {
            self.notes.send(self.group, from, TAG, &[], Vec::new())?;
        }
        Ok(())
    }

    /// Receives the remaining acknowledgements, so that the next evaluation does not get them.
    pub(super) fn end(&mut self) -> Result<()> {
        let ranks: Vec<usize> = self.sent.keys().copied().collect();
        for rank in ranks {
            while self.unacknowledged(rank) >= every(self.window) {
                self.hear(rank)?;
            }
        }
        Ok(())
    }

    fn unacknowledged(&self, to: usize) -> usize {
        let of = |counts: &HashMap<usize, usize>| counts.get(&to).copied().unwrap_or(0);
        of(&self.sent).saturating_sub(of(&self.acknowledged))
    }

    fn hear(&mut self, from: usize) -> Result<()> {
        self.notes.receive(self.group, from, TAG, 0)?;
        *self.acknowledged.entry(from).or_default() += every(self.window);
        Ok(())
    }
}
