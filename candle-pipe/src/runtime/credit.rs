//! Bounds how far a rank runs ahead of the ranks that it sends to in an evaluation.
//!
//! A training step needs no such bound: a rank holds each microbatch until its backward pass. In an evaluation of many
//! microbatches a slow rank could be sent all of them. So a receiver acknowledges every few messages, and a sender
//! waits while too many are unacknowledged.
use super::notes::Notes;
use crate::Result;
use crate::graph::PipeInfo;
use crate::schedule::{Action, Compute, Message, Program};
use candle_dist::ProcessGroup;
use std::collections::{HashMap, HashSet, VecDeque};

/// The minimum window of unacknowledged messages between two ranks.
const FEWEST: usize = 4;
/// The tag of acknowledgements; messages between stages have another one.
const TAG: u32 = 1;

/// Returns the window of unacknowledged messages between two ranks: the least power of two with which the program runs
/// to its end.
pub(super) fn window(info: &PipeInfo, program: &Program) -> usize {
    let most: usize = program.ranks().iter().map(Vec::len).sum();
    let mut window = FEWEST;
    while window < most && !Walk::new(info, program, window).ends() {
        window *= 2;
    }
    window
}

/// Returns the number of messages per acknowledgement.
const fn every(window: usize) -> usize {
    window / 2
}

/// A dry run of a program without computations, with at most a window of messages between two ranks.
struct Walk<'a> {
    info: &'a PipeInfo,
    program: &'a Program,
    window: usize,
    next: Vec<usize>,
    /// The messages that each rank still expects from another, in order.
    awaited: HashMap<(usize, usize), VecDeque<Message>>,
    /// The counts of messages sent and received between two ranks.
    sent: HashMap<(usize, usize), usize>,
    taken: HashMap<(usize, usize), usize>,
    /// The messages that have arrived.
    there: HashSet<Message>,
}

impl<'a> Walk<'a> {
    fn new(info: &'a PipeInfo, program: &'a Program, window: usize) -> Self {
        let (awaited, sent, taken, there) = Default::default();
        Self { info, program, window, next: vec![0; program.ranks().len()], awaited, sent, taken, there }
    }

    fn ends(mut self) -> bool {
        loop {
            let mut moved = false;
            for rank in 0..self.next.len() {
                while self.step(rank) {
                    moved = true;
                }
            }
            if !moved {
                return self.next.iter().zip(self.program.ranks()).all(|(&next, list)| next == list.len());
            }
        }
    }

    /// Runs the next action of a rank, if it can run.
    fn step(&mut self, rank: usize) -> bool {
        let Some(action) = self.program.ranks()[rank].get(self.next[rank]) else { return false };
        let rank_of = |stage: usize| self.program.schedule().stage_ranks()[stage];
        let can = match *action {
            Action::Recv(message) => {
                self.awaited.entry((rank_of(message.from), rank)).or_default().push_back(message);
                true
            }
            Action::Send(message) => {
                let way = (rank, rank_of(message.to));
                let acknowledged = self.taken.get(&way).copied().unwrap_or(0) / every(self.window) * every(self.window);
                let sent = self.sent.entry(way).or_default();
                let has_room = *sent - acknowledged < self.window;
                *sent += usize::from(has_room);
                has_room
            }
            _ => action.computes().iter().all(|&compute| self.take(rank, compute)),
        };
        self.next[rank] += usize::from(can);
        can
    }

    /// Receives the inputs of a computation from other ranks, as far as they were sent.
    fn take(&mut self, rank: usize, Compute { stage, microbatch, .. }: Compute) -> bool {
        let Some(def) = self.info.stages.get(stage) else { return true };
        for from in def.inputs.iter().filter_map(|input| input.from) {
            let sender = self.program.schedule().stage_ranks()[from];
            while sender != rank && !self.there.contains(&self.program.values_to(from, stage, microbatch)) {
                let way = (sender, rank);
                let taken = self.taken.entry(way).or_default();
                if self.sent.get(&way).is_none_or(|sent| sent <= taken) {
                    return false;
                }
                let Some(message) = self.awaited.get_mut(&way).and_then(VecDeque::pop_front) else { return false };
                *taken += 1;
                self.there.insert(message);
            }
        }
        true
    }
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
