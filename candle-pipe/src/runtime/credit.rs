//! How far a rank may be ahead of the ranks that it sends to, in an evaluation.
//!
//! A training step bounds by itself what is on its way: a rank holds each microbatch until its backward pass. An evaluation
//! of many microbatches does not, and a slow rank would be sent all of them. So a receiver acknowledges every few messages
//! that it takes, and a sender waits when too many are not acknowledged.
use crate::graph::PipeInfo;
use crate::schedule::{Action, Compute, Message, Program};
use crate::{Error, Result};
use candle_core::{DType, Device, Shape, Tensor};
use candle_dist::ProcessGroup;
use std::collections::{HashMap, HashSet, VecDeque};

/// The fewest messages that may be on their way from one rank to another.
const FEWEST: usize = 4;
/// The tag of acknowledgements, which tells them from what stages exchange.
const TAG: u32 = 1;

/// The messages that a rank may have on their way to another one: the least power of two with which the program comes to
/// its end.
pub(super) fn window(info: &PipeInfo, program: &Program) -> usize {
    let most: usize = program.ranks().iter().map(Vec::len).sum();
    let mut window = FEWEST;
    while window < most && !Walk::new(info, program, window).ends() {
        window *= 2;
    }
    window
}

/// After how many messages a receiver says so.
const fn every(window: usize) -> usize {
    window / 2
}

/// A program run without its computations, with no more than a window of messages on each way.
struct Walk<'a> {
    info: &'a PipeInfo,
    program: &'a Program,
    window: usize,
    next: Vec<usize>,
    /// What is still to be taken from each rank by another, in order.
    awaited: HashMap<(usize, usize), VecDeque<Message>>,
    /// Messages sent and taken, from each rank to another.
    sent: HashMap<(usize, usize), usize>,
    taken: HashMap<(usize, usize), usize>,
    /// The values that are there: the stage that made them, the rank that took them, the microbatch.
    there: HashSet<(usize, usize, usize)>,
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

    /// Does the next action of a rank, if it can be done.
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

    /// Takes what a computation needs of other ranks, as far as it was sent.
    fn take(&mut self, rank: usize, Compute { stage, microbatch, .. }: Compute) -> bool {
        let Some(def) = self.info.stages.get(stage) else { return true };
        for from in def.inputs.iter().filter_map(|input| input.from) {
            let sender = self.program.schedule().stage_ranks()[from];
            while sender != rank && !self.there.contains(&(from, rank, microbatch)) {
                let way = (sender, rank);
                let taken = self.taken.entry(way).or_default();
                if self.sent.get(&way).is_none_or(|sent| sent <= taken) {
                    return false;
                }
                let Some(message) = self.awaited.get_mut(&way).and_then(VecDeque::pop_front) else { return false };
                *taken += 1;
                self.there.insert((message.from, rank, message.microbatch));
            }
        }
        true
    }
}

/// One rank's messages to and from the others, counted.
pub(super) struct Credit<'a> {
    group: &'a ProcessGroup,
    window: usize,
    sent: HashMap<usize, usize>,
    acknowledged: HashMap<usize, usize>,
    taken: HashMap<usize, usize>,
}

impl<'a> Credit<'a> {
    pub(super) fn new(group: &'a ProcessGroup, window: usize) -> Self {
        let (sent, acknowledged, taken) = Default::default();
        Self { group, window, sent, acknowledged, taken }
    }

    /// Waits until one more message may be on its way to a rank.
    pub(super) fn before_send(&mut self, to: usize) -> Result<()> {
        while self.unacknowledged(to) >= self.window {
            self.hear(to)?;
        }
        *self.sent.entry(to).or_default() += 1;
        Ok(())
    }

    /// Counts a message that was taken, and says so in time.
    pub(super) fn after_receive(&mut self, from: usize) -> Result<()> {
        let taken = self.taken.entry(from).or_default();
        *taken += 1;
        if taken.is_multiple_of(every(self.window)) {
            let tensor = Tensor::zeros(1, DType::U8, &Device::Cpu)?;
            drop(self.group.send_owned_start(tensor, from, TAG)?);
        }
        Ok(())
    }

    /// Takes the acknowledgements that are still to come, which the next evaluation must not find.
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
        let receive = candle_dist::Message::Recv { shape: Shape::from(1), dtype: DType::U8, from, tag: TAG };
        if self.group.batch_send_recv(&[receive])?.is_empty() {
            return Err(Error::Pipe(format!("rank {from} acknowledges nothing")));
        }
        *self.acknowledged.entry(from).or_default() += every(self.window);
        Ok(())
    }
}
