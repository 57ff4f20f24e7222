//! Open operations and arrived messages of all groups of a process.
use super::header::{Signature, Slot};
use super::mail::{Address, Letter, Mail};
use super::native::MpiError;
use super::operation::Operation;
use super::wire::{Arrived, Wire};
use crate::Cause;
use crate::control::Control;
use rustc_hash::FxHashMap;
use std::collections::VecDeque;

pub(super) struct State {
    /// This rank of the world.
    pub(super) me: usize,
    /// `None` after the end.
    pub(super) wire: Option<Wire>,
    pub(super) mail: Mail,
    /// Collectives that are not complete, or whose results have not been taken.
    pub(super) open: FxHashMap<Ticket, Open>,
    /// The groups of this rank.
    pub(super) groups: FxHashMap<u64, Group>,
    /// The first error: messages and operations are then in no state to go on from.
    broken: Option<Cause>,
}

/// How many of a group's last calls are kept, to name the difference for a late message.
const RECENT: usize = 64;

/// The data of a group.
#[derive(Default)]
pub(super) struct Group {
    /// The number of its next collective.
    next: u64,
    /// Calls before it, by number.
    recent: VecDeque<(u64, Signature)>,
}

/// A started collective.
pub(super) struct Open {
    pub(super) operation: Operation,
    pub(super) done: bool,
    /// Whether the results were discarded; the other members still need this one to continue.
    pub(super) given_up: bool,
}

/// The id of a started collective: its group and number.
pub(super) type Ticket = (u64, u64);

/// The event for which a thread waits; it is reported before other events are handled.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    Collective(Ticket),
    Message(Address),
}

impl State {
    pub(super) fn new(control: &Control, wire: Wire) -> Self {
        Self {
            me: control.rank(),
            wire: Some(wire),
            mail: Mail::default(),
            open: FxHashMap::default(),
            groups: FxHashMap::default(),
            broken: None,
        }
    }

    /// Runs `change`, unless an earlier one has failed.
    ///
    /// It takes a while until all threads hear that the world has stopped, and none may go on meanwhile.
    pub(super) fn changed<R>(&mut self, change: impl FnOnce(&mut Self) -> Result<R, Cause>) -> Result<R, Cause> {
        if let Some(cause) = &self.broken {
            return Err(cause.clone());
        }
        let changed = change(self);
        self.broken = changed.as_ref().err().cloned();
        changed
    }

    /// Returns the wire and the mail, until the end.
    pub(super) fn wired(&mut self) -> Result<(&mut Wire, &mut Mail), Cause> {
        let Self { me, wire, mail, .. } = self;
        wire.as_mut().map(|wire| (wire, mail)).ok_or(Cause::Returned { rank: *me })
    }

    /// Drives MPI and every collective that can advance; returns whether anything moved, and the wanted message.
    pub(super) fn turn(&mut self, wanted: Option<Wanted>) -> Result<(bool, Option<Arrived>), Cause> {
        let Self { me, wire, mail, open, groups, .. } = self;
        let Some(wire) = wire else { return Ok((false, None)) };
        let failed = |error: MpiError| Cause::Failed { rank: *me, message: error.to_string() };
        let mut moved = wire.poll().map_err(failed)?;
        while let Some(letter) = wire.next().map_err(failed)? {
            moved = true;
            let Arrived { from, header, .. } = letter;
            let kept = |wire: &Wire| Letter { from, header, data: wire.data(&letter).to_vec() };
            let mut is_wanted = false;
            match header.slot {
                Slot::Round { number, .. } => {
                    let ticket = (header.group, number);
                    match open.get_mut(&ticket) {
                        Some(of) if !of.done => {
                            of.operation.take(from, &header, wire.data(&letter))?;
                            of.done = of.operation.advance(wire)?;
                            is_wanted = of.done && wanted == Some(Wanted::Collective(ticket));
                            if of.done && of.given_up {
                                open.remove(&ticket);
                            }
                        }
                        _ => match groups.get(&header.group).filter(|group| number < group.next) {
                            Some(group) => return Err(group.late(*me, from, number, &header.signature)),
                            None => mail.put(kept(wire)),
                        },
                    }
                }
                Slot::Tag(tag) => {
                    let address = (header.group, from, tag);
                    if wanted == Some(Wanted::Message(address)) && !mail.has_message(address) {
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
        let mut ended = false;
        for open in open.values_mut().filter(|open| !open.done && open.operation.moves()) {
            open.done = open.operation.advance(wire)?;
            moved |= open.done;
            ended |= open.done && open.given_up;
        }
        if ended {
            open.retain(|_, open| !(open.done && open.given_up));
        }
        Ok((moved, None))
    }

    /// Returns whether others may wait for something that this process must still do.
    pub(super) fn is_busy(&self) -> bool {
        self.wire.as_ref().is_some_and(Wire::is_sending) || self.open.values().any(|open| !open.done)
    }
}

impl Group {
    /// Returns the cause for a message of a collective that is complete here: its sender has made another call.
    fn late(&self, me: usize, from: usize, number: u64, theirs: &Signature) -> Cause {
        let mine = self.recent.iter().find(|(nth, _)| *nth == number).map(|(_, mine)| mine);
        let what = mine.and_then(|mine| mine.difference(theirs)).unwrap_or("call");
        Cause::Mismatch { rank: me.max(from), reference: me.min(from), what }
    }

    pub(super) fn enter(&mut self, number: u64, signature: Signature) {
        self.next = number + 1;
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back((number, signature));
    }
}
