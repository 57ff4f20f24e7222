//! The rounds in which the members of a group meet.
//!
//! Each member has a slot. To make round `n` it puts its offer in the slot, sets `entered = n`, and waits until all
//! slots say `n`. It then reads the peers' offers, sets `left = n`, and waits until all slots say so: only then may an
//! operand change again, so results are right even if an optimiser writes to a `Var` right after the call.
use super::state::{On, Wait, WorldState};
use super::wait::{Event, poll};
use crate::backend::Call;
use crate::{Cause, Result};
use candle_core::Tensor;
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long a parked rank sleeps before it looks around again.
const TICK: Duration = Duration::from_millis(100);
/// How long nobody may make progress before a world counts as deadlocked.
const GRACE: Duration = Duration::from_millis(400);

/// One group of ranks: its members' slots and mailboxes.
pub(super) struct GroupState {
    world: Arc<WorldState>,
    ranks: Vec<usize>,
    slots: Box<[Slot]>,
    pub(super) mail: Mutex<Mail>,
    event: Event,
}

/// Messages by sender and receiver, oldest first.
type Mail = HashMap<(usize, usize), VecDeque<(Arc<Call>, Tensor)>>;

/// Aligned so that two members do not write to one cache line.
#[derive(Default)]
#[repr(align(128))]
struct Slot {
    entered: AtomicU64,
    left: AtomicU64,
    offer: Mutex<Option<Offer>>,
}

struct Offer {
    call: Arc<Call>,
    tensor: Option<Tensor>,
}

impl GroupState {
    pub(super) fn join(world: &Arc<WorldState>, rank: usize, ranks: &[usize]) -> Arc<Self> {
        world.join(rank, ranks, || Self {
            world: world.clone(),
            ranks: ranks.to_vec(),
            slots: ranks.iter().map(|_| Slot::default()).collect(),
            mail: Mutex::default(),
            event: Event::default(),
        })
    }

    pub(super) fn world(&self) -> &Arc<WorldState> {
        &self.world
    }

    pub(super) fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    pub(super) fn notify(&self) {
        self.event.notify();
    }

    /// Makes one round as member `me`; `read` sees the tensors that were offered, in group order.
    pub(super) fn round<R>(
        self: &Arc<Self>,
        me: usize,
        round: u64,
        call: Call,
        tensor: Option<Tensor>,
        read: impl FnOnce(&[Tensor]) -> Result<R>,
    ) -> Result<R> {
        self.world.check()?;
        let call = Arc::new(call);
        self.world.begin(self.ranks[me], call.clone());
        let slot = &self.slots[me];
        *slot.offer.lock() = Some(Offer { call: call.clone(), tensor });
        slot.entered.store(round, Ordering::Release);
        self.event.notify();
        self.wait(me, On::Entered(round))?;
        let offers = self.agreed_offers()?;
        let result = read(&offers);
        drop(offers);
        slot.left.store(round, Ordering::Release);
        self.event.notify();
        self.wait(me, On::Left(round))?;
        *slot.offer.lock() = None;
        self.world.complete(self.ranks[me]);
        result
    }

    /// The tensors of the current round, or the world's end if the members' calls differ.
    fn agreed_offers(&self) -> Result<SmallVec<[Tensor; 8]>> {
        let mut tensors = SmallVec::new();
        let mut reference: Option<Arc<Call>> = None;
        for (member, slot) in self.slots.iter().enumerate() {
            let offer = slot.offer.lock();
            let offer = offer.as_ref().expect("a slot keeps its offer until all members have left the round");
            match &reference {
                None => reference = Some(offer.call.clone()),
                Some(first) => {
                    if let Some(what) = first.difference(&offer.call) {
                        let cause = Cause::Mismatch { rank: self.ranks[member], reference: self.ranks[0], what };
                        return Err(self.world.fail(cause));
                    }
                }
            }
            tensors.extend(offer.tensor.clone());
        }
        Ok(tensors)
    }

    pub(super) fn is_ready(&self, on: On) -> bool {
        match on {
            On::Entered(round) => self.slots.iter().all(|s| s.entered.load(Ordering::Acquire) >= round),
            On::Left(round) => self.slots.iter().all(|s| s.left.load(Ordering::Acquire) >= round),
            On::Message { from, to } => self.mail.lock().get(&(from, to)).is_some_and(|queue| !queue.is_empty()),
        }
    }

    /// Whether the condition lacks something that only this member can bring.
    fn awaits(&self, on: On, member: usize) -> bool {
        match on {
            On::Entered(round) => self.slots[member].entered.load(Ordering::Acquire) < round,
            On::Left(round) => self.slots[member].left.load(Ordering::Acquire) < round,
            On::Message { from, .. } => from == member && !self.is_ready(on),
        }
    }

    /// Waits until `on` holds, or fails with the reason why it never will.
    pub(super) fn wait(self: &Arc<Self>, me: usize, on: On) -> Result<()> {
        let world = &self.world;
        if poll(world.crowded(), || self.is_ready(on) || world.is_failed()) && self.is_ready(on) {
            return Ok(());
        }
        let rank = self.ranks[me];
        let began = Instant::now();
        world.set_wait(rank, Some(Wait { group: self.clone(), on }));
        let result = loop {
            if self.is_ready(on) {
                break Ok(());
            }
            if let Err(failure) = world.check() {
                break Err(failure);
            }
            if let Some(cause) = self.hopeless(me, on, began.elapsed()) {
                break Err(world.fail(cause));
            }
            self.event.sleep(TICK.min(world.timeout()), || self.is_ready(on) || world.is_failed() || self.deserted(on));
        };
        world.set_wait(rank, None);
        result
    }

    fn deserted(&self, on: On) -> bool {
        (0..self.ranks.len()).any(|member| self.world.has_ended(self.ranks[member]) && self.awaits(on, member))
    }

    /// Why waiting on is in vain, if it is.
    fn hopeless(&self, me: usize, on: On, waited: Duration) -> Option<Cause> {
        // A member's last act before its end may be what we wait for: so first its end, then the condition.
        let gone = |&member: &usize| self.world.has_ended(self.ranks[member]) && self.awaits(on, member);
        if let Some(member) = (0..self.ranks.len()).find(gone) {
            return Some(Cause::Returned { rank: self.ranks[member] });
        }
        if waited >= self.world.timeout() {
            return Some(Cause::TimedOut { rank: self.ranks[me], after: self.world.timeout() });
        }
        (waited >= GRACE && self.world.is_stuck()).then_some(Cause::Deadlock)
    }
}
