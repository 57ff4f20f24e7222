//! The part of the backend that all groups of a process share: open operations, arrived messages, and waiting.
//!
//! Waiting threads drive MPI for all threads of the process. When none waits, a background thread does, so that started
//! calls progress while the program computes.
use super::header::{Body, CallDigest, MessageHeader, MessageSlot};
use super::known::CallPlan;
use super::native::MpiRequest;
use super::open::{AwaitedEvent, CollectiveId, DriverState};
use super::operation::{Circle, HostInput, Operation};
use super::patience::Patience;
use super::room::UninitBuffer;
use super::transfer::TransferMemory;
use super::wire::{IncomingLetter, LetterData, Wire};
use crate::backend::{Call, Fresh, Results};
use crate::control::{Control, WatchGuard};
use crate::{Cause, Error, Result};
use candle_core::{Shape, Tensor};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The most collectives of a process that may be incomplete when another one is started. Each has memory here and at others.
const MOST_OPEN: usize = 4096;

/// One process's end of an MPI world.
pub(super) struct Driver {
    control: Arc<Control>,
    state: Mutex<DriverState>,
    /// The number of waiting threads, which call MPI repeatedly.
    waiting: AtomicUsize,
    /// The number of waits so far.
    waits: AtomicUsize,
    /// The number of waits when the background thread checked last.
    waits_seen: AtomicUsize,
    /// Whether there are more processes than cores on this host.
    crowded: bool,
}

impl Driver {
    pub(super) fn new(control: Arc<Control>, wire: Wire, crowded: bool) -> Self {
        let state = DriverState::new(&control, wire);
        Self {
            control,
            state: Mutex::new(state),
            waiting: AtomicUsize::new(0),
            waits: AtomicUsize::new(0),
            waits_seen: AtomicUsize::new(0),
            crowded,
        }
    }

    pub(super) fn control(&self) -> &Arc<Control> {
        &self.control
    }

    /// Returns an error if the world has stopped. MPI is then not called again, and no tensor is held any more.
    pub(super) fn check(&self) -> Result<()> {
        let Some(failure) = self.control.failure() else { return Ok(()) };
        self.state.lock().stop(&failure.cause);
        Err(Error::Group(failure))
    }

    /// Runs `change` on the state; its error stops the world.
    fn with<R>(&self, change: impl FnOnce(&mut DriverState) -> Result<R, Cause>) -> Result<R> {
        let changed = self.state.lock().changed(change);
        changed.map_err(|cause| self.control.fail(cause))
    }

    /// Waits until `look` finds something; it gets the wanted message.
    fn until<R>(
        &self,
        wanted: Option<AwaitedEvent>,
        mut look: impl FnMut(&mut DriverState, Option<IncomingLetter>) -> Result<Option<R>, Cause>,
    ) -> Result<R> {
        let _waiting = WaiterGuard::new(&self.waiting);
        self.waits.fetch_add(1, Ordering::Relaxed);
        let (me, timeout) = (self.control.rank(), self.control.timeout());
        let mut patience = Patience::new(self.crowded);
        loop {
            self.check()?;
            let found = self.with(|state| {
                let (_, letter) = state.turn(wanted)?;
                look(state, letter)
            })?;
            if let Some(found) = found {
                return Ok(found);
            }
            if patience.is_over(timeout) {
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
        known: Arc<CallPlan>,
        given: SmallVec<[HostInput; 1]>,
    ) -> Result<CollectiveId> {
        self.check()?;
        self.with(|state| {
            let wired = state.wired()?;
            let mut operation = Operation::start(circle, number, known, given, wired)?;
            let done = operation.advance(state.wired()?.0)?;
            state.groups.entry(circle.id).or_default().enter(number, operation.signature());
            state.collectives.insert((circle.id, number), operation, done);
            Ok((circle.id, number))
        })
    }

    /// Returns whether the collective is complete.
    pub(super) fn is_ready(&self, ticket: CollectiveId) -> Result<bool> {
        self.check()?;
        self.with(|state| {
            state.turn(None)?;
            Ok(state.collectives.is_done(ticket))
        })
    }

    /// Waits for the results of a collective.
    pub(super) fn finish(&self, ticket: CollectiveId) -> Result<Results> {
        self.until(Some(AwaitedEvent::Collective(ticket)), |state, _| {
            if !state.collectives.is_done(ticket) {
                return Ok(None);
            }
            let Some(mut operation) = state.collectives.remove(ticket) else {
                return Ok(Some(Results::new()));
            };
            Ok(Some(operation.finish(state.wired()?.0)))
        })
    }

    /// Waits for the oldest collectives where too many are not complete.
    pub(super) fn wait_for_room(&self) -> Result<()> {
        loop {
            let (circle, number, call) = {
                let mut state = self.state.lock();
                if state.collectives.incomplete() < MOST_OPEN {
                    return Ok(());
                }
                let Some(oldest) = state.collectives.oldest() else { return Ok(()) };
                (oldest.circle().clone(), oldest.number(), oldest.call().clone())
            };
            let ticket = (circle.id, number);
            let _entered = self.control.enter_shared(circle.id, &circle.ranks, number, &call)?;
            self.until(Some(AwaitedEvent::Collective(ticket)), |state, _| {
                Ok(state.collectives.is_done(ticket).then_some(()))
            })?;
        }
    }

    /// Lets a collective complete in the background; a complete one is removed at once.
    pub(super) fn give_up(&self, ticket: CollectiveId) {
        self.state.lock().collectives.give_up(ticket);
    }

    /// Removes a group that is no longer in use.
    pub(super) fn forget(&self, circle: &Circle) {
        self.state.lock().groups.remove(&circle.id);
    }

    /// Sends `tensor` to the receiver that the call names, without waiting.
    pub(super) fn send(&self, circle: &Circle, call: &Call, tensor: &Tensor) -> Result<()> {
        self.check()?;
        let to = call.collective.peer().unwrap_or(circle.me);
        let _entered = self.enter_message(circle, circle.me, to, call)?;
        let header = MessageHeader {
            group: circle.id,
            slot: MessageSlot::Tag(call.collective.tag()),
            signature: CallDigest::of_message(call),
            body: Body::Here,
            dtype: tensor.dtype(),
            len: tensor.elem_count(),
        };
        let (guard, _) = tensor.storage_and_layout();
        self.with(|state| {
            // SAFETY: the lock is the tensor's.
            let posted = unsafe { state.wired()?.0.post_tensor(circle.ranks[to], header, tensor, &guard) };
            posted.map_err(|error| circle.failed(error))
        })
    }

    /// Waits for the next tensor of the sender `from`.
    pub(super) fn receive(&self, circle: &Circle, call: &Call, from: usize) -> Result<Tensor> {
        self.check()?;
        let _entered = self.enter_message(circle, from, circle.me, call)?;
        let (sender, mine) = (circle.ranks[from], CallDigest::of_message(call));
        let shape = Shape::from(call.shape.as_slice());
        let address = (circle.id, sender, call.collective.tag());
        let mut held = self.until(Some(AwaitedEvent::Message(address)), |state, arrived| {
            let DriverState { wire, mail, .. } = state;
            let wire = wire.as_mut().ok_or(Cause::Returned { rank: state.me })?;
            let kept = if arrived.is_none() { mail.take_message(address) } else { None };
            let header = match (&arrived, &kept) {
                (Some(arrived), _) => arrived.header,
                (None, Some(kept)) => kept.header,
                (None, None) => return Ok(None),
            };
            if let Some(what) = header.signature.difference(&mine) {
                return Err(Cause::Mismatch { rank: circle.my_rank(), reference: sender, what });
            }
            let came = (arrived.as_ref(), kept.as_ref().map_or(&[][..], |kept| &kept.data));
            let held = receive(sender, &header, came, shape.elem_count(), wire)
                .map_err(|error| circle.failed(error))?;
            let put_back = arrived.map_or(Ok(()), |arrived| wire.put_back(arrived));
            put_back.map_err(|error| circle.failed(error))?;
            Ok(Some(held))
        })?;
        if !held.incoming.is_empty() {
            self.until(None, |state, _| {
                let done = held.poll(state.wired()?.0.comm()).map_err(|error| circle.failed(error))?;
                Ok(done.then_some(()))
            })?;
        }
        let room = held.result.take().ok_or_else(|| Error::Unsupported("a message without data".into()))?;
        // SAFETY: MPI, or `receive`, has written all elements, and is done with them.
        let storage = unsafe { room.filled()? };
        Ok(Fresh::host(storage, shape).into_tensor())
    }

    /// Records that this rank is in the next message from one member to another.
    fn enter_message(&self, circle: &Circle, from: usize, to: usize, call: &Call) -> Result<WatchGuard<'_>> {
        let ends = [circle.ranks[from], circle.ranks[to]];
        let (channel, nth) = self.control.message(circle.id, ends[0], ends[1], call.collective.tag());
        self.control.enter(channel, &ends, nth, call)
    }

    /// Drives MPI if no other thread does; returns whether to check again soon.
    pub(super) fn tend(&self) -> Result<bool> {
        // If calls follow one another, their threads suffice, and this thread would take the lock from them.
        let waits = self.waits.load(Ordering::Relaxed);
        let waited = self.waits_seen.swap(waits, Ordering::Relaxed) != waits;
        if waited || self.waiting.load(Ordering::Relaxed) > 0 {
            return Ok(false);
        }
        self.with(|state| Ok(state.turn(None)?.0 || state.is_busy()))
    }

    /// Stops the world if a write of this program waits too long for MPI.
    pub(super) fn check_writes(&self) -> Result<()> {
        self.with(|state| state.check_writes(self.control.timeout()))
    }

    /// Drives MPI at the end, when this rank makes no more calls. Returns whether anything moved.
    pub(super) fn wind_up(&self) -> Result<bool> {
        self.check()?;
        let has_left = |circle: &Circle, number| {
            circle.ranks.iter().any(|&rank| self.control.has_left(rank, circle.id, number))
        };
        self.with(|state| state.wind_up(has_left))
    }

    /// Starts a barrier of all ranks at their ends.
    pub(super) fn start_farewell(&self) -> Result<MpiRequest> {
        self.with(|state| {
            let me = state.me;
            let started = state.wired()?.0.comm().barrier();
            started.map_err(|error| Cause::Failed { rank: me, message: error.to_string() })
        })
    }

    /// Returns whether a barrier is complete.
    pub(super) fn is_over(&self, farewell: &mut MpiRequest) -> Result<bool> {
        let me = self.control.rank();
        self.with(|_| {
            let tested = farewell.test();
            tested
                .map(|done| done.is_some())
                .map_err(|error| Cause::Failed { rank: me, message: error.to_string() })
        })
    }

    /// Returns whether others may wait for something that this process must still do.
    pub(super) fn is_busy(&self) -> bool {
        self.state.lock().is_busy()
    }

    /// Drops letters that no rank of this host will read.
    pub(super) fn give_up_letters(&self) {
        if let Some(wire) = &mut self.state.lock().wire {
            wire.give_up_letters();
        }
    }

    /// Takes the wire, for the end.
    pub(super) fn take_wire(&self) -> Option<Wire> {
        self.state.lock().wire.take()
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if let Some(wire) = self.take_wire() {
            wire.abandon();
        }
    }
}

/// Begins to receive a message of `len` elements, from a letter that has arrived or from data that was kept.
fn receive(
    from: usize,
    header: &MessageHeader,
    (arrived, kept): (Option<&IncomingLetter>, &[u8]),
    len: usize,
    wire: &mut Wire,
) -> Result<TransferMemory, Box<dyn std::error::Error>> {
    if header.len != len {
        return Err(format!("rank {from} sent {} elements for {len}", header.len).into());
    }
    if matches!(header.body, Body::Follows(_)) {
        return wire.receive_all(from, header);
    }
    let room = UninitBuffer::new(header.dtype, len)?;
    let address = room.data();
    let held = TransferMemory::new(None, Some(room), None);
    let data = arrived.map_or(LetterData::Here(kept), |arrived| wire.data(arrived));
    if data.len() != header.bytes() {
        return Err(format!("rank {from} sent {} bytes for {}", data.len(), header.bytes()).into());
    }
    // SAFETY: the room is as large as the data.
    unsafe { data.copy(0, address, data.len()) };
    Ok(held)
}

/// Counts a waiting thread.
struct WaiterGuard<'a>(&'a AtomicUsize);

impl<'a> WaiterGuard<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for WaiterGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
