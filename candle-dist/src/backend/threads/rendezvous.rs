//! The rounds in which the members of a group meet.
//!
//! Every member makes the same rounds in the same order: its n-th call is part of round n. To *start* a round a member
//! adds its offer: the call and its tensors. To *finish* it, the member waits until all offers are there, checks that
//! the calls agree, reads the peers' tensors, and marks that it has left. A blocking call then waits until all have
//! left. Only then may an operand change again, so results are right even if an optimizer writes to a `Var` right after
//! the call. Several rounds may be open at once: these are the started calls.
use super::loan::{Loan, LoanGuard};
use super::mailbox::MessageQueues;
use super::members::{Wait, WaitCondition, WorldState};
use super::rounds::{Addresses, Offer, Round, RoundCursor, RoundStart};
use super::wait::{EventCount, poll};
use crate::backend::collective::{MemberTensors, Operands};
use crate::backend::device::check_shared;
use crate::backend::storage::{StorageOperand, address};
use crate::backend::{Call, Tensors};
use crate::{Cause, Error, Result};
use candle_core::{DeviceLocation, Tensor};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a parked rank sleeps before it checks again.
const TICK: Duration = Duration::from_millis(100);
/// How long no rank may make progress before a world counts as deadlocked.
const GRACE: Duration = Duration::from_millis(400);

/// One group of ranks: its rounds and its mailboxes.
pub(super) struct GroupState {
    world: Arc<WorldState>,
    ranks: Vec<usize>,
    start: RoundStart,
    pub(super) mail: Mutex<MessageQueues>,
    event: EventCount,
}

/// The tensors of all members that gave some, in group order.
pub(super) struct MemberOffers<'a>(SmallVec<[(LoanGuard<'a, Tensors>, &'a Addresses); 8]>);

impl MemberOffers<'_> {
    /// Returns the tensors of all members.
    fn all(&self) -> impl Iterator<Item = &Tensor> + Clone {
        self.0.iter().flat_map(|(tensors, _)| tensors.iter())
    }
}

impl MemberTensors for MemberOffers<'_> {
    fn nth(&self, i: usize) -> Operands<'_> {
        let given = self.0.iter().filter(|(tensors, _)| i < tensors.len());
        given
            .map(|(tensors, addresses)| StorageOperand { tensor: &tensors[i], address: addresses[i] })
            .collect()
    }
}

impl GroupState {
    /// Adds `rank` to a group, and returns its walk along the rounds.
    pub(super) fn join(world: &Arc<WorldState>, rank: usize, ranks: &[usize]) -> (Arc<Self>, RoundCursor) {
        let group = world.join(rank, ranks, || Self {
            world: world.clone(),
            ranks: ranks.to_vec(),
            start: RoundStart::new(ranks.len()),
            mail: Mutex::default(),
            event: EventCount::default(),
        });
        let walk = group.start.walk();
        (group, walk)
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

    /// Adds member `me`'s offer to its next round, without waiting.
    ///
    /// `outputs` is the memory for its results, unless they go to new memory. A member that `lingers` finishes only when
    /// no member reads its tensors any more.
    pub(super) fn start(
        &self,
        me: usize,
        round: &Round,
        call: Arc<Call>,
        tensors: Tensors,
        outputs: &[Tensor],
        lingers: bool,
    ) -> Result<()> {
        self.world.check()?;
        let (addresses, writes) =
            (tensors.iter().map(address).collect(), outputs.iter().map(address).collect());
        self.world.begin(self.ranks[me], &call);
        let gives = !tensors.is_empty();
        round.enter(me, Offer { call, tensors: Loan::new(tensors), addresses, gives, lingers, writes });
        self.event.notify();
        Ok(())
    }

    /// Records that member `me` does other work before it finishes a started round.
    pub(super) fn pause(&self, me: usize) {
        self.world.complete(self.ranks[me]);
    }

    /// Records that member `me` returns to a round.
    pub(super) fn resume(&self, me: usize, round: &Round) {
        if let Some(offer) = round.seats()[me].offer() {
            self.world.begin(self.ranks[me], &offer.call);
        }
    }

    /// Finishes a round that member `me` has started; `read` gets its call and the offered tensors.
    ///
    /// `timeout` limits each wait, or else the timeout of the call does.
    pub(super) fn finish<R>(
        self: &Arc<Self>,
        me: usize,
        round: &Round,
        timeout: Option<Duration>,
        read: impl FnOnce(&Call, &MemberOffers<'_>) -> Result<R>,
    ) -> Result<R> {
        let mine = round.seats()[me].offer().expect("a member has offered before it finishes");
        let timeout = timeout.or(mine.call.timeout);
        self.wait(me, timeout, || round.is_complete(), || WaitCondition::Entered(round.clone()))?;
        let offers = self.agreed(me, round)?;
        // Refused here, where all calls are known to be equal, so that all members refuse.
        let result = check_device(&mine.call, offers.all())
            .and_then(|()| self.check_apart(round, &offers))
            .and_then(|()| read(&mine.call, &offers));
        drop(offers);
        self.leave(me, round);
        if mine.lingers && mine.gives {
            self.wait(me, timeout, || round.is_over(), || WaitCondition::Left(round.clone()))?;
            // SAFETY: all members have left, and read nothing of this round any more.
            drop(unsafe { mine.tensors.end() });
        }
        self.world.complete(self.ranks[me]);
        result
    }

    /// Waits until all members have entered a round that `me` has started. After `timeout` the world stops and names
    /// the missing members.
    pub(super) fn monitor(
        self: &Arc<Self>,
        me: usize,
        round: &Round,
        timeout: Option<Duration>,
    ) -> Result<()> {
        self.wait(me, timeout, || round.is_complete(), || WaitCondition::Monitored(round.clone()))?;
        let agreed = self.agreed(me, round).map(drop);
        self.leave(me, round);
        self.world.complete(self.ranks[me]);
        agreed
    }

    /// Marks that member `me` has finished a round.
    pub(super) fn leave(&self, me: usize, round: &Round) {
        if !round.leave(me) {
            return; // a call that failed after it left
        }
        self.event.notify();
        // What nobody waits to clear is freed by the last one. After the fence in `notify`, two members that leave at the
        // same moment cannot both miss the other.
        let offers = || round.seats().iter().filter_map(|seat| seat.offer());
        if offers().any(|offer| offer.gives && !offer.lingers) && round.is_over() {
            // SAFETY: all members have left, and read nothing of this round any more.
            offers().filter(|offer| !offer.lingers).for_each(|offer| drop(unsafe { offer.tensors.end() }));
        }
    }

    /// Returns the offers of a complete round to member `me`, which has not left it, or stops the world if the members'
    /// calls differ.
    fn agreed<'a>(&self, me: usize, round: &'a Round) -> Result<MemberOffers<'a>> {
        debug_assert!(!round.seats()[me].has_left());
        let offers = round.seats().iter().filter_map(|seat| seat.offer());
        let mut reference: Option<&Call> = None;
        let mut tensors = SmallVec::new();
        for (member, offer) in offers.enumerate() {
            let first = *reference.get_or_insert(&offer.call);
            if let Some(what) = first.difference(&offer.call) {
                let cause = Cause::Mismatch { rank: self.ranks[member], reference: self.ranks[0], what };
                return Err(self.world.fail(cause));
            }
            // SAFETY: the loan ends when all members have left, and `me` leaves only after it has dropped the offers.
            tensors.push((unsafe { offer.tensors.read() }, &offer.addresses));
        }
        Ok(MemberOffers(tensors))
    }

    /// Refuses outputs in memory that another member reads or writes: on all members alike, before any has written.
    fn check_apart(&self, round: &Round, offers: &MemberOffers<'_>) -> Result<()> {
        let offer = |seat: usize| round.seats()[seat].offer().map(|offer| (seat, offer));
        let writes: SmallVec<[(usize, usize); 8]> = (0..round.seats().len())
            .filter_map(offer)
            .flat_map(|(member, offer)| offer.writes.iter().map(move |&place| (member, place)))
            .collect();
        for (i, &(member, place)) in writes.iter().enumerate() {
            let read = offers.0.iter().any(|(_, addresses)| addresses.contains(&place));
            if read || writes[..i].iter().any(|&(_, other)| other == place) {
                let (rank, other) = (self.ranks[member], if read { "an input" } else { "another output" });
                let reason = format!(
                    "the output of rank {rank} lies in the memory of {other}; give memory of its own"
                );
                return Err(Error::Unsupported(reason));
            }
        }
        Ok(())
    }

    pub(super) fn is_ready(&self, on: &WaitCondition) -> bool {
        match on {
            WaitCondition::Entered(round) | WaitCondition::Monitored(round) => round.is_complete(),
            WaitCondition::Left(round) => round.is_over(),
            WaitCondition::Message { from, to, tag } => self.has_mail(&(*from, *to, *tag)),
            WaitCondition::AnyMessage { to, tag } => self.has_any_mail(*to, *tag),
            WaitCondition::Room { from, to, allowed } => self.has_room(*from, *to, *allowed),
        }
    }

    /// Returns whether the condition lacks something that only this member can bring.
    fn awaits(&self, on: &WaitCondition, member: usize) -> bool {
        match on {
            WaitCondition::Entered(round) | WaitCondition::Monitored(round) => {
                round.seats()[member].offer().is_none()
            }
            WaitCondition::Left(round) => !round.seats()[member].has_left(),
            WaitCondition::Message { from, .. } => *from == member && !self.is_ready(on),
            WaitCondition::Room { to, .. } => *to == member && !self.is_ready(on),
            // Any of the others may bring it; see `deserter`.
            WaitCondition::AnyMessage { .. } => false,
        }
    }

    /// Waits until the condition `on` is `ready`, or fails with the reason why it never will be.
    /// It waits at most for `timeout`, or for the world's timeout.
    pub(super) fn wait(
        self: &Arc<Self>,
        me: usize,
        timeout: Option<Duration>,
        ready: impl Fn() -> bool,
        on: impl FnOnce() -> WaitCondition,
    ) -> Result<()> {
        if poll(self.world.crowded(), || ready() || self.world.is_failed()) && ready() {
            return Ok(());
        }
        self.park(me, timeout.unwrap_or(self.world.timeout()), &on())
    }

    fn park(self: &Arc<Self>, me: usize, timeout: Duration, on: &WaitCondition) -> Result<()> {
        let world = &self.world;
        let rank = self.ranks[me];
        let began = Instant::now();
        world.set_wait(rank, Some(Wait { group: self.clone(), on: on.clone() }));
        let result = loop {
            if self.is_ready(on) {
                break Ok(());
            }
            if let Err(failure) = world.check() {
                break Err(failure);
            }
            if let Some(cause) = self.hopeless(me, on, began.elapsed(), timeout) {
                break Err(world.fail(cause));
            }
            self.event
                .sleep(TICK.min(timeout), || self.is_ready(on) || world.is_failed() || self.is_deserted(on));
        };
        world.set_wait(rank, None);
        result
    }

    /// Returns whether a member that the condition awaits has returned.
    pub(super) fn is_deserted(&self, on: &WaitCondition) -> bool {
        self.deserter(on).is_some()
    }

    fn deserter(&self, on: &WaitCondition) -> Option<usize> {
        // The awaited event may be a member's last action, so its end is checked first, then the condition.
        if let WaitCondition::AnyMessage { to, .. } = on {
            let mut others = (0..self.ranks.len()).filter(|member| member != to);
            let all_gone = others.clone().all(|member| self.world.has_returned(self.ranks[member]));
            return if all_gone && !self.is_ready(on) {
                others.next().map(|other| self.ranks[other])
            } else {
                None
            };
        }
        let gone = |&member: &usize| self.world.has_returned(self.ranks[member]) && self.awaits(on, member);
        (0..self.ranks.len()).find(gone).map(|member| self.ranks[member])
    }

    /// Returns the reason why more waiting is pointless, if there is one.
    fn hopeless(&self, me: usize, on: &WaitCondition, waited: Duration, timeout: Duration) -> Option<Cause> {
        if let Some(rank) = self.deserter(on) {
            return Some(Cause::Returned { rank });
        }
        if waited >= timeout {
            let WaitCondition::Monitored(_) = on else {
                return Some(Cause::TimedOut { rank: self.ranks[me], after: timeout });
            };
            let missing = (0..self.ranks.len()).filter(|&member| self.awaits(on, member));
            let ranks: Vec<usize> = missing.map(|member| self.ranks[member]).collect();
            // The last one may have arrived just now.
            return (!ranks.is_empty()).then_some(Cause::Missing { ranks, after: timeout });
        }
        (waited >= GRACE && self.world.is_stuck()).then_some(Cause::Deadlock)
    }
}

/// Refuses tensors that threads cannot read.
pub(super) fn check_device<'a>(call: &Call, tensors: impl Iterator<Item = &'a Tensor> + Clone) -> Result<()> {
    let device = call.device;
    match device {
        DeviceLocation::Cpu if tensors.clone().all(|tensor| tensor.device().is_cpu()) => Ok(()),
        DeviceLocation::Cpu | DeviceLocation::Cuda { .. } if cfg!(feature = "cuda") => {
            check_shared(call.op(), tensors)
        }
        _ => {
            let op = call.op();
            let fix = "move them to Device::Cpu first";
            Err(Error::Unsupported(format!("{op} of tensors on {device:?} among threads; {fix}")))
        }
    }
}
