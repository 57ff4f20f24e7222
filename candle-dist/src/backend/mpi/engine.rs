//! The part of the engine that all groups of a process share: what is open, what has come, and how to wait for it.
//!
//! Whoever waits lets MPI go on, for all threads of the process; a thread in the background does so while nobody waits,
//! so that what was started goes on while the program computes.
use super::Sums;
use super::header::{Body, Header, Signature, Slot};
use super::mail::{Letter, Mail};
use super::operation::{Circle, Given, Operation};
use super::patience::Patience;
use super::room::Room;
use super::transfer::Held;
use super::wire::Wire;
use super::work::bytes_of;
use crate::backend::{Call, Fresh, Results};
use crate::control::{Control, Entered};
use crate::{Cause, Error, Result};
use candle_core::{Shape, Tensor};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::collections::{HashMap, VecDeque};
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
    sums: Sums,
}

struct State {
    /// This rank of the world.
    me: usize,
    /// `None` after the end.
    wire: Option<Wire>,
    mail: Mail,
    /// Collectives that are not done, or whose results nobody has taken: by group and number.
    open: HashMap<(u64, u64), Open>,
    /// The groups of this rank.
    groups: HashMap<u64, Group>,
}

/// How many of a group's last calls are kept, to name what differs in a message that comes late.
const RECENT: usize = 64;

/// What is known of a group.
#[derive(Default)]
struct Group {
    /// The number of its next collective.
    next: u64,
    /// Calls before it, by number.
    recent: VecDeque<(u64, Signature)>,
}

/// A collective that was started.
struct Open {
    operation: Operation,
    done: bool,
    /// Nobody wants the results; the other members need this one to go on.
    given_up: bool,
}

/// Names a collective that was started: its group and number.
pub(super) type Ticket = (u64, u64);

impl State {
    /// The wire and the mail, until the end.
    fn wired(&mut self) -> Result<(&mut Wire, &mut Mail), Cause> {
        let Self { me, wire, mail, .. } = self;
        wire.as_mut().map(|wire| (wire, mail)).ok_or(Cause::Returned { rank: *me })
    }

    /// Lets MPI go on, and every collective that can; tells whether anything moved.
    fn turn(&mut self) -> Result<bool, Cause> {
        let Some(wire) = &mut self.wire else { return Ok(false) };
        let me = self.me;
        let failed = |error: &dyn ToString| Cause::Failed { rank: me, message: error.to_string() };
        let mut moved = wire.poll().map_err(|error| failed(&error))?;
        while let Some((came, room)) = wire.next().map_err(|error| failed(&error))? {
            let header = Header::decode(&room[..came.len]).ok_or_else(|| failed(&"a message without a header"))?;
            let data = &room[super::header::HEADER_BYTES..came.len];
            match header.slot {
                Slot::Round { number, .. } => match self.open.get_mut(&(header.group, number)) {
                    Some(open) if !open.done => open.operation.take(came.from, &header, data)?,
                    _ if self.groups.get(&header.group).is_some_and(|group| number < group.next) => {
                        return Err(self.groups[&header.group].late(me, came.from, number, &header.signature));
                    }
                    _ => self.mail.put(Letter { from: came.from, header, data: data.to_vec() }),
                },
                Slot::Tag(_) => self.mail.put(Letter { from: came.from, header, data: data.to_vec() }),
            }
            wire.listen(room).map_err(|error| failed(&error))?;
            moved = true;
        }
        let mut ended = false;
        for open in self.open.values_mut().filter(|open| !open.done) {
            open.done = open.operation.advance(wire)?;
            moved |= open.done;
            ended |= open.done && open.given_up;
        }
        if ended {
            self.open.retain(|_, open| !(open.done && open.given_up));
        }
        Ok(moved)
    }

    /// Whether others may wait for something that this process has yet to do.
    fn is_busy(&self) -> bool {
        self.wire.as_ref().is_some_and(Wire::is_sending) || self.open.values().any(|open| !open.done)
    }
}

impl Group {
    /// What a message of a collective means that is done here: its sender has made another call.
    fn late(&self, me: usize, from: usize, number: u64, theirs: &Signature) -> Cause {
        let mine = self.recent.iter().find(|(nth, _)| *nth == number).map(|(_, mine)| mine);
        let what = mine.and_then(|mine| mine.difference(theirs)).unwrap_or("call");
        Cause::Mismatch { rank: me.max(from), reference: me.min(from), what }
    }

    fn enter(&mut self, number: u64, signature: Signature) {
        self.next = number + 1;
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back((number, signature));
    }
}

impl Engine {
    pub(super) fn new(control: Arc<Control>, wire: Wire, crowded: bool, sums: Sums) -> Self {
        let state = State {
            me: control.rank(),
            wire: Some(wire),
            mail: Mail::default(),
            open: HashMap::new(),
            groups: HashMap::new(),
        };
        Self { control, state: Mutex::new(state), waiting: AtomicUsize::new(0), crowded, sums }
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
    pub(super) fn start(
        &self,
        circle: &Arc<Circle>,
        number: u64,
        call: Call,
        given: SmallVec<[Given; 1]>,
    ) -> Result<Ticket> {
        self.check()?;
        self.with(|state| {
            let wired = state.wired()?;
            let mut operation = Operation::start(circle, number, call, given, wired, self.sums)?;
            let done = operation.advance(state.wired()?.0)?;
            state.groups.entry(circle.id).or_default().enter(number, operation.signature());
            state.open.insert((circle.id, number), Open { operation, done, given_up: false });
            Ok((circle.id, number))
        })
    }

    /// Whether the collective is done.
    pub(super) fn is_ready(&self, ticket: Ticket) -> Result<bool> {
        self.check()?;
        self.with(|state| {
            state.turn()?;
            Ok(state.open.get(&ticket).is_none_or(|open| open.done))
        })
    }

    /// Waits for the results of a collective.
    pub(super) fn finish(&self, ticket: Ticket) -> Result<Results> {
        self.until(|state| match state.open.get(&ticket) {
            Some(open) if !open.done => Ok(None),
            _ => {
                let Some(mut open) = state.open.remove(&ticket) else { return Ok(Some(Results::new())) };
                Ok(Some(open.operation.finish(state.wired()?.0)))
            }
        })
    }

    /// Lets a collective end by itself; one that is done is forgotten at once.
    pub(super) fn give_up(&self, ticket: Ticket) {
        let mut state = self.state.lock();
        match state.open.get_mut(&ticket) {
            Some(open) if !open.done => open.given_up = true,
            _ => drop(state.open.remove(&ticket)),
        }
    }

    /// Forgets a group that nobody has any more.
    pub(super) fn forget(&self, circle: &Circle) {
        self.state.lock().groups.remove(&circle.id);
    }

    /// Sends `tensor` to `call.peer`, without waiting.
    pub(super) fn send(&self, circle: &Circle, call: &Call, tensor: &Tensor) -> Result<()> {
        self.check()?;
        let to = call.peer.unwrap_or(circle.me);
        let _entered = self.enter_message(circle, circle.me, to, call)?;
        let header = Header {
            group: circle.id,
            slot: Slot::Tag(call.tag),
            signature: Signature::of_message(call),
            body: Body::Here,
            dtype: tensor.dtype(),
            len: tensor.elem_count(),
        };
        let (storage, _) = tensor.storage_and_layout();
        let data = bytes_of(tensor, &storage)?;
        self.with(|state| {
            let posted = state.wired()?.0.post_tensor(circle.ranks[to], header, tensor, data);
            posted.map_err(|error| circle.failed(error))
        })
    }

    /// Waits for the next tensor of `call.peer`.
    pub(super) fn receive(&self, circle: &Circle, call: &Call) -> Result<Tensor> {
        self.check()?;
        let from = call.peer.unwrap_or(circle.me);
        let _entered = self.enter_message(circle, from, circle.me, call)?;
        let (sender, mine) = (circle.ranks[from], Signature::of_message(call));
        let shape = Shape::from(call.shape.as_slice());
        let mut coming: Option<Held> = None;
        let room = self.until(|state| {
            let held = match &mut coming {
                Some(held) => held,
                None => {
                    let Some(letter) = state.mail.take_message(circle.id, sender, call.tag) else { return Ok(None) };
                    if let Some(what) = letter.header.signature.difference(&mine) {
                        return Err(Cause::Mismatch { rank: circle.my_rank(), reference: sender, what });
                    }
                    let wire = state.wired()?.0;
                    coming.insert(receive(letter, shape.elem_count(), wire).map_err(|error| circle.failed(error))?)
                }
            };
            let done = held.poll(state.wired()?.0.comm()).map_err(|error| circle.failed(error))?;
            Ok(if done { held.result.take() } else { None })
        })?;
        // SAFETY: MPI, or `receive`, has written all elements, and is done with them.
        let storage = unsafe { room.filled()? };
        Ok(Fresh::host(storage, shape).into_tensor())
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

/// Begins to take in a message of `len` elements.
fn receive(letter: Letter, len: usize, wire: &mut Wire) -> Result<Held, Box<dyn std::error::Error>> {
    let Letter { from, header, data } = letter;
    if header.len != len {
        return Err(format!("rank {from} sent {} elements for {len}", header.len).into());
    }
    let room = Room::new(header.dtype, len)?;
    let address = room.data();
    let mut held = Held::new(None, Some(room), None);
    match header.body {
        // SAFETY: the room has the bytes that the header tells; the held one keeps it until the transfer is done, or leaves
        // it to MPI.
        Body::Follows(_) => held.incoming.push(unsafe { wire.receive(from, &header, address)? }),
        // SAFETY: the room is as large as the data.
        _ if data.len() == header.bytes() => unsafe { address.copy_from_nonoverlapping(data.as_ptr(), data.len()) },
        _ => return Err(format!("rank {from} sent {} bytes for {}", data.len(), header.bytes()).into()),
    }
    Ok(held)
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
