//! The rounds of a group, and what each member brings to one.
//!
//! Rounds lie in *stretches* of a few, and each stretch names the next one. Every member walks along this chain by
//! itself: to enter a round takes no lock, and writes no memory that another member writes. A stretch is freed when all
//! members have left it behind.
use super::loan::Loan;
use crate::backend::{Call, Tensors};
use crossbeam_utils::CachePadded;
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// The number of rounds in a stretch.
const ROUNDS: usize = 16;

/// Some rounds in a row.
///
/// Data that different members write lies on different cache lines: each line that moves between cores costs a tenth of
/// a small call.
struct Stretch {
    members: usize,
    /// The seats of the members in the first round, then those in the second, and so on.
    seats: Box<[CachePadded<Seat>]>,
    next: OnceLock<Arc<Stretch>>,
}

impl Stretch {
    fn new(members: usize) -> Arc<Self> {
        let seats = (0..members * ROUNDS).map(|_| CachePadded::default()).collect();
        Arc::new(Self { members, seats, next: OnceLock::new() })
    }
}

impl Drop for Stretch {
    /// Frees what follows one after another: a member may be far behind, and drops of drops would fill its stack.
    fn drop(&mut self) {
        let mut next = self.next.take();
        while let Some(mut stretch) = next.and_then(Arc::into_inner) {
            next = stretch.next.take();
        }
    }
}

/// A stretch as one member holds it. A member counts its handles on its own: all members would write one shared count.
struct StretchRef(Arc<Stretch>);

/// One meeting of all members: their seats.
#[derive(Clone)]
pub(super) struct Round {
    held: Arc<StretchRef>,
    first: usize,
}

/// The place of one member in a round.
#[derive(Default)]
pub(super) struct Seat {
    offer: OnceLock<Offer>,
    has_left: AtomicBool,
}

/// What a member brings to a round.
pub(super) struct Offer {
    pub(super) call: Arc<Call>,
    /// Taken back by its owner when all have left, so that a tensor is freed where it was made.
    pub(super) tensors: Loan<Tensors>,
    /// The [addresses](crate::backend::storage::address) of the tensors.
    pub(super) addresses: Addresses,
    /// Whether there are tensors, which others read.
    pub(super) gives: bool,
    /// Whether the owner waits until all have left.
    pub(super) lingers: bool,
    /// The memory that the owner writes its results to, if they go to given memory.
    pub(super) writes: Addresses,
}

/// The addresses of some tensors.
pub(super) type Addresses = SmallVec<[usize; 1]>;

impl Seat {
    /// Returns the offer of the member, once it has entered the round.
    pub(super) fn offer(&self) -> Option<&Offer> {
        self.offer.get()
    }

    pub(super) fn has_left(&self) -> bool {
        self.has_left.load(Ordering::Acquire)
    }
}

impl Round {
    /// Returns the seats of all members, in group order.
    pub(super) fn seats(&self) -> &[CachePadded<Seat>] {
        &self.held.0.seats[self.first..][..self.held.0.members]
    }

    /// Makes the offer of a member, which does so once.
    pub(super) fn enter(&self, member: usize, offer: Offer) {
        let _ = self.seats()[member].offer.set(offer);
    }

    /// Marks that a member reads no tensors of this round any more; returns false if it was marked before.
    pub(super) fn leave(&self, member: usize) -> bool {
        !self.seats()[member].has_left.swap(true, Ordering::AcqRel)
    }

    /// Returns whether all members have made their offers.
    pub(super) fn is_complete(&self) -> bool {
        self.seats().iter().all(|seat| seat.offer().is_some())
    }

    /// Returns whether all members have read the tensors they need.
    pub(super) fn is_over(&self) -> bool {
        self.seats().iter().all(|seat| seat.has_left())
    }
}

/// The start of a group's rounds, until all members have it.
pub(super) struct RoundStart(Mutex<(usize, Option<Arc<Stretch>>)>);

impl RoundStart {
    pub(super) fn new(members: usize) -> Self {
        Self(Mutex::new((members, Some(Stretch::new(members)))))
    }

    /// Returns the walk of a member. Every member calls this once.
    pub(super) fn walk(&self) -> RoundCursor {
        let (missing, first) = &mut *self.0.lock();
        *missing -= 1;
        // The last one takes it along: who keeps a stretch keeps all that follow.
        let stretch = if *missing == 0 { first.take() } else { first.clone() };
        RoundCursor {
            held: Arc::new(StretchRef(stretch.expect("a group has as many walks as members"))),
            round: 0,
        }
    }
}

/// The walk of one member along the rounds of a group.
pub(super) struct RoundCursor {
    held: Arc<StretchRef>,
    /// The next round in the stretch.
    round: usize,
}

impl RoundCursor {
    /// Returns the member's next round.
    pub(super) fn next(&mut self) -> Round {
        if self.round == ROUNDS {
            let Stretch { members, next, .. } = &*self.held.0;
            self.held = Arc::new(StretchRef(next.get_or_init(|| Stretch::new(*members)).clone()));
            self.round = 0;
        }
        self.round += 1;
        Round { held: self.held.clone(), first: (self.round - 1) * self.held.0.members }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;
    use crate::Collective;
    use std::sync::Weak;

    fn offer() -> Offer {
        let call = Arc::new(Call::new(Collective::Barrier));
        let tensors = Loan::new(Tensors::new());
        Offer {
            call,
            tensors,
            addresses: SmallVec::new(),
            gives: false,
            lingers: true,
            writes: SmallVec::new(),
        }
    }

    /// Starts the walks of two members.
    fn walks() -> [RoundCursor; 2] {
        let start = RoundStart::new(2);
        [start.walk(), start.walk()]
    }

    #[test]
    fn the_nth_round_of_each_member_is_the_same() {
        let [mut a, mut b] = walks();
        let ahead: Vec<Round> = (0..3 * ROUNDS).map(|_| a.next()).collect();
        for mine in ahead {
            let theirs = b.next();
            assert!(!theirs.is_complete());
            mine.enter(0, offer());
            assert!(theirs.seats()[0].offer().is_some() && theirs.seats()[1].offer().is_none());
            theirs.enter(1, offer());
            assert!(mine.is_complete() && !mine.is_over());
            assert!(mine.leave(0) && !mine.leave(0) && theirs.leave(1));
            assert!(mine.is_over() && theirs.is_over());
        }
    }

    #[test]
    fn stretches_that_all_members_have_left_behind_are_freed() {
        let [mut a, mut b] = walks();
        let first: Weak<Stretch> = Arc::downgrade(&a.held.0);
        let kept = a.next();
        for walk in [&mut a, &mut b] {
            (0..2 * ROUNDS).for_each(|_| drop(walk.next()));
        }
        assert!(first.upgrade().is_some(), "a round keeps its stretch");
        drop(kept);
        assert!(first.upgrade().is_none());
    }

    #[test]
    fn a_member_that_is_far_behind_frees_a_long_chain() {
        let [mut a, b] = walks();
        (0..1_000_000).for_each(|_| drop(a.next()));
        drop(a);
        drop(b);
    }
}
