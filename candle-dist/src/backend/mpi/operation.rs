//! A running collective, which advances when a message arrives.
use super::header::{Body, CallDigest, MessageHeader, MessageSlot};
use super::known::CallPlan;
use super::mail::Mail;
use super::plan::Member;
use super::progress::{PartOwner, TensorProgress};
use super::transfer::TransferMemory;
use super::wire::{LetterData, Wire};
use super::work::bytes_of;
use crate::Cause;
use crate::backend::guards::Hold;
use crate::backend::{Call, Results};
use crate::control::Membership;
use candle_core::{StorageRef, Tensor};
use smallvec::SmallVec;
use std::sync::Arc;
use std::time::Duration;

/// A group as one of its members sees it.
#[derive(Debug)]
pub(super) struct Circle {
    /// The control connection's membership in the group, until the last call on it is done.
    pub(super) _member: Membership,
    /// Equal on all members, and unique among groups.
    pub(super) id: u64,
    /// The members as ranks of the world.
    pub(super) ranks: Vec<usize>,
    /// This member.
    pub(super) me: usize,
}

impl Circle {
    /// Returns this rank in the world.
    pub(super) fn my_rank(&self) -> usize {
        self.ranks[self.me]
    }

    /// Returns this member in the form that plans use.
    pub(super) fn member(&self) -> Member {
        Member { rank: self.me, size: self.ranks.len() }
    }

    /// Returns the world's failure for an error that only this rank knows.
    pub(super) fn failed(&self, error: impl ToString) -> Cause {
        Cause::Failed { rank: self.my_rank(), message: error.to_string() }
    }

    /// Returns the world's failure if rank `from` made another call than this one.
    pub(super) fn compare(&self, from: usize, theirs: &CallDigest, mine: &CallDigest) -> Result<(), Cause> {
        let Some(what) = mine.difference(theirs) else { return Ok(()) };
        let place = |rank: usize| self.ranks.iter().position(|&member| member == rank);
        let me = self.my_rank();
        let (reference, rank) = if place(me) <= place(from) { (me, from) } else { (from, me) };
        Err(Cause::Mismatch { rank, reference, what })
    }

    /// The rank whose call this member waits for in every collective: if no two neighbors differ, all calls agree.
    fn before(&self) -> usize {
        self.ranks[(self.me + self.ranks.len() - 1) % self.ranks.len()]
    }

    /// Returns the member that waits for this one's call.
    pub(super) fn behind(&self) -> usize {
        (self.me + 1) % self.ranks.len()
    }
}

/// A contiguous input tensor on the host, which nobody writes to, and the address of its elements.
pub(super) struct HostInput {
    pub(super) hold: Hold,
    pub(super) data: *const u8,
}

impl HostInput {
    /// # Safety
    /// `guard` is a lock of the tensor's storage.
    pub(super) unsafe fn new(tensor: &Tensor, guard: &StorageRef<'_>) -> crate::Result<Self> {
        let data = bytes_of(tensor, guard)?.as_ptr();
        // SAFETY: the caller's promise.
        Ok(Self { hold: unsafe { Hold::new(tensor, guard) }, data })
    }
}

/// One collective of one group, as one member sees it.
pub(super) struct Operation {
    circle: Arc<Circle>,
    number: u64,
    known: Arc<CallPlan>,
    parts: SmallVec<[TensorProgress; 1]>,
    /// Whether the neighbor's call has arrived, and agrees.
    confirmed: bool,
}

impl Operation {
    /// Starts the group's `number`-th collective: sends its first messages, and handles its messages that have arrived.
    pub(super) fn start(
        circle: &Arc<Circle>,
        number: u64,
        known: Arc<CallPlan>,
        given: SmallVec<[HostInput; 1]>,
        (wire, mail): (&mut Wire, &mut Mail),
    ) -> Result<Self, Cause> {
        let mut inputs = given.into_iter();
        let parts = known.shares.iter().map(|share| TensorProgress::new(share, inputs.next(), wire));
        let parts = parts.collect::<crate::Result<_>>().map_err(|error| circle.failed(error))?;
        let mut operation = Self { circle: circle.clone(), number, known, parts, confirmed: false };
        if operation.known.shows_itself {
            let header = operation.own(0).header(Body::Shown, 0);
            wire.post(circle.ranks[circle.behind()], &header, []).map_err(|error| circle.failed(error))?;
        }
        for letter in mail.take_round(circle.id, number) {
            operation.take(letter.from, &letter.header, LetterData::Here(&letter.data))?;
        }
        Ok(operation)
    }

    /// Returns the owner of the `nth` part.
    fn own(&self, nth: usize) -> PartOwner<'_> {
        PartOwner { circle: &self.circle, number: self.number, known: &self.known, nth }
    }

    pub(super) fn signature(&self) -> CallDigest {
        self.known.signature
    }

    pub(super) const fn circle(&self) -> &Arc<Circle> {
        &self.circle
    }

    pub(super) const fn number(&self) -> u64 {
        self.number
    }

    pub(super) fn call(&self) -> &Arc<Call> {
        &self.known.call
    }

    /// Returns the memory that MPI may use, for a collective that does not go on.
    pub(super) fn into_held(self) -> impl Iterator<Item = TransferMemory> {
        self.parts.into_iter().map(TensorProgress::into_held)
    }

    /// Handles a message of this collective.
    pub(super) fn take(
        &mut self,
        from: usize,
        header: &MessageHeader,
        data: LetterData<'_>,
    ) -> Result<(), Cause> {
        self.circle.compare(from, &header.signature, &self.known.signature)?;
        self.confirmed |= from == self.circle.before();
        let MessageSlot::Round { tensor, .. } = header.slot else { return Ok(()) };
        let nth = tensor as usize;
        let Some(part) = self.parts.get_mut(nth).filter(|_| header.body != Body::Shown) else {
            return Ok(());
        };
        let own = PartOwner { circle: &self.circle, number: self.number, known: &self.known, nth };
        part.take(own, from, header, data).map_err(|error| self.circle.failed(error))
    }

    /// Advances as far as possible with the arrived messages; returns whether all is done.
    pub(super) fn advance(&mut self, wire: &mut Wire) -> Result<bool, Cause> {
        let Self { circle, number, known, parts, .. } = self;
        let mut done = self.confirmed;
        for (nth, part) in parts.iter_mut().enumerate() {
            let own = PartOwner { circle, number: *number, known, nth };
            done &= part.advance(own, wire).map_err(|error| circle.failed(error))?;
        }
        Ok(done)
    }

    /// Returns whether MPI moves some of its data in place, which must be driven.
    pub(super) fn moves(&self) -> bool {
        self.parts.iter().any(TensorProgress::moves)
    }

    /// Returns how long a write has waited for an input.
    pub(super) fn awaited(&mut self) -> Duration {
        self.parts.iter_mut().map(TensorProgress::awaited).max().unwrap_or_default()
    }

    /// Takes the results of a complete collective, and returns its buffers for reuse.
    pub(super) fn finish(&mut self, wire: &mut Wire) -> Results {
        let made = self.parts.iter_mut().zip(&self.known.shares);
        made.filter_map(|(part, share)| part.finish(share, wire)).collect()
    }
}
