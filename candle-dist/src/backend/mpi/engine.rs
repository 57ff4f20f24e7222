//! The part of the engine that all groups of a process share: what is open, what has come, and how to wait for it.
//!
//! Whoever waits lets MPI go on, for all threads of the process; a thread in the background does so while nobody waits,
//! so that what was started goes on while the program computes.
use super::header::{Header, Signature, Slot};
use super::mail::Mail;
use super::operation::{Circle, Operation};
use super::patience::Patience;
use super::wire::Wire;
use crate::backend::{Call, Fresh, Results, Tensors};
use crate::control::{Control, Entered};
use crate::{Cause, Error, Result};
use candle_core::{Shape, Tensor};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// One process's end of an MPI world.
pub(super) struct Engine {
    control: Arc<Control>,
    state: Mutex<State>,
    /// Threads that wait, and so call MPI again and again.
    waiting: AtomicUsize,
    /// More processes than cores on this host.
    crowded: bool,
}

struct State {
    /// This rank of the world.
    me: usize,
    /// `None` after the end.
    wire: Option<Wire>,
    mail: Mail,
    /// Collectives that are not done, or whose results nobody has taken.
    open: HashMap<u64, Open>,
    started: u64,
}

/// A collective that was started.
struct Open {
    operation: Operation,
    done: bool,
    /// Nobody wants the results; the other members need this one to go on.
    given_up: bool,
}

/// Names a collective that was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ticket(u64);

impl State {
    /// The wire and the mail, until the end.
    fn wired(&mut self) -> Result<(&mut Wire, &mut Mail), Cause> {
        let Self { me, wire, mail, .. } = self;
        wire.as_mut().map(|wire| (wire, mail)).ok_or(Cause::Returned { rank: *me })
    }

    /// Lets MPI go on, and every collective that can; tells whether anything moved.
    fn turn(&mut self) -> Result<bool, Cause> {
        let Self { me, wire: Some(wire), mail, open, .. } = self else { return Ok(false) };
        let mut came = false;
        let moved = wire.poll(|from, header, data| {
            mail.put(from, header, data);
            came = true;
        });
        let moved = moved.map_err(|error| Cause::Failed { rank: *me, message: format!("MPI: {error}") })?;
        if came {
            for open in open.values_mut().filter(|open| !open.done) {
                open.done = open.operation.advance(wire, mail)?;
            }
            open.retain(|_, open| !(open.done && open.given_up));
        }
        Ok(moved)
    }

    /// Whether others may wait for something that this process has yet to do.
    fn is_busy(&self) -> bool {
        self.wire.as_ref().is_some_and(Wire::is_sending) || self.open.values().any(|open| !open.done)
    }
}

impl Engine {
    pub(super) fn new(control: Arc<Control>, wire: Wire, crowded: bool) -> Self {
        let state =
            State { me: control.rank(), wire: Some(wire), mail: Mail::default(), open: HashMap::new(), started: 0 };
        Self { control, state: Mutex::new(state), waiting: AtomicUsize::new(0), crowded }
    }

    pub(super) fn control(&self) -> &Arc<Control> {
        &self.control
    }

    /// An error if the world has stopped.
    pub(super) fn check(&self) -> Result<()> {
        self.control.failure().map_or(Ok(()), |failure| Err(Error::Group(failure)))
    }

    /// Does something with the state; what goes wrong there stops the world.
    fn with<R>(&self, change: impl FnOnce(&mut State) -> Result<R, Cause>) -> Result<R> {
        let changed = change(&mut self.state.lock());
        changed.map_err(|cause| self.control.fail(cause))
    }

    /// Waits until `look` finds something.
    fn until<R>(&self, mut look: impl FnMut(&mut State) -> Result<Option<R>, Cause>) -> Result<R> {
        let _waiting = Waiting::new(&self.waiting);
        let (me, timeout) = (self.control.rank(), self.control.timeout());
        let mut patience = Patience::new(self.crowded);
        loop {
            self.check()?;
            let found = self.with(|state| {
                state.turn()?;
                look(state)
            })?;
            if let Some(found) = found {
                return Ok(found);
            }
            if patience.waited() >= timeout {
                return Err(self.control.fail(Cause::TimedOut { rank: me, after: timeout }));
            }
            patience.pause();
        }
    }

    /// Sends the first messages of a collective.
    pub(super) fn start(&self, circle: &Arc<Circle>, number: u64, call: Call, tensors: Tensors) -> Result<Ticket> {
        self.check()?;
        self.with(|state| {
            let (wire, mail) = state.wired()?;
            let mut operation = Operation::start(circle, number, call, tensors, wire)?;
            let done = operation.advance(wire, mail)?;
            state.started += 1;
            state.open.insert(state.started, Open { operation, done, given_up: false });
            Ok(Ticket(state.started))
        })
    }

    /// Whether the collective is done.
    pub(super) fn is_ready(&self, ticket: Ticket) -> Result<bool> {
        self.check()?;
        self.with(|state| {
            state.turn()?;
            Ok(state.open.get(&ticket.0).is_none_or(|open| open.done))
        })
    }

    /// Waits for the results of a collective.
    pub(super) fn finish(&self, ticket: Ticket) -> Result<Results> {
        self.until(|state| match state.open.get(&ticket.0) {
            Some(open) if !open.done => Ok(None),
            _ => Ok(state.open.remove(&ticket.0)),
        })
        .map(|open| open.operation.into_results())
    }

    /// Lets a collective end by itself.
    pub(super) fn give_up(&self, ticket: Ticket) {
        if let Some(open) = self.state.lock().open.get_mut(&ticket.0) {
            open.given_up = true;
        }
    }

    /// Sends `tensor` to `call.peer`, without waiting.
    pub(super) fn send(&self, circle: &Circle, call: &Call, tensor: &Tensor) -> Result<()> {
        self.check()?;
        let to = call.peer.unwrap_or(circle.me);
        let _entered = self.enter_message(circle, circle.me, to, call)?;
        let data = Fresh::copy_of(tensor)?.into_cpu()?.0;
        let header = Header {
            group: circle.id,
            slot: Slot::Tag(call.tag),
            signature: Signature::of_message(call),
            dtype: tensor.dtype(),
            len: tensor.elem_count(),
        };
        self.with(|state| {
            state.wired()?.0.post(&[circle.ranks[to]], header, data).map_err(|error| circle.failed(error))
        })
    }

    /// Waits for the next tensor of `call.peer`.
    pub(super) fn receive(&self, circle: &Circle, call: &Call) -> Result<Tensor> {
        self.check()?;
        let from = call.peer.unwrap_or(circle.me);
        let _entered = self.enter_message(circle, from, circle.me, call)?;
        let slot = Slot::Tag(call.tag);
        let (header, storage) = self.until(|state| Ok(state.mail.take(circle.id, circle.ranks[from], slot)))?;
        let shape = Shape::from(call.shape.as_slice());
        let Some(what) = header.signature.difference(&Signature::of_message(call)) else {
            return Ok(Fresh::host(storage, shape).into_tensor());
        };
        let (rank, reference) = (circle.my_rank(), circle.ranks[from]);
        Err(self.control.fail(Cause::Mismatch { rank, reference, what }))
    }

    /// Tells the world that this rank is in the next message from one member to another.
    fn enter_message(&self, circle: &Circle, from: usize, to: usize, call: &Call) -> Result<Entered<'_>> {
        let ends = [circle.ranks[from], circle.ranks[to]];
        let (channel, nth) = self.control.message(circle.id, ends[0], ends[1], call.tag);
        self.control.enter(channel, &ends, nth, call)
    }

    /// Lets MPI go on if nobody else does; tells whether to look again soon.
    pub(super) fn tend(&self) -> Result<bool> {
        if self.waiting.load(Ordering::Relaxed) > 0 {
            return Ok(false);
        }
        self.with(|state| Ok(state.turn()? || state.is_busy()))
    }

    /// Whether others may wait for something that this process has yet to do.
    pub(super) fn is_busy(&self) -> bool {
        self.state.lock().is_busy()
    }

    /// Takes the wire away, for the end.
    pub(super) fn take_wire(&self) -> Option<Wire> {
        self.state.lock().wire.take()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if let Some(wire) = self.take_wire() {
            wire.abandon();
        }
    }
}

/// Counts a thread that waits.
struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
