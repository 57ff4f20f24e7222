//! Open operations and arrived messages of all groups of a process.
use super::header::{Body, CallDigest, MessageSlot};
use super::mail::{Letter, Mail, MessageKey};
use super::native::MpiError;
use super::operation::{Circle, Operation};
use super::transfer::TransferMemory;
use super::wire::{IncomingLetter, Wire};
use crate::Cause;
use crate::control::Control;
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::time::Duration;

pub(super) struct DriverState {
    /// This rank of the world.
    pub(super) me: usize,
    /// `None` after the end.
    pub(super) wire: Option<Wire>,
    pub(super) mail: Mail,
    pub(super) collectives: Collectives,
    /// What others have sent and nobody receives, at the end.
    unread: Vec<TransferMemory>,
    /// The groups of this rank.
    pub(super) groups: FxHashMap<u64, GroupRecord>,
    /// The first error: messages and operations are then in no state to go on from.
    broken: Option<Cause>,
}

/// How many of a group's last calls are kept, to name the difference for a late message.
const RECENT: usize = 64;

/// The data of a group.
#[derive(Default)]
pub(super) struct GroupRecord {
    /// The number of its next collective.
    next: u64,
    /// Calls before it, by number.
    recent: VecDeque<(u64, CallDigest)>,
}

/// Collectives that are not complete, or whose results have not been taken.
///
/// Each turn of MPI looks only at those that it may advance: programs may start many calls before they wait.
#[derive(Default)]
pub(super) struct Collectives {
    open: FxHashMap<CollectiveId, OpenCollective>,
    /// Calls whose data MPI moves in place. Some may be gone.
    moving: Vec<CollectiveId>,
    /// Those that are not complete, in the order of their starts, and some that are.
    started: VecDeque<CollectiveId>,
    /// The number of those that are not complete.
    incomplete: usize,
}

/// A started collective.
struct OpenCollective {
    operation: Operation,
    done: bool,
    /// Whether it is among the moving ones.
    moves: bool,
    /// Whether the results were discarded; the other members still need this one to continue.
    given_up: bool,
}

impl Collectives {
    pub(super) fn insert(&mut self, ticket: CollectiveId, operation: Operation, done: bool) {
        let moves = !done && operation.moves();
        if moves {
            self.moving.push(ticket);
        }
        if !done {
            self.incomplete += 1;
            self.started.push_back(ticket);
        }
        self.open.insert(ticket, OpenCollective { operation, done, moves, given_up: false });
    }

    /// Returns whether a collective is complete or gone.
    pub(super) fn is_done(&self, ticket: CollectiveId) -> bool {
        self.open.get(&ticket).is_none_or(|open| open.done)
    }

    /// Returns the number of collectives that are not complete.
    pub(super) const fn incomplete(&self) -> usize {
        self.incomplete
    }

    /// Returns the first of the collectives that are not complete.
    pub(super) fn oldest(&mut self) -> Option<&Operation> {
        while self.started.front().is_some_and(|&ticket| self.is_done(ticket)) {
            self.started.pop_front();
        }
        Some(&self.open.get(self.started.front()?)?.operation)
    }

    /// Advances a collective as far as possible; returns whether it is complete.
    fn advance(&mut self, ticket: CollectiveId, wire: &mut Wire) -> Result<bool, Cause> {
        let Some(open) = self.open.get_mut(&ticket).filter(|open| !open.done) else { return Ok(true) };
        open.done = open.operation.advance(wire)?;
        if !open.done && !open.moves && open.operation.moves() {
            open.moves = true;
            self.moving.push(ticket);
        }
        if open.done {
            self.incomplete -= 1;
            // So that it does not grow where nobody asks for the oldest.
            if self.started.len() > 2 * self.incomplete + ENOUGH {
                let open = &self.open;
                self.started.retain(|ticket| open.get(ticket).is_some_and(|open| !open.done));
            }
        }
        if self.open.get(&ticket).is_some_and(|open| open.done && open.given_up) {
            self.open.remove(&ticket);
        }
        Ok(self.is_done(ticket))
    }

    /// Advances the calls whose data MPI moves. Returns whether any is complete now.
    fn advance_moving(&mut self, wire: &mut Wire) -> Result<bool, Cause> {
        let (mut at, mut any) = (0, false);
        while let Some(&ticket) = self.moving.get(at) {
            let was_done = self.is_done(ticket);
            any |= self.advance(ticket, wire)? && !was_done;
            match self.open.get_mut(&ticket) {
                Some(open) if !open.done && open.operation.moves() => at += 1,
                open => {
                    open.into_iter().for_each(|open| open.moves = false);
                    self.moving.swap_remove(at);
                }
            }
        }
        Ok(any)
    }

    /// Removes a complete collective, to take its results.
    pub(super) fn remove(&mut self, ticket: CollectiveId) -> Option<Operation> {
        self.open.remove(&ticket).map(|open| open.operation)
    }

    /// Lets a collective complete in the background; a complete one is removed at once.
    pub(super) fn give_up(&mut self, ticket: CollectiveId) {
        match self.open.get_mut(&ticket) {
            Some(open) if !open.done => open.given_up = true,
            _ => drop(self.open.remove(&ticket)),
        }
    }

    /// Removes collectives that never complete, and returns the memory that MPI may still use.
    fn forsake(&mut self, is_hopeless: impl Fn(&Circle, u64) -> bool) -> Vec<TransferMemory> {
        let hopeless = |open: &OpenCollective| {
            !open.done && is_hopeless(open.operation.circle(), open.operation.number())
        };
        let tickets: Vec<CollectiveId> =
            self.open.iter().filter(|(_, open)| hopeless(open)).map(|(&ticket, _)| ticket).collect();
        let removed = tickets.into_iter().filter_map(|ticket| self.open.remove(&ticket));
        let removed: Vec<OpenCollective> = removed.collect();
        self.incomplete -= removed.len();
        removed.into_iter().flat_map(|open| open.operation.into_held()).collect()
    }
}

/// The entries of a list beyond those in use that are not worth a search.
const ENOUGH: usize = 1024;
/// The most letters that are handled in a turn, which holds the lock of the state: others may send without end.
const LETTERS: usize = 256;
/// The most unread tensors that are received at a time at the end.
const DRAINED: usize = 8;

/// The id of a started collective: its group and number.
pub(super) type CollectiveId = (u64, u64);

/// The event for which a thread waits; it is reported before other events are handled.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum AwaitedEvent {
    Collective(CollectiveId),
    Message(MessageKey),
}

impl DriverState {
    pub(super) fn new(control: &Control, wire: Wire) -> Self {
        Self {
            me: control.rank(),
            wire: Some(wire),
            mail: Mail::default(),
            collectives: Collectives::default(),
            unread: Vec::new(),
            groups: FxHashMap::default(),
            broken: None,
        }
    }

    /// Runs `change`, unless an earlier one has failed.
    ///
    /// It takes a while until all threads hear that the world has stopped, and none may go on meanwhile.
    pub(super) fn changed<R>(
        &mut self,
        change: impl FnOnce(&mut Self) -> Result<R, Cause>,
    ) -> Result<R, Cause> {
        if let Some(cause) = &self.broken {
            return Err(cause.clone());
        }
        let changed = change(self);
        self.broken = changed.as_ref().err().cloned();
        changed
    }

    /// Ends all collectives and messages, because the world has stopped. MPI is not called again.
    pub(super) fn stop(&mut self, cause: &Cause) {
        self.broken.get_or_insert_with(|| cause.clone());
        self.collectives = Collectives::default();
        self.unread.clear();
        if let Some(wire) = &mut self.wire {
            wire.leave_parcels();
        }
    }

    /// Returns the wire and the mail, until the end.
    pub(super) fn wired(&mut self) -> Result<(&mut Wire, &mut Mail), Cause> {
        let Self { me, wire, mail, .. } = self;
        wire.as_mut().map(|wire| (wire, mail)).ok_or(Cause::Returned { rank: *me })
    }

    /// Drives MPI and every collective that can advance; returns whether anything moved, and the wanted message.
    pub(super) fn turn(
        &mut self,
        wanted: Option<AwaitedEvent>,
    ) -> Result<(bool, Option<IncomingLetter>), Cause> {
        let Self { me, wire, mail, collectives, groups, .. } = self;
        let Some(wire) = wire else { return Ok((false, None)) };
        let failed = |error: MpiError| Cause::Failed { rank: *me, message: error.to_string() };
        let mut moved = wire.poll().map_err(failed)?;
        for _ in 0..LETTERS {
            let Some(letter) = wire.next().map_err(failed)? else { break };
            moved = true;
            let IncomingLetter { from, header, .. } = letter;
            let kept = |wire: &Wire| Letter { from, header, data: wire.data(&letter).to_vec() };
            let mut is_wanted = false;
            match header.slot {
                MessageSlot::Round { number, .. } => {
                    let ticket = (header.group, number);
                    match collectives.open.get_mut(&ticket) {
                        Some(of) if !of.done => {
                            of.operation.take(from, &header, wire.data(&letter))?;
                            let done = collectives.advance(ticket, wire)?;
                            is_wanted = done && wanted == Some(AwaitedEvent::Collective(ticket));
                        }
                        _ => match groups.get(&header.group).filter(|group| number < group.next) {
                            Some(group) => return Err(group.late(*me, from, number, &header.signature)),
                            None => mail.put(kept(wire)),
                        },
                    }
                }
                MessageSlot::Tag(tag) => {
                    let address = (header.group, from, tag);
                    if wanted == Some(AwaitedEvent::Message(address)) && !mail.has_message(address) {
                        return Ok((true, Some(letter)));
                    }
                    mail.put(kept(wire));
                }
            }
            wire.put_back(letter).map_err(failed)?;
            if is_wanted {
                return Ok((true, None));
            }
        }
        wire.listen_again().map_err(failed)?;
        // Messages have advanced the other collectives.
        moved |= collectives.advance_moving(wire)?;
        Ok((moved, None))
    }

    /// Drives MPI at the end, when this rank makes no more calls: receives what nobody has received, and drops collectives
    /// that others never enter. Returns whether anything moved.
    pub(super) fn wind_up(&mut self, is_hopeless: impl Fn(&Circle, u64) -> bool) -> Result<bool, Cause> {
        let (mut moved, _) = self.turn(None)?;
        let forsaken = self.collectives.forsake(is_hopeless);
        self.unread.extend(forsaken);
        let Self { me, wire, mail, unread, .. } = self;
        let Some(wire) = wire else { return Ok(moved) };
        let failed =
            |error: Box<dyn std::error::Error>| Cause::Failed { rank: *me, message: error.to_string() };
        while unread.len() < DRAINED
            && let Some(Letter { from, header, .. }) = mail.take_any()
        {
            moved = true;
            if let Body::Follows(_) = header.body {
                unread.push(wire.receive_all(from, &header).map_err(failed)?);
            }
        }
        let before = unread.len();
        let mut at = 0;
        while let Some(held) = unread.get_mut(at) {
            match held.poll(wire.comm()).map_err(|error| failed(error.into()))? {
                true => drop(unread.swap_remove(at)),
                false => at += 1,
            }
        }
        Ok(moved || unread.len() < before)
    }

    /// Returns the world's failure if a write of this program has waited for longer than `limit` for a tensor that is read here. The
    /// thread that writes is in no call, so nothing else would end its wait.
    pub(super) fn check_writes(&mut self, limit: Duration) -> Result<(), Cause> {
        let mut open = self.collectives.open.values_mut().map(|open| &mut open.operation);
        let call = open.find_map(|call| (call.awaited() > limit).then(|| call.call().to_string()));
        let is_sent = |wire: &mut Wire| wire.awaited() > limit;
        let reader = match call {
            Some(call) => format!("the started {call}, which other ranks have not made"),
            None if self.wire.as_mut().is_some_and(is_sent) => {
                "a message that its receiver has not asked for".into()
            }
            None => return Ok(()),
        };
        let message = format!(
            "a write to a tensor has waited longer than the timeout of {limit:?} for {reader}; wait for the call before, or start it \
             with a copy of the tensor"
        );
        Err(Cause::Failed { rank: self.me, message })
    }

    /// Returns whether others may wait for something that this process must still do.
    pub(super) fn is_busy(&self) -> bool {
        self.wire.as_ref().is_some_and(Wire::is_sending)
            || self.collectives.incomplete > 0
            || !self.unread.is_empty()
    }
}

impl GroupRecord {
    /// Returns the cause for a message of a collective that is complete here: its sender has made another call.
    fn late(&self, me: usize, from: usize, number: u64, theirs: &CallDigest) -> Cause {
        let mine = self.recent.iter().find(|(nth, _)| *nth == number).map(|(_, mine)| mine);
        let what = mine.and_then(|mine| mine.difference(theirs)).unwrap_or("call");
        Cause::Mismatch { rank: me.max(from), reference: me.min(from), what }
    }

    pub(super) fn enter(&mut self, number: u64, signature: CallDigest) {
        self.next = number + 1;
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back((number, signature));
    }
}
