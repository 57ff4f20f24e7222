//! Point-to-point messages: the sender leaves a tensor, the receiver takes it.
use super::members::WaitCondition;
use super::rendezvous::{GroupState, check_device};
use crate::backend::{Call, Envelope, Results, StartedCall, bytes};
use crate::{Cause, Result};
use candle_core::{DType, Tensor};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Sender, receiver and tag.
type Address = (usize, usize, u32);

/// Messages that have not been received yet.
#[derive(Default)]
pub(super) struct MessageQueues {
    /// Oldest first; no queue is empty.
    queues: HashMap<Address, VecDeque<QueuedMessage>>,
    /// Unread bytes from one member to another; none is zero.
    unread: HashMap<(usize, usize), usize>,
    sent: u64,
}

struct QueuedMessage {
    /// Counts all messages of the group.
    number: u64,
    call: Arc<Call>,
    tensor: Tensor,
}

impl MessageQueues {
    fn put(&mut self, address: Address, call: Arc<Call>, tensor: Tensor) {
        let (from, to, _) = address;
        self.sent += 1;
        if bytes(&tensor) > 0 {
            *self.unread.entry((from, to)).or_default() += bytes(&tensor);
        }
        self.queues.entry(address).or_default().push_back(QueuedMessage { number: self.sent, call, tensor });
    }

    /// Takes the oldest message at `address`. An empty queue is removed, since its tag may never be used again.
    fn take(&mut self, address: Address) -> Option<QueuedMessage> {
        let queue = self.queues.get_mut(&address)?;
        let letter = queue.pop_front()?;
        if queue.is_empty() {
            self.queues.remove(&address);
        }
        let (from, to, _) = address;
        if let Some(unread) = self.unread.get_mut(&(from, to)) {
            *unread = unread.saturating_sub(bytes(&letter.tensor));
            if *unread == 0 {
                self.unread.remove(&(from, to));
            }
        }
        Some(letter)
    }

    /// Returns the address of the oldest message for `to` with this tag, from `from` or from any rank.
    fn find(&self, from: Option<usize>, to: usize, tag: u32) -> Option<Address> {
        if let Some(from) = from {
            return self.queues.contains_key(&(from, to, tag)).then_some((from, to, tag));
        }
        let mine = self.queues.iter().filter(|((_, receiver, other), _)| (*receiver, *other) == (to, tag));
        mine.min_by_key(|(_, queue)| queue.front().map(|letter| letter.number)).map(|(address, _)| *address)
    }
}

/// A message that was sent without waiting for room.
struct UnbufferedSend {
    group: Arc<GroupState>,
    call: Arc<Call>,
    from: usize,
    to: usize,
    /// The number of unread bytes at which the wait ends.
    allowed: usize,
    timeout: Option<Duration>,
}

impl StartedCall for UnbufferedSend {
    fn is_ready(&self) -> Result<bool> {
        self.group.world().check()?;
        let (from, to, allowed) = (self.from, self.to, self.allowed);
        // A wait for a rank that has returned fails at once.
        Ok(self.group.has_room(from, to, allowed)
            || self.group.is_deserted(&WaitCondition::Room { from, to, allowed }))
    }

    fn finish(self: Box<Self>) -> Result<Results> {
        let Self { group, call, from, to, allowed, timeout } = *self;
        group.world().begin(group.ranks()[from], &call);
        group.wait_for_room(from, to, allowed, timeout)?;
        group.world().complete(group.ranks()[from]);
        Ok(Results::new())
    }

    fn set_timeout(&mut self, timeout: Duration) -> bool {
        self.timeout = Some(timeout);
        true
    }
}

impl GroupState {
    pub(super) fn has_mail(&self, address: &Address) -> bool {
        self.mail.lock().queues.contains_key(address)
    }

    pub(super) fn has_any_mail(&self, to: usize, tag: u32) -> bool {
        self.mail.lock().find(None, to, tag).is_some()
    }

    /// Returns whether at most `allowed` bytes are unread.
    pub(super) fn has_room(&self, from: usize, to: usize, allowed: usize) -> bool {
        self.mail.lock().unread.get(&(from, to)).is_none_or(|&unread| unread <= allowed)
    }

    fn wait_for_room(
        self: &Arc<Self>,
        from: usize,
        to: usize,
        allowed: usize,
        timeout: Option<Duration>,
    ) -> Result<()> {
        self.wait(
            from,
            timeout,
            || self.has_room(from, to, allowed),
            || WaitCondition::Room { from, to, allowed },
        )
    }

    /// Leaves `tensor` for the receiver that the call names; waits only if too much is unread.
    pub(super) fn send(self: &Arc<Self>, me: usize, call: Call, tensor: Tensor) -> Result<()> {
        let (call, to) = self.begin_send(me, call, &tensor)?;
        let allowed = self.world().mailbox().saturating_sub(bytes(&tensor));
        if !self.has_room(me, to, allowed) {
            self.wait_for_room(me, to, allowed, call.timeout)?;
        }
        self.deliver(me, to, call, tensor);
        Ok(())
    }

    /// Leaves `tensor` for the receiver, and never waits.
    pub(super) fn start_send(
        self: &Arc<Self>,
        me: usize,
        call: Call,
        tensor: Tensor,
    ) -> Result<Box<dyn StartedCall>> {
        let (call, to) = self.begin_send(me, call, &tensor)?;
        // One message of any size may be unread.
        let (allowed, timeout) = (self.world().mailbox().max(bytes(&tensor)), call.timeout);
        self.deliver(me, to, call.clone(), tensor);
        Ok(Box::new(UnbufferedSend { group: self.clone(), call, from: me, to, allowed, timeout }))
    }

    fn begin_send(&self, me: usize, call: Call, tensor: &Tensor) -> Result<(Arc<Call>, usize)> {
        self.world().check()?;
        check_device(&call, std::iter::once(tensor))?;
        let to = call.collective.peer().unwrap_or(me);
        let call = Arc::new(call);
        self.world().begin(self.ranks()[me], &call);
        Ok((call, to))
    }

    fn deliver(&self, me: usize, to: usize, call: Arc<Call>, tensor: Tensor) {
        self.mail.lock().put((me, to, call.collective.tag()), call, tensor);
        self.notify();
        self.world().complete(self.ranks()[me]);
    }

    /// Takes the oldest tensor that the sender which the call names, or any member, left for this one. Returns the sender
    /// too.
    pub(super) fn recv(self: &Arc<Self>, me: usize, call: Call) -> Result<(usize, Tensor)> {
        let tag = call.collective.tag();
        match call.collective.peer() {
            Some(from) => {
                let on = || WaitCondition::Message { from, to: me, tag };
                self.receive(me, Some(from), call, || self.has_mail(&(from, me, tag)), on)
            }
            None => self.receive(
                me,
                None,
                call,
                || self.has_any_mail(me, tag),
                || WaitCondition::AnyMessage { to: me, tag },
            ),
        }
    }

    fn receive(
        self: &Arc<Self>,
        me: usize,
        from: Option<usize>,
        call: Call,
        ready: impl Fn() -> bool,
        on: impl FnOnce() -> WaitCondition,
    ) -> Result<(usize, Tensor)> {
        self.world().check()?;
        let call = Arc::new(call);
        self.world().begin(self.ranks()[me], &call);
        self.wait(me, call.timeout, ready, on)?;
        let taken = {
            let mut mail = self.mail.lock();
            let address = mail.find(from, me, call.collective.tag());
            address.and_then(|address| Some((address.0, mail.take(address)?)))
        };
        let Some((from, letter)) = taken else {
            return Err(self.world().fail(Cause::Deadlock));
        };
        self.notify(); // a sender may wait for room
        let mismatch = |what| {
            let (rank, reference) = (self.ranks()[me], self.ranks()[from]);
            Err(self.world().fail(Cause::Mismatch { rank, reference, what }))
        };
        if letter.call.dtype != call.dtype {
            return mismatch("dtype");
        }
        if letter.call.shape != call.shape {
            return mismatch("shape");
        }
        self.world().complete(self.ranks()[me]);
        Ok((from, letter.tensor))
    }

    /// Describes the oldest message that `call` would receive, if it is there.
    pub(super) fn probe(&self, me: usize, call: &Call) -> Result<Option<Envelope>> {
        self.world().check()?;
        let mail = self.mail.lock();
        let Some(address) = mail.find(call.collective.peer(), me, call.collective.tag()) else {
            return Ok(None);
        };
        let Some(letter) = mail.queues.get(&address).and_then(|queue| queue.front()) else { return Ok(None) };
        let (dtype, shape) = (letter.call.dtype.unwrap_or(DType::U8), letter.tensor.shape().clone());
        Ok(Some(Envelope { from: address.0, tag: call.collective.tag(), dtype, shape }))
    }
}
