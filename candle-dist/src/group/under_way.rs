//! The calls of a rank on a group that are under way, to notice threads that call at the same time.
use crate::call::{Call, Op};
use crossbeam_utils::atomic::AtomicCell;
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::panic::Location;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A place in the source.
pub(super) type Site = &'static Location<'static>;

/// The calls on all handles of a group that threads of this rank are in.
///
/// Ranks match the n-th collective of each other, and the n-th message between two ranks with one tag. If two threads make
/// such calls at the same time, their order is a matter of luck, and differs between ranks. A thread that waits for a call that
/// it has started itself is in that call. Waits have no order among each other, and one thread may wait for what another one
/// has started.
#[derive(Default)]
pub(super) struct ActiveCalls {
    collective: AtomicCell<Option<Site>>,
    /// The number of `waits`, which each collective reads without the lock.
    waiting: AtomicUsize,
    waits: Mutex<SmallVec<[Site; 4]>>,
    messages: Mutex<SmallVec<[MessageCall; 4]>>,
    /// The messages that threads wait for, whose receives they have started.
    awaited: Mutex<SmallVec<[MessageCall; 4]>>,
    /// The members of groups that are being made.
    creations: Mutex<Vec<(Box<[usize]>, Site)>>,
}

/// A message that a thread sends or receives.
#[derive(Clone, Copy, PartialEq, Eq)]
struct MessageCall {
    op: Op,
    /// `None` for any rank.
    peer: Option<usize>,
    tag: u32,
    site: Site,
}

impl MessageCall {
    fn of(call: &Call) -> Self {
        Self { op: call.op(), peer: call.collective.peer(), tag: call.collective.tag(), site: call.site }
    }

    /// Returns the site of one of `others` whose order with this one matters.
    fn check(&self, others: &[Self]) -> Result<(), Site> {
        others.iter().find(|other| other.is_in_line_with(self)).map_or(Ok(()), |other| Err(other.site))
    }

    /// Returns whether the order of the two matters.
    fn is_in_line_with(&self, other: &Self) -> bool {
        let is_same_peer = self.peer == other.peer || self.peer.is_none() || other.peer.is_none();
        self.op == other.op && self.tag == other.tag && is_same_peer
    }
}

impl std::fmt::Debug for ActiveCalls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ActiveCalls({:?}, {} messages)", self.collective.load(), self.messages.lock().len())
    }
}

/// A call that is under way until this is dropped.
pub(super) struct CallGuard<'a> {
    of: &'a ActiveCalls,
    what: CallKind,
}

enum CallKind {
    Collective,
    Wait(Site),
    Message(MessageCall),
    Awaited(MessageCall),
    Creation(Box<[usize]>),
}

impl ActiveCalls {
    /// Enters a call, or returns the site of another thread's call that it must not overlap.
    pub(super) fn enter(&self, call: &Call) -> Result<CallGuard<'_>, Site> {
        if !call.collective.is_message() {
            return self.enter_collective(call.site);
        }
        let message = MessageCall::of(call);
        let mut messages = self.messages.lock();
        message.check(&messages)?;
        messages.push(message);
        drop(messages);
        let entered = CallGuard { of: self, what: CallKind::Message(message) };
        // Without this lock when `entered` ends, which takes another one.
        let checked = message.check(&self.awaited.lock());
        checked.map(|()| entered)
    }

    /// Enters a wait of a thread for a receive that it has started itself, as `enter` does.
    pub(super) fn enter_receive(&self, call: &Call) -> Result<CallGuard<'_>, Site> {
        let message = MessageCall::of(call);
        self.awaited.lock().push(message);
        let entered = CallGuard { of: self, what: CallKind::Awaited(message) };
        let checked = message.check(&self.messages.lock());
        checked.map(|()| entered)
    }

    /// Enters a call of all ranks, as `enter` does.
    fn enter_collective(&self, site: Site) -> Result<CallGuard<'_>, Site> {
        self.collective.compare_exchange(None, Some(site)).map_err(|other| other.unwrap_or(site))?;
        let entered = CallGuard { of: self, what: CallKind::Collective };
        if self.waiting.load(Ordering::SeqCst) > 0
            && let Some(&other) = self.waits.lock().first()
        {
            return Err(other);
        }
        Ok(entered)
    }

    /// Enters the creation of a group, as `enter` does. Groups of the same members are told apart by the order in which they are
    /// made; others, and calls, have no order with it.
    pub(super) fn enter_creation(&self, members: &[usize], site: Site) -> Result<CallGuard<'_>, Site> {
        let mut creations = self.creations.lock();
        if let Some((_, other)) = creations.iter().find(|(others, _)| **others == *members) {
            return Err(other);
        }
        creations.push((members.into(), site));
        Ok(CallGuard { of: self, what: CallKind::Creation(members.into()) })
    }

    /// Enters a wait of a thread for a collective that it has started itself, as `enter` does.
    pub(super) fn enter_wait(&self, site: Site) -> Result<CallGuard<'_>, Site> {
        self.waits.lock().push(site);
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let entered = CallGuard { of: self, what: CallKind::Wait(site) };
        self.collective.load().map_or(Ok(entered), Err)
    }
}

/// Removes one entry that is equal to `entry`.
fn remove<T: PartialEq>(from: &Mutex<SmallVec<[T; 4]>>, entry: &T) {
    let mut all = from.lock();
    if let Some(at) = all.iter().position(|other| other == entry) {
        all.swap_remove(at);
    }
}

impl Drop for CallGuard<'_> {
    fn drop(&mut self) {
        match &self.what {
            CallKind::Collective => self.of.collective.store(None),
            CallKind::Wait(site) => {
                self.of.waiting.fetch_sub(1, Ordering::SeqCst);
                remove(&self.of.waits, site);
            }
            CallKind::Message(message) => remove(&self.of.messages, message),
            CallKind::Awaited(message) => remove(&self.of.awaited, message),
            CallKind::Creation(members) => self.of.creations.lock().retain(|(others, _)| others != members),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;
    use crate::Collective;

    fn message(op: Op, peer: impl Into<Option<usize>>, tag: u32) -> Call {
        Call::new(match (op, peer.into()) {
            (Op::Send, Some(to)) => Collective::Send { to, tag },
            (_, from) => Collective::Recv { from, tag },
        })
    }

    #[test]
    fn calls_whose_order_matters_do_not_overlap() {
        let calls = ActiveCalls::default();
        let first = Call::new(Collective::Barrier);
        let entered = calls.enter(&first).unwrap();
        assert_eq!(calls.enter(&Call::new(Collective::Broadcast { root: 0 })).err(), Some(first.site));
        let send = message(Op::Send, 1, 7);
        let sent = calls.enter(&send).unwrap();
        let fine = [message(Op::Send, 1, 8), message(Op::Send, 2, 7), message(Op::Recv, 1, 7)];
        let others: Vec<_> = fine.iter().map(|call| calls.enter(call).unwrap()).collect();
        assert_eq!(calls.enter(&message(Op::Send, 1, 7)).err(), Some(send.site));
        assert_eq!(calls.enter(&message(Op::Recv, None, 7)).err(), Some(fine[2].site));
        drop((entered, sent, others));
        let _again = [calls.enter(&first).unwrap(), calls.enter(&send).unwrap()];
        let any = message(Op::Recv, None, 7);
        let _any = calls.enter(&any).unwrap();
        assert_eq!(calls.enter(&message(Op::Recv, 3, 7)).err(), Some(any.site));
    }

    #[test]
    fn a_wait_for_a_call_of_ones_own_does_not_overlap_calls() {
        let calls = ActiveCalls::default();
        let [first, second] = [Call::new(Collective::Barrier), Call::new(Collective::Broadcast { root: 0 })];
        let waits = [calls.enter_wait(first.site).unwrap(), calls.enter_wait(second.site).unwrap()];
        assert_eq!(calls.enter(&second).err(), Some(first.site));
        drop(waits);
        let entered = calls.enter(&second).unwrap();
        assert_eq!(calls.enter_wait(first.site).err(), Some(second.site));
        drop(entered);
        assert!(calls.enter(&first).is_ok() && calls.enter_wait(first.site).is_ok());
    }

    #[test]
    fn a_wait_for_a_receive_of_ones_own_does_not_overlap_receives() {
        let calls = ActiveCalls::default();
        let [first, second] = [message(Op::Recv, 1, 7), message(Op::Recv, 1, 7)];
        // Waits have no order.
        let waits = [calls.enter_receive(&first).unwrap(), calls.enter_receive(&first).unwrap()];
        assert_eq!(calls.enter(&second).err(), Some(first.site));
        assert_eq!(calls.enter(&message(Op::Recv, None, 7)).err(), Some(first.site));
        assert!(
            [message(Op::Send, 1, 7), message(Op::Recv, 2, 7)].iter().all(|call| calls.enter(call).is_ok())
        );
        drop(waits);
        let entered = calls.enter(&second).unwrap();
        assert_eq!(calls.enter_receive(&first).err(), Some(second.site));
        drop(entered);
        assert!(calls.enter_receive(&first).is_ok());
    }

    #[test]
    fn groups_of_the_same_members_are_made_one_after_the_other() {
        let calls = ActiveCalls::default();
        let [first, second] = [Call::new(Collective::Barrier), Call::new(Collective::Broadcast { root: 0 })];
        let _calls = [calls.enter(&first).unwrap(), calls.enter(&message(Op::Send, 1, 0)).unwrap()];
        let made = calls.enter_creation(&[0, 1], second.site).unwrap();
        assert_eq!(calls.enter_creation(&[0, 1], first.site).err(), Some(second.site));
        drop([
            calls.enter_creation(&[1, 0], first.site).unwrap(),
            calls.enter_creation(&[0], first.site).unwrap(),
        ]);
        drop(made);
        assert!(calls.enter_creation(&[0, 1], first.site).is_ok());
    }

    #[test]
    fn an_entry_takes_no_lock() {
        assert!(AtomicCell::<Option<Site>>::is_lock_free());
    }
}
